"""Rules of passes/score_mod/site.py made wrong."""

# ruff: noqa: E501

from __future__ import annotations

from tests.proofs.mutants.base import made
from tests.proofs.softmaxes import blocks

# fmt: off
SITE = [
    *made(
        "site", (blocks,),
        ('    _check_past(form, prover)\n', '    form.seen.op  # unchecked\n'),
        ('classify.value_of(form.value, form.sink is not None, head_dim**-0.5, prover)', 'classify.value_of(form.value, False, head_dim**-0.5, prover)'),
        ('"score": valued.rest, "mask": masked.rest, "weight": weights.weight', '"score": valued.rest, "mask": None, "weight": weights.weight'),
        ('"score": valued.rest, "mask": masked.rest, "weight": weights.weight', '"score": None, "mask": masked.rest, "weight": weights.weight'),
        ('"score": valued.rest, "mask": masked.rest, "weight": weights.weight', '"score": valued.rest, "mask": masked.rest, "weight": None'),
        ('weights.renormalise,\n', 'None,\n'),
        ('all(root is None or _by_distance(root) for root in roots.values())', 'any(root is None or _by_distance(root) for root in roots.values())'),
        ('if prover.never(form.seen, _FUTURE):', 'if not prover.holds(form.seen):'),
        ('if q + k:\n                return False', 'if q + k > 9:\n                return False'),
        ('any(arg in (Q, K) for arg in node.args)', 'any(arg in (Q,) for arg in node.args)'),
        ('return torch.full((num_heads,), float(found), dtype=torch.float64)', 'return torch.zeros((num_heads,), dtype=torch.float64)'),
        ('expand(1, num_heads, 1, 1, 1).reshape(num_heads)', 'expand(1, num_heads, 1, 1, 1).reshape(num_heads).flip(0)'),
    ),
]
# fmt: on
