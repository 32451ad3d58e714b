"""How far a result may be off: by twice what PyTorch is off by in the same dtype, and by rounding.

    root mean square of the error   <= 2 * that of PyTorch + eps / 2 * that of the truth
    largest error                   <= 2 * that of PyTorch + 4 * eps * the largest of the truth

eps / 2: what rounding a result to the dtype costs. The largest of many errors has several of them: of the products'
factors, of probabilities, of the result. Nothing of it is tuned: all is measured in the test that asks.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Error:
    """Of a result against the truth."""

    rms: float
    largest: float


def error(found: Tensor, truth: Tensor) -> Error:
    """found, truth: of one shape."""
    off = found.double() - truth.double()
    return Error(rms(off), float(off.abs().max()))


def budget(torchs: Tensor, truth: Tensor, dtype: torch.dtype) -> Error:
    """What a result may be off by, where PyTorch's own in `dtype` is `torchs`."""
    own, eps = error(torchs, truth), torch.finfo(dtype).eps
    return Error(
        2 * own.rms + eps / 2 * rms(truth), 2 * own.largest + 4 * eps * float(truth.double().abs().max())
    )


def within(
    ours: Tensor, torchs: Tensor, truth: Tensor, dtype: torch.dtype, what: str = "", *, few: bool = False
) -> None:
    """The check.

    Args:
        torchs: the same, computed by PyTorch in `dtype`.
        truth: the same, in a wider type.
        what: put before what went wrong.
        few: the root mean square of so few errors is luck, and only the largest is checked.

    Raises:
        AssertionError: `ours` is not finite, or off by more than the budget.
    """
    assert bool(torch.isfinite(ours).all()), f"{what} not finite"
    found, allowed = error(ours, truth), budget(torchs, truth, dtype)
    said = f"{what} off by {found}, {allowed} allowed"
    assert found.largest <= allowed.largest and (few or found.rms <= allowed.rms), said


def as_original(logits: Tensor, model: nn.Module, ids: Tensor) -> None:
    """The check of logits over `ids` against those that `model` gives in its dtype; in float64 they are the truth.

    Fewer logits are those of the last tokens. Raises as `within`.
    """
    with torch.no_grad():
        found = [own.eval()(ids) for own in (model, copy.deepcopy(model).double())]
    wanted, truth = (getattr(own, "logits", own)[:, -logits.shape[1] :] for own in found)
    within(logits, wanted, truth, wanted.dtype)


def rounding(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What each result of a linear layer may be off by, however few they are.

    It is rounded once (numbers below the least normal one lie as far apart as those above it), and sums in float32 in
    turn, of which each is (Higham and Mary 2019).
    """
    added = (0, 0) if bias is None else (bias.double(), bias.abs().double())
    wanted = x.double() @ weight.double().T + added[0]
    size = x.abs().double() @ weight.abs().double().T + added[1]
    info = torch.finfo(x.dtype)
    return info.eps * wanted.abs().clamp(min=info.tiny) + x.shape[-1] ** 0.5 * 2**-23 * size


def rms(x: Tensor) -> float:
    """Root of the mean square."""
    return float(x.double().square().mean().sqrt())
