"""How a module with recurrent state must be fed: proven by calling it, the same tokens in one pass and in pieces.

The results of all pieces, and the state after the last, must be those of one pass without a cache. Tried in turn:
any pieces ("together"); only single tokens ("singly", where a module ignores its state when several come); only pieces
of two at least ("in pairs", where its form for one token computes something else). What none of them holds for is
refused. Half precision is proven on a float32 copy of the module, where a difference is no rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvcompile.kernels.ops.opaque import OpaqueModule, State, TensorSpec
from kvcompile.passes.recurrent.state import StateRefused
from kvcompile.specs import Feed

# Relative RMS difference that two ways of feeding the same tokens may have. Rounding was seen below 1e-5 (float32) and
# 1e-2 (bfloat16); a lost state is far above, and what lies between would be caught by the verification.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF = 3e-2
_FLOATS = (torch.bfloat16, torch.float16)


def prove(record: OpaqueModule, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Find how a mixer must be fed; sets `feed`, `pending` and `spread` of its state.

    inputs, outputs: of a call over whole sequences, without a cache.

    Raises:
        StateRefused: however it is fed, it does not give what one pass gives.
    """
    proof = _Proof(record, inputs, outputs)
    copied = _in_float32(record) if any(out.dtype in _FLOATS for out in outputs) else None
    if copied is None:
        proof.run()
        return
    exact = [tensor.float() if tensor.dtype in _FLOATS else tensor for tensor in inputs]
    try:
        wanted = copied.run(exact)
    except RuntimeError:  # it mixes dtypes by name: half precision must do
        proof.run()
        return
    finer = _Proof(copied, exact, wanted)
    # Constants that were rounded on their own (decays and their powers) disagree by less than a rounding of results.
    finer.tolerance = max(finer.tolerance, torch.finfo(outputs[0].dtype).eps / 8)
    finer.run()
    proof.confirm(finer.state.feed)


