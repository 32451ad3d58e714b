"""Cause 9: verification drew from two ids where ids do not go straight into a table."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

import kvcompile
from tests.fuzz.decoder import build
from tests.fuzz.parts import Part
from tests.fuzz.quick import quick
from tests.fuzz.spec import DecoderSpec
from tests.soundness.checks import decoder, exact

EMBEDDINGS = (
    Part("clamped", (3,)),
    Part("clamped", (20,)),
    Part("wrapped", (50,)),
    Part("hashed"),
    Part("replaced"),
    Part("compared"),
    Part("split tables", (20,)),
    Part("one hot"),
    Part("types"),
    Part("indexed"),
)


@pytest.mark.few(2)
@pytest.mark.parametrize("embedding", EMBEDDINGS, ids=str)
def test_embeddings(embedding: Part) -> None:
    exact(decoder(embedding=embedding))


@pytest.mark.few(2)
@pytest.mark.parametrize("embedding", EMBEDDINGS[::3], ids=str)
def test_embeddings_verified(embedding: Part) -> None:
    exact(decoder(embedding=embedding), verify="quick")


@pytest.mark.few(3)
@pytest.mark.parametrize("embedding", [Part("plain"), *EMBEDDINGS], ids=str)
def test_verification_draws_from_the_whole_vocabulary(embedding: Part) -> None:
    """The original is run on ids from everywhere, so that each comparison with an id is seen both ways."""
    quick()
    spec = DecoderSpec(embedding=embedding)
    model = build(spec)
    seen: set[int] = set()

    def watch(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        for ids in (*args, *kwargs.values()):
            if type(ids) is Tensor and not is_fake(ids) and ids.dim() == 2 and ids.shape[1] > 16:
                seen.update(ids.flatten().tolist())

    hook = model.register_forward_pre_hook(watch, with_kwargs=True)
    kvcompile.optimize(model, max_tokens=512, compile={"mode": "none"}, verify="quick")
    hook.remove()
    assert len(seen) >= 30, f"only {sorted(seen)} of {spec.vocab} ids were tried"
    if embedding.name in ("replaced", "compared"):
        assert spec.special.image in seen
