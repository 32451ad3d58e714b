"""How the softmax input answers to a raw score: a scale, or a softcap around a scale, the same for every entry."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvcompile.passes.base import shape, target_name
from kvcompile.passes.probe import Refused
from kvcompile.passes.softmax_input import Sink, SoftmaxInput, keys, rows, sink_logits

_FACTORS = (1.0, 64.0, 4096.0)


def response(
    f: SoftmaxInput, sink: Sink | None, visible: Tensor, head_dim: int
) -> tuple[float, float | None]:
    """Scale and softcap: phi of the scores, the same for all entries; raises Refused where it is neither."""
    probe = _Response(f, sink, visible)
    if not bool(probe.compared.any()):
        return head_dim**-0.5, None  # every query sees its own key alone: any scale is right
    slopes = [probe.slope(factor) for factor in _FACTORS]
    straight = [slope for slope in slopes if slope is not None]
    usual = head_dim**-0.5
    same = all(math.isclose(straight[0], slope, rel_tol=probe.allowed) for slope in straight)
    if len(straight) == len(slopes) and same:
        return (usual if math.isclose(straight[1], usual, rel_tol=1e-6) else straight[1]), None
    scale, cap = probe.softcap()
    return (usual if math.isclose(scale, usual, rel_tol=1e-6) else scale), cap


class _Response:
    """Measures phi: how a visible entry of the softmax input answers to its raw score."""

    def __init__(self, f: SoftmaxInput, sink: Sink | None, visible: Tensor):
        self.f, self.sink, self.visible = f, sink, visible
        self.batch, self.seq = visible.shape[0], visible.shape[-1]
        self.size = f.prober.concrete(f.raw, self.batch, self.seq)
        generator = torch.Generator().manual_seed(self.seq)
        self.random = torch.randn(self.size, generator=generator, dtype=torch.float64).to(f.prober.device)
        self.zero = self._relative(torch.zeros_like(self.random))
        # Without sinks a row is known up to a constant: the query's own key is the reference.
        own = torch.eye(self.seq, dtype=torch.bool, device=visible.device)
        self.compared = visible if sink is not None else visible & ~own
        # What is cast to a half on the way stays rounded, however exactly it is evaluated.
        dtypes = {node.meta["val"].dtype for node in (f.raw, *f.chain) if shape(node)}
        self.allowed = 1e-2 if dtypes & {torch.float16, torch.bfloat16} else 1e-5

    def _relative(self, scores: Tensor) -> Tensor:
        found = self.f(self.batch, self.seq, scores)
        level = keys(found, self.sink)
        own = level.diagonal(dim1=-2, dim2=-1) if self.sink is None else sink_logits(found, self.sink)
        return level - own.unsqueeze(-1)

    def answer(self, scores: Tensor) -> Tensor:
        """What the scores changed, at the entries that are compared."""
        return (self._relative(scores) - self.zero)[self.compared]

    def steps(self, values: Tensor) -> Tensor:
        """What `answer` would be where phi(scores) = values."""
        values = rows(values, self.batch, values.dim() - 2)
        own = 0.0 if self.sink is not None else values.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        return (values - own).expand_as(self.visible)[self.compared]

    def slope(self, factor: float) -> float | None:
        """The slope of an affine phi at scores of that size, or None."""
        scores = factor * self.random
        x, y = self.steps(scores), self.answer(scores)
        slope = float((x * y).sum() / (x * x).sum())
        close = float((y - slope * x).abs().max()) <= self.allowed * abs(slope) * float(x.abs().max())
        return slope if close else None

    def softcap(self) -> tuple[float, float]:
        """Scale and cap of phi(t) = cap * tanh(scale * t / cap); raises Refused where phi is something else."""
        signs = torch.where(self.random > 0, 1.0, -1.0).to(self.random)
        signs = _cleared(signs, self.batch)  # the reference entry answers with phi(0) = 0
        ends = self.answer(1e8 * signs)
        where = self.compared.clone()
        if self.sink is not None:
            where &= ~torch.eye(self.seq, dtype=torch.bool, device=where.device)
            ends = ends[where[self.compared]]
        cap = float(ends.abs().max()) if ends.numel() else 0.0
        if not 0 < cap < 1e6 or float((ends.abs() - cap).abs().max()) > self.allowed * cap:
            raise Refused(self._strange(ends, where))
        small = _cleared(1e-4 * cap * self.random, self.batch)
        x, y = self.steps(small), self.answer(small)
        scale = float((x * y).sum() / (x * x).sum())
        if scale == 0:
            raise Refused(self._strange(ends, where))
        middle = _cleared((0.5 * cap / scale) * self.random.clamp(-2, 2), self.batch)
        x, y = self.steps(middle), cap * torch.atanh((self.answer(middle) / cap).clamp(-0.999999, 0.999999))
        scale = float((x * y).sum() / (x * x).sum())
        for factor in (0.1, 1.0, 3.0):
            scores = (factor * cap / scale) * self.random
            wanted = self.steps(cap * torch.tanh(scale * scores / cap))
            if float((self.answer(scores) - wanted).abs().max()) > self.allowed * factor * cap:
                raise Refused(self._strange(ends, where))
        return scale, cap

    def _strange(self, ends: Tensor, where: Tensor) -> str:
        """Say what phi is not: it may be known per head or per position."""
        for name, axis in (("heads", 1), ("positions", 2)):
            slopes = self._slopes(axis)
            if slopes is not None and max(slopes) - min(slopes) > self.allowed * max(map(abs, slopes)):
                return f"the scale of the scores differs between {name}: from {min(slopes):.4g} to {max(slopes):.4g}"
        names = list(dict.fromkeys(target_name(node) for node in self.f.chain))
        if "tanh" in names and ends.numel():
            values = torch.zeros(where.shape, dtype=torch.float64, device=where.device)
            values[where] = ends.abs()
            caps = values.amax((0, 2, 3))
            if float(caps.max() - caps.min()) > self.allowed * float(caps.max()):
                return "the softcap of the scores differs between heads, or only some have one"
        return f"the scores pass through a function that is not scale, softcap and mask ({', '.join(names)})"

    def _slopes(self, axis: int) -> list[float] | None:
        """An affine phi's slope for each index of an axis of [B, H, S, S], or None where one is not affine."""
        scores = 64.0 * self.random
        x, y = torch.zeros_like(self.zero), torch.zeros_like(self.zero)
        x[self.compared], y[self.compared] = self.steps(scores), self.answer(scores)
        found = []
        for a, b in zip(x.unbind(axis), y.unbind(axis), strict=True):
            if not bool(a.any()):
                continue
            slope = float((a * b).sum() / (a * a).sum())
            if float((b - slope * a).abs().max()) > self.allowed * abs(slope) * float(a.abs().max()):
                return None
            found.append(slope)
        return found or None


def _cleared(scores: Tensor, batch: int) -> Tensor:
    """Scores with zeros on the diagonal."""
    size = scores.shape[-1]
    return scores * ~torch.eye(size, dtype=torch.bool, device=scores.device)
