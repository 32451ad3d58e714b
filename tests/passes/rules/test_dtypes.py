"""Operands of several dtypes: brought to one, and nothing is rounded that the model does not round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcompile import api
from kvcompile.errors import DetectionError
from kvcompile.passes.graph import shape
from kvcompile.pipeline import Front, understand
from kvcompile.recipe import Recipe
from tests.support.decoders import DIM, SCALE, VOCAB, Decoder, Form, Layer, causal, expanded, hidden, merged

HALF = torch.bfloat16
TOKENS = 40


def weighed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, H, S, D], k [B, H, D, S], v [B, H, S, D]: the weights in v's dtype, as GPT-J has them."""
    return merged(hidden(q @ k * SCALE, causal(q.shape[2])).softmax(-1).to(v.dtype) @ v)


def mixed(turned: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Form:
    def attend(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        q, k, v = turned(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return weighed(q, k.mT, v).to(HALF)

    return Form(attend, kv_heads=2, dtype=HALF)


def rotated(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rotated in float32, whatever x is."""
    angles = torch.arange(x.shape[2])[:, None] * 0.5 ** torch.arange(DIM // 2)
    a, b = x.to(dtype).chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def by_eights(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


# What is done to q, k, v; and the dtypes that the site has then, and its keys in the graph before it.
FORMS: dict[str, tuple[Form, torch.dtype, torch.dtype]] = {
    "cast": (mixed(lambda q, k, v: (q.float(), expanded(k).float(), expanded(v))), HALF, HALF),
    "cast, then repeated": (mixed(lambda q, k, v: (q.float(), expanded(k.float()), expanded(v))), HALF, HALF),
    "cast like another": (
        mixed(lambda q, k, v: (q.float(), expanded(k).type_as(torch.zeros(())), expanded(v))),
        HALF,
        HALF,
    ),
    "cast twice": (
        mixed(lambda q, k, v: (q.float().double(), expanded(k).double(), expanded(v))),
        HALF,
        HALF,
    ),
    "computed in float32": (
        mixed(lambda q, k, v: (rotated(q), expanded(rotated(k)), expanded(v))),
        torch.float32,
        torch.float32,
    ),
    "one computed, one cast": (
        mixed(lambda q, k, v: (q.float() * 1.1, expanded(k).float(), expanded(v))),
        torch.float32,
        HALF,
    ),
    "rounded on the way": (
        mixed(lambda q, k, v: (q.float(), expanded(by_eights(k).float()), expanded(v))),
        torch.float32,
        torch.float8_e4m3fn,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_operands_are_brought_to_one_dtype(form: str) -> None:
    found, dtype, before = FORMS[form]
    model = Decoder(found)
    front = understand(model)
    for site in front.sites:
        assert {node.meta["val"].dtype for node in (site.q, site.k, site.v)} == {site.dtype} == {dtype}
        if dtype == torch.float32 and before != dtype:  # the numbers are those of the model
            assert before in {n.meta["val"].dtype for n in _above(site.k, 4) if shape(n)}
    assert_equal(model, front)


def test_scores_that_are_rounded_more_than_values_are_refused() -> None:
    wide = mixed(lambda q, k, v: (q, expanded(k), expanded(v.float() * 1.1)))
    with pytest.raises(DetectionError, match="bfloat16, bfloat16, float32: scores are rounded to bfloat16"):
        understand(Decoder(wide))


def test_a_plan_has_the_dtype_that_holds_all_sites() -> None:
    model = Decoder(FORMS["cast"][0])
    model.layers[1].form = FORMS["computed in float32"][0]
    front = understand(model)
    assert {site.dtype for site in front.sites} == {torch.float32}
    assert_equal(model, front)


def test_a_rotation_starts_in_the_dtype_that_it_ends_in() -> None:
    """Llama's: x is rotated in float32 and cast back. A cache that counts its own positions rotates it itself."""

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        q, k = (rotated(x.transpose(1, 2) * 1.1).to(HALF) for x in (q, k))
        return merged(F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True))

    model = Decoder(Form(attend, dtype=HALF))
    front = understand(model)
    for site in front.sites:
        assert site.rope is not None
        assert {n.meta["val"].dtype for n in (site.rope.q_input, site.rope.k_input)} == {HALF}
    kept = {"kind": "sink_window", "sinks": 2, "window": TOKENS, "positions": "in_cache"}
    assert_equal(model, front, cache={"retention": kept})


def _above(node: Any, steps: int) -> list[Any]:
    return [node] if steps == 0 else [node, *(n for i in node.all_input_nodes for n in _above(i, steps - 1))]


def assert_equal(model: Decoder, front: Front, **changes: Any) -> None:
    """As near to the model in float32 as the model itself is, twice over; verified besides."""
    recipe = Recipe.load("baseline", max_batch=2, max_tokens=TOKENS, compile={"mode": "none"}, **changes)
    fast = api.build(model, front, recipe)
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = torch.cat([fast(part) for part in ids.split([11, 1, 1, TOKENS - 13], 1)], 1)
        original = model(ids)
    assert found.dtype == original.dtype
    # The same parts of the model, rounded as it rounds: what is left is how sums are rounded.
    assert float((found - original).float().norm() / original.float().norm()) < 2 * torch.finfo(HALF).eps
