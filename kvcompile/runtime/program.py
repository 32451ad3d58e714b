"""What the runtime must know of a rewritten graph to call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.ops.opaque import OpaqueModule
from kvcompile.passes.stages.stage import Value
from kvcompile.plan import Plan


@dataclass(frozen=True)
class OfStage:
    """What one stage of several takes from the one before and gives to the next; None: it is the first, or the last.

    outputs: those of the last stage
    whole:   the plan of all stages: what decides for all of them in the same way
    """

    takes: Value | None
    gives: Value | None
    outputs: tuple[Value, ...]
    whole: Plan


@dataclass(frozen=True)
class Program:
    """The graph's interface.

    caches:    placeholder names of each layer's buffers, in layout order
    states:    placeholder names of each recurrent state, in the plan's order
    constants: placeholders with a fixed value (rope tables)
    rebuild:   the original's output class around the graph's flat outputs
    opaques:   the modules that the graph calls as Python; it means nothing without them
    ragged:    whether the sequences of a batch may start at different places
    logits:    which of the flat outputs are the logits
    last:      whether a call gives the logits of its last token alone, as the original does
    stage:     where the graph is one stage of several
    ids:       the least and the largest id that the embedding has; None: ids do not go straight into one
    tabulated: the weights that `constants` were computed from
    """

    caches: tuple[tuple[str, ...], ...]
    states: tuple[tuple[str, ...], ...]
    constants: dict[str, Tensor]
    rebuild: Callable[[Sequence[Any]], Any]
    logits: int
    takes_position_ids: bool
    takes_logits_to_keep: bool
    takes_past_length: bool
    ragged: bool
    device: torch.device
    opaques: tuple[OpaqueModule, ...] = ()
    ids: tuple[int, int] | None = None
    last: bool = False
    stage: OfStage | None = None
    tabulated: tuple[Tensor, ...] = ()

    def reads(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors that a call reads where they stand, and nowhere else what was computed from them.

        weights: of its graph; those of modules in Python are added.
        """
        elsewhere = {tensor.data_ptr() for tensor in self.tabulated}
        own = [record.module for record in self.opaques]
        python = [tensor for module in own for tensor in (*module.parameters(), *module.buffers())]
        return [tensor for tensor in (*weights.values(), *python) if tensor.data_ptr() not in elsewhere]
