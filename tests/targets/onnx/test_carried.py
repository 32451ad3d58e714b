"""What sites carry in exported graphs: masks and biases by arithmetic, from buffers, weights, ids and activations.

Against the model itself, each row alone: a prompt longer and one shorter than the constants in its masks, chunks,
single tokens, and beside a padded row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcompile.recipe import Recipe
from kvcompile.targets.onnx.session import Session
from kvcompile.targets.source import Source
from kvcompile.targets.tensorrt.session import Engine
from tests.fuzz.check import ROWS, feed, original, text, wrong
from tests.fuzz.decoder import build
from tests.fuzz.parts import Part
from tests.fuzz.spec import DecoderSpec, Layer
from tests.soundness.checks import EAGER
from tests.support.exports import written
from tests.support.marks import cases

LONG, SHORT = (61, 1, 7, 1, 1, 14, 1), (2, 1, 1, 3, 1)
T5 = "torch.where(d < 8, d, 8 + ((d.clamp(min=1).float() / 8).log() / math.log(8) * 8).long().clamp(max=7))"


def layer(condition: str = "", added: str = "", **more: Any) -> Layer:
    mask = Part("written", (f"(i >= j) & ({condition})" if condition else "i >= j",))
    return Layer(mask, Part("written", (added,)), spelling=EAGER) if added else Layer(mask, **more)


def decoder(*layers: Layer, seed: int = 0) -> DecoderSpec:
    return DecoderSpec(seed, layers=layers, chunks=LONG, forward="position_ids")


HEADS = "d < c.heads(5, 17, 40, 3)"
SIGNED = "((j - i) // 5 >= -2) | ((j - i) % 7 == 2) | (torch.div(j - i, 4, rounding_mode='trunc') == -4)"
WIDE = "(i * 2654435761 + j * 40503) % 1009 < 300"
DOCUMENTS = "c.at_q(c.doc()) == c.at_k(c.doc())"
HIDDEN = "~c.at_k(c.hidden()) | (d == 0)"
DECODERS = {
    "positions": decoder(
        layer("d % 3 == 0", f"c.table(16, {T5}.clamp(min=0))"),
        layer(f"({HEADS}) & ({SIGNED}) | ((d >> (h + 1)) == 1) | ({WIDE})"),
    ),
    # The seed is of a text with documents that end in its prompt and in later chunks, in both rows.
    "tokens": decoder(layer(f"({DOCUMENTS}) & ({HIDDEN})", select=Part("indexer", (8, "scatter"))), seed=142),
    "tokens, a layer each": decoder(
        layer(f"({DOCUMENTS}) & ({HIDDEN})"), layer(select=Part("indexer", (8, "scatter"))), seed=142
    ),
}
KINDS = {
    "positions": [{"table"}, {"table"}],
    "tokens": [{"query", "key", "pair"}],
    "tokens, a layer each": [{"query", "key"}, {"pair"}],
}


@pytest.mark.parametrize("name", ["tokens", "tokens, a layer each"])
def test_the_text_has_documents(name: str) -> None:
    spec = DECODERS[name]
    ends = text(spec) == spec.special.sep
    assert ends[:, : LONG[0]].any(1).all() and ends[:, LONG[0] :].any(1).all()


def exported(spec: DecoderSpec, folder: Path, target: str, **options: Any) -> Source:
    recipe = Recipe.load("baseline", max_tokens=spec.tokens, max_batch=ROWS, verify="off")
    return written(build(spec), folder, target, recipe, **options)


class Called:
    """A session as the checks of decoders call a model."""

    def __init__(self, session: Any):
        self.session, self.reset = session, session.reset

    def __call__(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.session.prefill(ids, attention_mask, keep=None)
        return logits


def check(session: Any, spec: DecoderSpec) -> None:
    called = Called(session)
    for chunks, pads in ((LONG, 9), (SHORT, 1)):
        own = replace(spec, chunks=chunks)
        ids = text(own)
        whole = original(own, ids)
        called.reset()
        assert wrong(feed(called, own, ids), whole, own) == ""
        called.reset()
        found = padded(called, ids, pads, chunks)
        assert wrong(found[:1], whole[:1], own) == ""
        assert wrong(found[1:, pads:], whole[1:, : ids.shape[1] - pads], own) == ""


def padded(called: Called, ids: Tensor, pads: int, chunks: Sequence[int]) -> Tensor:
    """The first row, and as much of the second behind its padding."""
    batch = torch.cat([ids[:1], F.pad(ids[1:, : ids.shape[1] - pads], (pads, 0))])
    mask = torch.ones_like(batch)
    mask[1, :pads] = 0
    ends = torch.tensor(chunks).cumsum(0).tolist()
    parts = zip(batch.split(list(chunks), 1), ends, strict=True)
    return torch.cat([called(part, mask[:, :end]) for part, end in parts], 1)


@pytest.mark.parametrize("name", cases(DECODERS, ("tokens",)))
def test_onnx_runtime_gives_what_the_model_gives(name: str, tmp_path: Path) -> None:
    spec = DECODERS[name]
    source = exported(spec, tmp_path / "out", "onnx")
    mods = [decision.score.mod for decision in source.plan.decisions]
    assert [None if mod is None else set(mod.leaves) for mod in mods] == KINDS[name]
    check(Session(tmp_path / "out", threads=1), spec)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_tensorrt_takes_the_same_without_plugins(name: str, tmp_path: Path) -> None:
    """The engine is built; what it was built of runs as the engine is called."""
    package = "tensorrt_rtx_bindings"
    pytest.importorskip(package)
    from tests.support.tensorrt_fake import Fake

    spec, folder = DECODERS[name], tmp_path / "out"
    exported(spec, folder, "tensorrt", package=package, compute_capabilities=["SM89"])
    fake = Fake(folder)
    check(Engine(folder, device="cpu", trt=fake.trt, gpu=fake.gpu), spec)
