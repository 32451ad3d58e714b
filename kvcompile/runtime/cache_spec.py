"""CacheShape: what a cache holds, told apart from the plan that chose it, so that an artifact can tell it, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.triton.available import fp8_form
from kvcompile.layouts import BufferSpec, PageGroup
from kvcompile.layouts.stepping import StepsBack, steps_back
from kvcompile.layouts.storage import is_fp8
from kvcompile.plan import Decision, Limits, Plan
from kvcompile.specs import RecurrentState


@dataclass(frozen=True)
class Buffer:
    """One cache tensor, without its leading dim: the batch, or the pages of a pool where `spec.paged`.

    in_order: whether a row stands at its token's column, so that those beyond the columns hold nothing
    as_bytes: whether kernels take it as bytes, which its dtype has
    device:   where it stands, of a model over several devices; None: where token ids come to
    """

    spec: BufferSpec
    in_order: bool = False
    as_bytes: bool = False
    device: torch.device | None = None


@dataclass(frozen=True)
class Pool:
    """Layers whose sequences have the same pages, and their buffers by name; triton: whether kernels copy pages."""

    group: PageGroup
    buffers: tuple[str, ...]
    triton: bool = False


@dataclass(frozen=True)
class CacheShape:
    """All buffers by name, and what they may hold.

    span:  slots of the layers whose slots stand in the order of tokens and are not in pages; 0 where there are none
    state: names of the buffers that hold recurrent state
    back:  whether the newest tokens can be forgotten again
    """

    buffers: dict[str, Buffer]
    pools: tuple[Pool, ...]
    limits: Limits
    span: int
    state: tuple[str, ...] = ()
    back: StepsBack = StepsBack(0, "nothing is known of its layouts")

    def rows_for(self, slots: int, own: int) -> int:
        """Rows of a head that so many slots take, in a contiguous buffer of `own` rows: tokens of a group share one."""
        return -(-slots * own // self.span)

    def device_of(self, name: str, first: torch.device) -> torch.device:
        """The device of a buffer or a page table, of a cache whose token ids come to `first`."""
        of = self.buffers.get(name)  # none: a table, which graphs copy to the devices that need it
        return first if of is None or of.device is None else of.device

    def as_kernels_take(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers as the graph takes them: some as bytes."""
        as_bytes = {name for name, of in self.buffers.items() if of.as_bytes}
        if not as_bytes:
            return buffers
        return {name: b.view(torch.uint8) if name in as_bytes else b for name, b in buffers.items()}

    @staticmethod
    def of(
        plan: Plan,
        names: Sequence[Sequence[str]],
        device: torch.device,
        states: Sequence[Sequence[str]] = (),
        whole: Plan | None = None,
    ) -> CacheShape:
        """
        names:  the graph's placeholder of each buffer, by layer, in the layout's order
        states: the same of each recurrent state
        whole:  the plan of all stages, which step back together; None: `plan` is
        """
        # What kernels read as bytes comes to them as bytes: taken as such within a compiled region, it would be copied
        # there, all of it, and back.
        forms = {d.device: fp8_form(_of(d) or device) for d in plan.decisions if d.kernels == "triton"}
        buffers: dict[str, Buffer] = {}
        for decision, layer in zip(plan.decisions, names, strict=True):
            specs = decision.buffers(plan.torch_dtype, plan.limits.max_tokens)
            for name, spec in zip(layer, specs, strict=True):
                # Rows of a ring (the newest tokens in full) do not stand at their token's column, and the first tokens
                # in full move them further.
                in_order = not decision.layout.bounded and not spec.fixed
                as_bytes = forms.get(decision.device) == "bits" and is_fp8(spec.dtype)
                as_bytes = as_bytes and decision.kernels == "triton"
                buffers[name] = Buffer(spec, in_order, as_bytes, _of(decision))
        kept = []
        for state, of_state in zip(plan.states, states, strict=True):
            for name, slot in zip(of_state, state.slots, strict=True):
                spec = BufferSpec(name, slot.shape, slot.torch_dtype)
                buffers[name] = Buffer(spec, device=_of(state))
                kept.append(name)
        of_layer = {d.layer: layer for d, layer in zip(plan.decisions, names, strict=True)}
        pools = []
        for group in plan.page_groups:
            # Sites that read another's cache name its buffers again.
            own = [name for layer in group.layers for name in of_layer[layer] if buffers[name].spec.paged]
            triton = {d.kernels for d in plan.decisions if d.layer in group.layers} == {"triton"}
            pools.append(Pool(group, tuple(own), triton))
        span = 0 if plan.bounded else (plan.limits.max_tokens or 0)
        all_of = whole or plan
        back = steps_back((d.layout for d in all_of.decisions), bool(all_of.states))
        return CacheShape(buffers, tuple(pools), plan.limits, span, tuple(kept), back)


def _of(placed: Decision | RecurrentState) -> torch.device | None:
    return None if placed.device is None else torch.device(placed.device)
