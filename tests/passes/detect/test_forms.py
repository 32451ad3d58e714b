"""Every form of attention that people write by hand is found and cached exactly; every mistake refused or exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import ModelError
from tests.support.decoders import BROKEN, FORMS, LONGEST, VOCAB, Decoder, Form, sdpa_twice

CHUNKS = (9, 1, 1, 30, 1, 6)


def cached(model: nn.Module, ids: Tensor) -> Tensor:
    """The rewritten model's logits, in a prompt, single tokens and chunks."""
    fast = kvcompile.optimize(
        model, recipe="baseline", max_batch=2, max_tokens=LONGEST, compile={"mode": "none"}
    )
    start, outs = 0, []
    for size in CHUNKS:
        outs.append(fast(ids[:, start : start + size]))
        start += size
    return torch.cat(outs, 1)


def check(form: Form) -> None:
    model = Decoder(form)
    for number, layer in enumerate(model.layers):
        layer.first = number == 0
    ids = torch.randint(0, VOCAB, (2, sum(CHUNKS)), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference = model(ids)
    found = cached(model, ids)
    error = float(
        (found - reference).double().square().mean().sqrt() / reference.double().square().mean().sqrt()
    )
    assert error < (1e-5 if form.dtype == torch.float32 else 2e-2), f"the logits differ by {error:.1e}"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    check(FORMS[name])


def test_a_site_attends_to_what_another_one_gives() -> None:
    check(Form(sdpa_twice))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_forms(name: str) -> None:
    """Refused with the reason, or, where the mistake is another exact attention, handled as such."""
    broken = BROKEN[name]
    if broken.refused is None:
        check(broken.form)
        return
    with pytest.raises(ModelError, match=broken.refused) as caught:
        check(broken.form)
    assert "decoders.py:" in str(caught.value) or "no softmax attention" in str(caught.value)
