"""Optimization profiles: which sizes each input may have, and for which of them kernels are chosen.

    decode:  tokens = 1             batch 1 .. max_batch    slots 1 .. slots    pages 1 .. all of a pool
    prefill: tokens 1 .. chunk      the rest as above

An engine of one graph (`step`) has both, one of a graph of its own for each phase has that one. Kernels are chosen
for the largest batch and chunk, and half of the slots and pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcompile.errors import ExportError
from kvcompile.targets.manifest import Graph, Profile, Span

Range = tuple[int, int, int]  # the least, the one that kernels are chosen for, the most


@dataclass(frozen=True)
class Sizes:
    """The most of each dynamic size.

    slots: of layers that are kept in order; 0: there are none
    pages: of each pool, by the name of the size (`pages_0`)
    """

    batch: int
    chunk: int
    slots: int = 0
    pages: Mapping[str, int] = field(default_factory=dict)

    def ranges(self, one: bool) -> dict[str, Range]:
        """The range of each size; one: of decode steps."""
        chunk = 1 if one else self.chunk
        found = {
            "batch": (1, self.batch, self.batch),
            "tokens": (1, chunk, chunk),
            "kept": (1, 1, chunk),
            "slots": (1, max(1, self.slots // 2), max(1, self.slots)),
        }
        return found | {name: (1, max(1, pages // 2), pages) for name, pages in self.pages.items()}


def profiles(graph: Graph, sizes: Sizes) -> tuple[Profile, ...]:
    """The profiles of a graph's engine."""
    phases = ("decode", "prefill") if graph.phase == "step" else (graph.phase,)
    return tuple(_profile(graph, phase, sizes.ranges(phase == "decode")) for phase in phases)


def _profile(graph: Graph, name: str, ranges: Mapping[str, Range]) -> Profile:
    shapes = {}
    for tensor in graph.inputs:
        if all(isinstance(size, int) for size in tensor.shape):
            continue
        of_size = []
        for size in tensor.shape:
            if isinstance(size, int):
                of_size.append((size, size, size))
            elif size in ranges:
                of_size.append(ranges[size])
            else:
                known = ", ".join(ranges)
                raise ExportError(
                    f"{graph.file}: no range for the size {size!r} of {tensor.name}; known: {known}. Please report "
                    "this as a bug"
                )
        least, usual, most = (tuple(size[place] for size in of_size) for place in range(3))
        shapes[tensor.name] = Span(min=least, opt=usual, max=most)
    return Profile(name=name, shapes=shapes)
