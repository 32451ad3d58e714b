"""The cache tensors of one rewritten model, and what its sequences have seen so far."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.errors import InputError, LimitError
from kvcompile.plan import Plan


class KVCache:
    """Buffers of every layer, and of recurrent state, allocated when the first tokens of a batch come and then only
    overwritten.

    A batch is a rectangle of columns, padded on the left; each row (sequence) has its own length.
    """

    def __init__(
        self,
        plan: Plan,
        names: tuple[tuple[str, ...], ...],
        device: torch.device,
        states: tuple[tuple[str, ...], ...] = (),
    ):
        """
        names:  the graph's placeholder of each buffer, by layer, in the layout's order
        states: the same of each recurrent state
        """
        self.plan = plan
        self.device = device
        self.batch = 0
        self.columns = 0
        self.seq_lens = torch.zeros(0, dtype=torch.int64, device=device)
        self.buffers: dict[str, Tensor] = {}
        limit = plan.limits.max_tokens
        self._contiguous = {
            name
            for decision, layer in zip(plan.decisions, names, strict=True)
            for name in layer
            if not decision.layout.bounded
        }
        self._specs = {
            name: spec
            for decision, layer in zip(plan.decisions, names, strict=True)
            for name, spec in zip(layer, decision.buffers(plan.torch_dtype, limit), strict=True)
        }

        self._states = {
            name: slot
            for state, of_state in zip(plan.states, states, strict=True)
            for name, slot in zip(of_state, state.slots, strict=True)
        }
        self._seen: list[int] = []  # tokens of each row, known without asking the device

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers take now."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    @property
    def span(self) -> int:
        """Slots of the contiguous layers; 0 where there are none."""
        return 0 if self.plan.bounded else (self.plan.limits.max_tokens or 0)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape (without batch) and dtype of each buffer."""
        caches = {name: (spec.shape, spec.dtype) for name, spec in self._specs.items()}
        return caches | {name: (slot.shape, slot.torch_dtype) for name, slot in self._states.items()}

    def rows(self, pads: Tensor | None) -> Tensor:
        """int64 [2, B] on the CPU: `pads` of the new tokens, and how many tokens each row has seen."""
        return torch.tensor([[0] * self.batch if pads is None else pads.tolist(), self._seen])

    def check_limits(self, batch: int, tokens: int) -> None:
        """Refuse `batch` sequences of `tokens` in all that could never fit.

        Raises:
            LimitError: more than the limits.
        """
        limits = self.plan.limits
        if batch > limits.max_batch:
            raise LimitError(
                f"{batch} sequences, but runtime.max_batch is {limits.max_batch}: raise it in the recipe, or "
                "pass fewer sequences"
            )
        if limits.max_tokens is not None and tokens > limits.max_tokens:
            raise LimitError(
                f"{tokens} tokens a sequence, but runtime.max_tokens is {limits.max_tokens}: raise it in the "
                "recipe, pass fewer, or choose a bounded retention"
            )

    def check_room(self, batch: int, tokens: int) -> None:
        """Refuse what does not fit, before anything is written.

        Raises:
            LimitError: more sequences or tokens than the limits.
            InputError: another number of sequences than the cache holds.
        """
        limit = self.plan.limits.max_tokens
        if self.columns and batch != self.batch:
            raise InputError(
                f"the cache holds {self.batch} sequences of {self.columns} tokens, and this call has {batch}"
                ": a batch keeps its size until reset()"
            )
        if self.columns and limit is not None and self.columns + tokens > limit:
            raise LimitError(
                f"{self.columns} tokens in the cache and {tokens} new ones are more than runtime.max_tokens "
                f"{limit}: raise it in the recipe, call reset(), or choose a bounded retention"
            )
        self.check_limits(batch, tokens)

    def reserve(self, batch: int) -> None:
        """Allocate for `batch` sequences, unless the buffers already are of that size."""
        if batch == self.batch:
            return
        # The old buffers go first: two caches never stand in memory together.
        self.buffers = {}
        self.buffers = {
            name: torch.zeros((batch, *shape), dtype=dtype, device=self.device)
            for name, (shape, dtype) in self.shapes().items()
        }
        for name, spec in self._specs.items():
            spec.written(self.buffers[name])
        self.batch = batch
        self._seen = [0] * batch
        self.seq_lens = torch.zeros(batch, dtype=torch.int64, device=self.device)

    def advance(self, new_lens: Tensor, columns: int, rows: Tensor | None = None) -> None:
        """Note that `columns` more columns have been appended, and the rows' lengths now; rows: of this call."""
        self.seq_lens = new_lens
        self.columns += columns
        if rows is not None:
            self._seen = [seen + columns - pad for pad, seen in zip(*rows.tolist(), strict=True)]

    def reset(self) -> None:
        """Forget all sequences; the memory is kept for the next ones of the same number."""
        self.columns = 0
        self.seq_lens = torch.zeros_like(self.seq_lens)
        self._seen = [0] * self.batch  # what the states hold is not read where nothing was seen

    def release(self) -> None:
        """Forget all sequences and free the buffers."""
        self.buffers = {}
        self.batch = self.columns = 0
        self.seq_lens = torch.zeros(0, dtype=torch.int64, device=self.device)
        self._seen = []

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was (beam search); in place, so that addresses stay."""
        index = index.to(self.device)
        for name, buffer in self.buffers.items():
            # Of a contiguous layer only the slots that hold something.
            used = buffer[:, :, : self.columns] if name in self._contiguous else buffer
            used.copy_(used.index_select(0, index))
        self.seq_lens = self.seq_lens.index_select(0, index)
        self._seen = [self._seen[i] for i in index.tolist()] if self._states else self._seen
