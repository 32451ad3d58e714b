"""Rules of passes/score_mod/normal_form.py made wrong."""

# ruff: noqa: E501

from __future__ import annotations

from tests.proofs.classes import inputs
from tests.proofs.mutants.base import made

# fmt: off
NORMAL_FORM = [
    *made(
        "normal_form", (inputs,),
        ('hidden = or_(hidden, condition)', 'hidden = condition'),
        ('infinite = infinite and hiding.is_infinite(value)', 'infinite = hiding.is_infinite(value)'),
        ('reach = min(reach, tokens)', 'reach = max(reach, tokens)'),
        ('prover.decided(not_(hidden))', 'not_(prover.decided(hidden)) if hidden is FALSE else TRUE'),
        ('found = where(condition, value, found)', 'found = where(condition, found, value)'),
        ('found += [(and_(not_(condition), c), v)', 'found += [(and_(condition, c), v)'),
        ('if (both := and_(condition, c)) is not FALSE', 'if (both := or_(condition, c)) is not FALSE'),
        ('kept[value] = or_(kept[value], condition) if value in kept else condition', 'kept[value] = condition'),
        ('e.op == "add" and one.value == 0', 'e.op == "add" and one.value <= 0'),
        ('one.value <= _FAR:', 'one.value <= 0:'),
        ('return terms(e.args[0], factor) + terms(e.args[1], factor)', 'return terms(e.args[0], factor) + terms(e.args[1])'),
        ('return terms(e.args[0], factor) + terms(e.args[1], -factor)', 'return terms(e.args[0], factor) + terms(e.args[1], factor)'),
        ('return terms(e.args[0], -factor)', 'return terms(e.args[0], factor)'),
        ('found = term if factor > 0 else make("neg", torch.float32, term)', 'found = term'),
        ('"add" if factor > 0 else "sub"', '"add"'),
        ('for other in (*parts[1:], *([] if own is None else [own])):', 'for other in parts[1:]:'),
        ('for other in (*parts[1:], *([] if own is None else [own])):', 'for other in [] if own is None else [own]:'),
        ('return made, None if own is None else summed(_less(own, shared))', 'return made, None if own is None else summed(own)'),
        ('            left[part] -= 1\n', '            left[part] = left[part]\n'),
        ('return not term.names & {"k", "score"} and', 'return not term.names & {"score"} and'),
    ),
]
# fmt: on
