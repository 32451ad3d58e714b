"""Rules of passes/score_mod/weights.py made wrong."""

# ruff: noqa: E501

from __future__ import annotations

from tests.proofs.mutants.base import made
from tests.proofs.softmaxes import softmaxes

# fmt: off
WEIGHTS = [
    *made(
        "weights", (softmaxes,),
        ('return Weights(body, sinks[0] if sinks else None)', 'return Weights(body)'),
        ('if len(zero) == 1:', 'if True:'),
        ('factor = where(condition, nothing, one) if zero[0] is yes else where(condition, one, nothing)', 'factor = where(condition, one, nothing)'),
        ('return _weighed(no if zero[0] is yes else yes, factor)', 'return _weighed(no if zero[0] is yes else yes, one)'),
        ('if arg.is_const and arg.value == 0]', 'if arg.is_const]'),
        ('"score" in factor.names or inner.renormalise is not None', '"score" in factor.names'),
        ('make("mul", torch.float32, inner.weight, factor)', 'factor'),
        ('if total.op == "reduce_lse" and bare(total.args[0]) is body:', 'if total.op == "reduce_lse":'),
        ('    if x.op == "sub":\n', '    if x.op in ("sub", "add"):\n'),
        ('return _weighed(top, const(1 / bottom.value, torch.float32))', 'return weights_of(top)'),
        ('part.op == "reduce_sum" and bare(part.args[0]) is top', 'part.op == "reduce_sum"'),
        ('renormalise=float(sum(part.value for part in extra)),', 'renormalise=0.0,'),
        ('if not extra:\n        return Weights(x)', 'if extra:\n        return Weights(x)'),
        ('return None if sink.names & {"k", "score"} else Weights(x, sink)', 'return Weights(x)'),
        ('if part.value <= _ROUNDING and largest and', 'if largest and'),
        ('if part.value <= _ROUNDING and largest and bare(bare(x.args[1]).args[0]) is bare(x.args[0]):', 'if part.value < 0.01:'),
        ('return Weights(x, const(math.log(part.value), torch.float32))', 'return Weights(x, const(part.value, torch.float32))'),
        ('case "exp":\n', 'case "exp" | "exp2":\n'),
    ),
]
# fmt: on
