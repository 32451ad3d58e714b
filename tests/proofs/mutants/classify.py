"""Rules of passes/score_mod/classify.py made wrong."""

# ruff: noqa: E501

from __future__ import annotations

from tests.proofs.classes import masks, values
from tests.proofs.mutants.base import made

# fmt: off
CLASSIFY = [
    *made(
        "classify", (masks,),
        ('return lt(sub(Q, K), integer(window))', 'return le(sub(Q, K), integer(window))'),
        ('return lt(sub(Q, K), integer(window))', 'return lt(sub(Q, K), integer(window - 1))'),
        ('if prover.holds(seen, PAST):', 'if prover.holds(seen, OWN):'),
        ('if bound is not None and prover.holds(seen, PAST, sliding(bound)):', 'if bound is not None:'),
        ('if prover.holds(sliding(number), PAST, seen)), None)', 'if prover.holds(seen, PAST, sliding(number))), None)'),
        ('if prover.holds(chunked(number), PAST, seen) and prover.holds(seen, PAST, chunked(number)):', 'if prover.holds(chunked(number), PAST, seen):'),
        ('if prover.holds(chunked(number), PAST, seen) and prover.holds(seen, PAST, chunked(number)):', 'if prover.holds(seen, PAST, chunked(number)):'),
        ('return Masked(MaskSpec("chunked", number), None)', 'return Masked(MaskSpec("sliding", number), None)'),
        ('else MaskSpec("sliding", bound), seen)', 'else MaskSpec("sliding", bound), None)'),
    ),
    *made(
        "classify", (values,),
        ('if len(of_score) != 1:', 'if not of_score:'),
        ('scale *= factor\n', 'scale *= 1\n'),
        ('rel_tol=1e-6', 'rel_tol=1.5'),
        ('if not others:\n        return Valued(scale, cap)', 'if others:\n        return Valued(scale, cap)'),
        ('rest=summed([(1.0, score), *others])', 'rest=summed([(1.0, score), *others[1:]])'),
        ('rest=summed([(1.0, score), *others])', 'rest=summed([(factor, score), *others])'),
        ('if e.op == "score":\n        return 1.0', 'if e.op == "score":\n        return 2.0'),
        ('return None if inner is None else -inner', 'return inner'),
        ('return None if inner is None else inner * one.value', 'return None if inner is None else inner'),
        ('return None if inner is None else inner / e.args[1].value', 'return None if inner is None else inner'),
        ('    e = bare(e)\n', '    e = e.args[0].args[0] if e.op == "cast" and e.args[0].op == "cast" else bare(e)\n'),
        ('else (inner * one.value, float(one.value))', 'else (inner, float(one.value))'),
        ('else (inner * one.value, float(one.value))', 'else (inner * one.value, 1.0)'),
        ('else (inner, 1.0)', 'else (inner, 2.0)'),
        ('if not all(is_finite(term) for _, term in parts):', 'if False:'),
        ('    if with_sinks:\n', '    if False:\n'),
        ('if by_query is None or by_query is not make("neg", torch.float32, by_key):', 'if by_query is None:'),
        ('if any(variable.op in term.names for term in factors if term is not variable):', 'if False:'),
        ('if e.dtype not in (torch.float32, torch.float64):', 'if e.is_bool:'),
        ('return make("neg", torch.float32, part)', 'return part'),
        ('return make("mul", torch.float32, own, cast(other, torch.float32))', 'return own'),
    ),
]
# fmt: on
