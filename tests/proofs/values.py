"""The values of expressions at many queries and keys: what everything that is said of them is compared with.

`NEAR` are all places of a short text, `FAR` those around which integers and floats of some width end. Both are read by
`kernels/shared/expression.py`, operator by operator, as a model computes; reductions over the keys, which nothing
carries, are computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcompile.expression import Expr, LeafKind, ScoreMod, expanded, program, walk
from kvcompile.kernels.shared.expression import Places, apply, cast, evaluate

HEADS = 3
_ENDS = (128, 256, 512, 1024, 2048, 4096, 2**15, 2**16, 2**20)
NEAR = tuple(range(49))
FAR = tuple(
    sorted(
        {*range(18), 31, 32, 33, 63, 64, 65, 95, 96, 100, 250, 1000, 2**21, 2**22 - 2, 2**22 - 1}
        | {end + d for end in _ENDS for d in (-1, 0, 1)}
    )
)


@dataclass(frozen=True)
class Named:
    """What stands for the tensor of a leaf in tests."""

    kind: LeafKind
    name: str
    dims: tuple[int, int, int] = (-1, -1, -1)

    @property
    def node(self) -> Named:
        return self

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Text:
    """Queries and keys at these positions, the scores between them [H, S, S], and the tensors of leaves by name."""

    at: tuple[int, ...]
    score: Tensor
    leaves: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(at: tuple[int, ...], seed: int = 0, leaves: Mapping[str, Tensor] | None = None) -> Text:
        generator = torch.Generator().manual_seed(seed)
        score = 3 * torch.randn(HEADS, len(at), len(at), generator=generator)
        return Text(at, score, leaves or {})

    @property
    def place(self) -> Tensor:
        return torch.tensor(self.at)

    def leaf(self, leaf: Named) -> Tensor:
        """The tensor of a leaf as evaluating reads it: a pair's is turned round where its keys stand first."""
        found = self.leaves[leaf.name]
        return found.mT if leaf.kind == "pair" and leaf.dims[1] > leaf.dims[2] else found

    def value(self, e: Expr) -> Tensor:
        """The value of an expression at each head, query and key: [H, S, S] of its dtype."""
        size = len(self.at)
        names: list[Named] = []

        def number(leaf: Named) -> int:
            if leaf not in names:
                names.append(leaf)
            return names.index(leaf)

        instructions, numbers = program({"it": e}, number)
        mod = ScoreMod(instructions, tuple(leaf.kind for leaf in names))
        tensors = [self.leaf(leaf) for leaf in names]
        places = Places(self.place[None], self.place[None], (HEADS, 1), tensors)
        (found,) = evaluate(mod, [numbers["it"] or 0], places, self.score[None, :, None])
        if not isinstance(found, Tensor):
            found = torch.tensor(found, dtype=e.dtype)
        assert found.dtype == e.dtype, f"{e} is {found.dtype}, not {e.dtype}"
        return found.expand(1, HEADS, 1, size, size)[0, :, 0]

    def whole(self, e: Expr) -> Tensor:
        """The same of an expression with functions of all keys of a row."""
        made: dict[Expr, Tensor] = {}
        for node in walk(expanded(e)):
            args = [made[arg] for arg in node.args]
            match node.op:
                case "reduce_sum":
                    found = args[0].sum(-1, keepdim=True)
                case "reduce_max":
                    found = args[0].amax(-1, keepdim=True)
                case "reduce_min":
                    found = args[0].amin(-1, keepdim=True)
                case "reduce_lse":
                    found = args[0].logsumexp(-1, keepdim=True)
                case "softmax" | "log_softmax":
                    logits = torch.cat([args[0], *(sink[..., :1] for sink in args[1:])], -1)
                    found = getattr(logits, node.op)(-1)[..., : args[0].shape[-1]]
                case "nan_to_num":
                    found = args[0].nan_to_num()
                case "cast":
                    found = cast(args[0], node.dtype)
                case "const" | "q" | "k" | "h" | "score" | "leaf":
                    found = self.value(node)
                case _:
                    found = apply(node.op, args, node.dtype, torch.device("cpu"))
            made[node] = found.expand(HEADS, len(self.at), len(self.at))
        return made[node]


def same(a: Tensor, b: Tensor) -> Tensor:
    """Where two results are the same to the last bit, the signs of zeros and what is no number included."""
    if not a.is_floating_point():
        return a == b
    equal = (a == b) & (a.signbit() == b.signbit())
    return equal | (a.isnan() & b.isnan())
