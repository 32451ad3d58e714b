"""Guards: a graph that is right for some sizes only is never taken for one that is right for all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcompile.errors import CaptureError
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.graph import expr, target_name
from tests.coverage.configs import tiny_model
from tests.passes.capture.test_trace import VOCAB, Body, Rows, agree
from tests.support.models import NanoGPT, make


def even(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * 2 if ids.shape[1] % 2 == 0 else x


def remainder(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x if ids.shape[1] % 3 else x * 2


def twenty(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * 2 if ids.shape[1] == 20 else x


def listed(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * 2 if ids.shape[1] in (6, 20, 33) else x


def one_row(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * 2 if ids.shape[0] == 1 else x


def one_token(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * 2 if ids.shape[1] == 1 else x


def longer_than_wide(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * 2 if ids.shape[1] > ids.shape[0] else x


def many_in_all(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * 2 if ids.numel() > 400 else x


def by_powers(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    size = 1
    while size < ids.shape[1]:
        size *= 2
    return x * size


def pieces(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return torch.cat([part * number for number, part in enumerate(x.split(4, 1))], 1)


def far_length(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * 2 if ids.shape[1] == 1000 else x


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (even, r"right only where \(S % 2\) != 0 .*because of test_guards.py:\d+; 2 x 2 is outside"),
        (
            remainder,
            r"right only where \(S % 3\) != 0 .*because of test_guards.py:\d+; 2 x 3 is outside",
        ),
        (twenty, "does not compute what the model computes for 2 x 20 tokens"),
        (listed, r"does not compute what the model computes for 2 x (6|20|33) tokens"),
        (one_row, "does not compute what the model computes for 1 x 5 tokens"),
        (one_token, "does not compute what the model computes for 2 x 1 tokens"),
        (longer_than_wide, r"does not compute what the model computes for \d x \d tokens"),
        (many_in_all, r"right only where B\*S <= 400"),
        (by_powers, r"does not compute what the model computes for 1 x 5 tokens"),
        (pieces, r"does not compute what the model computes for 1 x 5 tokens"),
        (far_length, "does not compute what the model computes for 2 x 1000 tokens"),
    ],
)
def test_sizes_that_decide_are_refused(body: Body, told: str) -> None:
    with pytest.raises(CaptureError, match=told):
        capture(Rows(body))


def at_most_forty(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x * 2 if ids.shape[1] > 40 else x


def padded_to_four(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    size = ids.shape[1]
    return F.pad(x, (0, 0, 0, -size % 4))[:, :size]


def spelled_for_one(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    """Another spelling for one row, and for one token, of the same."""
    if ids.shape[0] == 1:
        return x[0][None] * 1
    return x + 0 if ids.shape[1] == 1 else x * 1


def skips_twenty(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return x + x if ids.shape[1] == 20 else x * 2


@pytest.mark.parametrize("body", [padded_to_four, spelled_for_one, skips_twenty])
def test_sizes_that_do_not_decide(body: Body) -> None:
    model = Rows(body)
    captured = capture(model)
    assert captured.max_seq_len is None
    agree(model, captured)


def test_a_bound_is_kept() -> None:
    assert capture(Rows(at_most_forty)).max_seq_len == 40
    assert capture(make(NanoGPT)).max_seq_len == 128


def sizes_of(captured: Captured) -> list[str]:
    """The k of every topk, in terms of S."""
    graph = captured.graph_module.graph
    ids = next(node for node in graph.nodes if node.op == "placeholder")
    size = expr(ids.meta["val"].shape[1])
    found = []
    for node in graph.nodes:
        if target_name(node) == "topk":
            k = node.args[1]
            found.append(str(expr(k.meta["val"] if hasattr(k, "meta") else k)).replace(str(size), "S"))
    return found


def selected(x: Tensor, k: int) -> Tensor:
    """The k best keys of every query, from scores [B, S, S]."""
    size = x.shape[1]
    seen = torch.ones(size, size, dtype=torch.bool).tril()
    scores = (x @ x.transpose(1, 2)).masked_fill(~seen, -1e9)
    best = scores.topk(k, -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & seen
    return scores.masked_fill(~chosen, -1e9).softmax(-1) @ x


def by_min(k: int) -> Body:
    return lambda self, x, ids: x + selected(x, min(k, x.shape[1]))


def by_min_of_a_list(k: int) -> Body:
    return lambda self, x, ids: x + selected(x, min([x.shape[1], k]))


def by_branch(k: int) -> Body:
    return lambda self, x, ids: x + selected(x, k if x.shape[1] >= k else x.shape[1])


@pytest.mark.few(3)
@pytest.mark.parametrize("form", [by_min, by_min_of_a_list, by_branch])
@pytest.mark.parametrize("k", [4, 11, 64, 2048])
def test_a_selection_of_k_is_one_graph_for_all_lengths(form: Body, k: int) -> None:
    model = Rows(form(k))  # type: ignore[call-arg, arg-type]
    captured = capture(model)
    assert captured.max_seq_len is None
    assert sizes_of(captured) == [f"Min(S, {k})"] or sizes_of(captured) == [f"Min({k}, S)"]
    for size in (3, 63, 64, 65, 130):
        ids = torch.randint(0, VOCAB, (2, size), generator=torch.Generator().manual_seed(size))
        with torch.no_grad():
            torch.testing.assert_close(captured.graph_module(ids)[0], model(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [8, 64])
def test_a_sparse_indexer_of_transformers(k: int) -> None:
    model = tiny_model("deepseek_v32")
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = k
    captured = capture(model)
    assert captured.max_seq_len is None
    assert [size for size in sizes_of(captured) if "S" in size] == [f"Min({k}, S)"] * 2