def _in_float32(record: OpaqueModule) -> OpaqueModule | None:
    """The same on a copy of the module in float32; None where its forward is not its class's own."""
    if "forward" in vars(record.module) or record.state is None:
        return None
    module = copy.deepcopy(record.module).float()
    module.eval()

    def finer(dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in _FLOATS else dtype

    def specs(of: Sequence[TensorSpec]) -> list[TensorSpec]:
        return [replace(spec, dtype=finer(spec.dtype)) for spec in of]

    state = record.state
    copied = State(
        state.arguments,
        tuple(replace(slot, dtype=finer(slot.dtype)) for slot in state.slots),
        state.empty,
        state.warm,
        tuple(value.float() if isinstance(value, Tensor) else value for value in state.initial),
    )
    inputs, outputs = specs(record.inputs), specs(record.outputs)
    forward = module.forward
    return OpaqueModule(
        record.path, module, forward, record.reason, record.arguments, inputs, outputs, copied
    )


class _Proof:
    """The same tokens in pieces, against one pass."""

    def __init__(self, record: OpaqueModule, inputs: Sequence[Tensor], outputs: Sequence[Tensor]):
        assert record.state is not None
        self.record, self.state, self.inputs, self.outputs = record, record.state, inputs, outputs
        for what, all_specs in (("input", record.inputs), ("result", record.outputs)):
            for spec in all_specs:
                bases = [dim.base for dim in spec.dims if dim.base]
                merged = any(dim.factor > 1 for dim in spec.dims if dim.base)
                if "BS" in bases or len(set(bases)) < len(bases) or merged:
                    raise StateRefused(
                        f"{record.path} has an {what} whose sequences or tokens cannot be told apart"
                    )
        sizes = record.sizes(inputs)
        if not {"B", "S"} <= set(sizes):
            raise StateRefused(f"{record.path} takes no tensor of sequences and tokens")
        self.batch, self.tokens = sizes["B"], sizes["S"]
        self.tolerance = _TOLERANCE.get(outputs[0].dtype, _HALF)
        self.worst = 0.0

    def run(self) -> None:
        path, ones = self.record.path, [1] * self.tokens
        after_one_pass, problem = self._final()
        singly = (ones, [2, *ones[2:]], [6, *ones[6:]])
        pieces = ([6, self.tokens - 6], [1, self.tokens - 1], [2, 3, self.tokens - 5])
        if not problem and not self._differs([self.tokens], after_one_pass):
            self.state.feed = "singly"
            problems = [self._differs(each, after_one_pass) for each in singly]
            if not any(problems):
                self.state.feed = "together"
                if any(self._differs(each, after_one_pass) for each in pieces):
                    self.state.feed = "singly"
                self.state.spread = self.worst
                return
            if self._keep_pending():
                self.state.feed = "in pairs"
                if not any(self._differs(each, None) for each in (*singly, *pieces)):
                    self.state.spread = self.worst
                    return
            first = next(i for i, text in enumerate(problems) if text)
            problem = f"{singly[first][0]} tokens, then one by one: {problems[first]}"
        problem = problem or f"a pass with its cache: {self._differs([self.tokens], after_one_pass)}"
        raise StateRefused(f"{path} does not give with its state what it gives in one pass: {problem}")

    def confirm(self, feed: Feed) -> None:
        """Feed it so, and measure the spread, which is rounding."""
        self.state.feed = feed
        self.state.pending = ()
        if feed == "in pairs":
            self._keep_pending()
        after_one_pass, problem = self._final()
        final = None if feed == "in pairs" else after_one_pass
        for each in ([self.tokens], [1] * self.tokens, [6, self.tokens - 6]):
            problem = problem or self._differs(each, final)
        if problem:
            raise StateRefused(
                f"{self.record.path} does not give with its state what it gives in one pass: {problem}"
            )
        self.state.spread = self.worst

    def _final(self) -> tuple[list[Tensor], str]:
        """The state after one pass, or why there is none."""
        try:
            return self._feed([self.tokens])[1], ""
        except Exception as error:  # a module that was never called like this may raise anything
            return [], f"a pass with its cache: {type(error).__name__}: {str(error)[:200]}"

    def _keep_pending(self) -> bool:
        """Room for the inputs of one token; False where they have no batch in front."""
        running = [
            (spec, tensor)
            for spec, tensor in zip(self.record.inputs, self.inputs, strict=True)
            if spec.axis("S") is not None
        ]
        if not running or any(spec.axis("B") != 0 for spec, _ in running):
            return False
        shapes = [tuple(tensor.narrow(_seq(spec), 0, 1).shape[1:]) for spec, tensor in running]
        kept = [(shape, spec.dtype) for shape, (spec, _) in zip(shapes, running, strict=True)]
        self.state.pending = (*kept, ((), torch.int64))
        return True

    def _feed(self, pieces: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Results of all tokens, and the state after them."""
        device = self.inputs[0].device
        buffers = [
            torch.full((self.batch, *shape), 3, dtype=dtype, device=device)
            for _, shape, dtype in self.state.buffers()
        ]
        outs, start = [], 0
        for size in pieces:
            part = self.record.tokens(self.inputs, start, size)
            outs.append(
                self.record.step(part, buffers, torch.tensor([[0] * self.batch, [start] * self.batch]))
            )
            start += size
        return self.record.joined(outs), buffers

    def _differs(self, pieces: Sequence[int], final: Sequence[Tensor] | None) -> str:
        """Empty where the pieces give what one pass gives, else what differs; final: the state to expect."""
        try:
            outs, buffers = self._feed(pieces)
        except Exception as error:  # as above
            return f"{type(error).__name__}: {str(error)[:200]}"
        pairs = [
            (out, wanted)
            for out, wanted, spec in zip(outs, self.outputs, self.record.outputs, strict=True)
            if spec.axis("S") is not None
        ]
        if final is not None:
            pairs += zip(buffers, final, strict=True)
        worst = max((_difference(a, b) for a, b in pairs), default=0.0)
        if not worst <= self.tolerance:
            return f"results or state differ by {worst:.1e} of their size"
        self.worst = max(self.worst, worst)
        return ""


def _seq(spec: TensorSpec) -> int:
    axis = spec.axis("S")
    assert axis is not None
    return axis


def _difference(a: Tensor, b: Tensor) -> float:
    """RMS of a - b over RMS of b."""
    size = b.double().square().mean().sqrt().clamp(min=1e-30)
    return float((a.double() - b.double()).square().mean().sqrt() / size)
