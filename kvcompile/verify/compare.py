"""Errors against their budgets.

    error  = RMS(x - oracle) / RMS(oracle)                 at real tokens, of a site's outputs or the logits
    budget = MARGIN (RMS(disturbed - oracle) / RMS(oracle) + eps)

A choice by scores is right where no token that went has a score above one that stayed, but for how far scores move in
the disturbed oracles.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.errors import VerificationError
from kvcompile.kernels.oracle.choice import Choice
from kvcompile.plan import Plan
from kvcompile.verify.runs import REPORT, Run

# How many times the disturbed oracle's error a correct rewrite may have. Correct ones were seen to have a tenth
# of the budget in float32 and a fifth in half precision; a token too many or too few in a mask has 10 times it.
MARGIN = {torch.float32: 8.0, torch.bfloat16: 2.0, torch.float16: 2.0}


@dataclass(frozen=True)
class Check:
    """One comparison: relative RMS errors, and the budget measured for them.

    noise: of the logits, by which their budget was measured
    note:  what was run, and what was left out and why; empty: all of it
    """

    name: str
    tokens: int
    error: float
    budget: float
    worst_layer: int | None
    seconds: float
    noise: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        errors = f"error {self.error:.1e} of {self.budget:.1e} allowed"
        note = f"; {self.note}" if self.note else ""
        return f"{self.name}: {errors}, {self.tokens:,} tokens, {self.seconds:.1f} s{note}"


def allowed(noise: float, dtype: torch.dtype) -> float:
    """The error that is allowed where disturbed oracles have `noise`."""
    return float(MARGIN[dtype] * (noise + torch.finfo(dtype).eps))


def compare(
    name: str,
    got: Run,
    oracle: Run,
    noisy: Sequence[Run],
    pads: Tensor,
    plan: Plan,
    started: float,
    keep: Tensor | None = None,
    note: str = "",
) -> Check:
    """Errors against their budgets, site by site and then the logits; the first that exceeds raises.

    keep: the positions whose logits there are, where not all
    """
    sites = got.sites
    tokens = oracle.logits.shape[1] if keep is None else int(keep.max()) + 1
    tokens = int(sites[0].shape[2]) if sites else tokens
    real = torch.arange(tokens, device=pads.device) >= pads[:, None]
    of_logits = real if keep is None else real[:, keep]
    logits_noise = 0.0
    worst: tuple[float, float, float, int | None] = (-1.0, 0.0, 0.0, None)
    rows: list[tuple[int | None, Tensor, Tensor, list[Tensor]]] = [
        (plan.decisions[i].layer, g, o, [n.sites[i] for n in noisy])
        for i, (g, o) in enumerate(zip(got.sites, oracle.sites, strict=True))
    ]
    if oracle.logits.shape[-1]:  # none where only some of the sites have run
        rows.append((None, got.logits, oracle.logits, [n.logits for n in noisy]))
    for layer, g, o, n in rows:
        where = real[:, None, :] if layer is not None else of_logits
        error, noise = relative(g, o, where), max(relative(x, o, where) for x in n)
        budget = allowed(noise, o.dtype)
        logits_noise = noise if layer is None else logits_noise
        if not error <= budget:
            raise VerificationError(failure(name, layer, error, budget, plan), layer, error)
        if error / budget > worst[0]:
            worst = (error / budget, error, budget, layer)
    for layer, choices in oracle.choices.items():
        _check_choices(name, layer, choices, [n.choices[layer] for n in noisy], plan)
    seconds = time.perf_counter() - started
    return Check(name, tokens, worst[1], worst[2], worst[3], seconds, logits_noise, note)


def _check_choices(
    name: str, layer: int, choices: Sequence[Choice], noisy: Sequence[Sequence[Choice]], plan: Plan
) -> None:
    """Each token that went had the lowest score, as far as rounding lets one tell.

    Raises:
        VerificationError: a choice that rounding does not explain.
    """
    for number, choice in enumerate(choices):
        moved = max(float((choice.values - other[number].values).abs().max()) for other in noisy)
        size = float(choice.values.abs().max())
        budget = MARGIN[torch.float32] * (moved + torch.finfo(torch.float32).eps * size)
        if choice.excess > budget:
            decision = next(d for d in plan.decisions if d.layer == layer)
            raise VerificationError(
                f"verification {name!r} failed: layer {layer} ({decision.module_path}, {decision.source}; "
                f"{decision.layout}) gave up a token whose score is above that of one it kept, by "
                f"{choice.excess:.2e}, where rounding explains {budget:.2e}. {REPORT}",
                layer,
                choice.excess,
            )


def relative(x: Tensor, reference: Tensor, where: Tensor) -> float:
    """RMS of x - reference over RMS of reference, at real tokens."""
    if x.shape != reference.shape:
        raise VerificationError(
            f"verification failed: expected a result of shape {list(reference.shape)}, as the original's, and the "
            f"rewritten model gave {list(x.shape)}. {REPORT}"
        )
    size = reference.double()
    difference = x.double() - size
    if not bool(where.all()):
        # Of a model over several devices, each layer's results are on its own.
        hidden = ~where[..., None].to(x.device)
        difference, size = difference.masked_fill(hidden, 0), size.masked_fill(hidden, 0)
    return float(difference.norm() / size.norm().clamp(min=1e-30))


def failure(name: str, layer: int | None, error: float, budget: float, plan: Plan) -> str:
    if layer is None:
        where = "the logits differ"
    else:
        decision = next(d for d in plan.decisions if d.layer == layer)
        where = f"layer {layer} ({decision.module_path}, {decision.source}; {decision.layout}) differs"
    found = f"by {error:.2e} of its size, where rounding explains {budget:.2e}"
    return f"verification '{name}' failed: {where} {found}. {REPORT}"
