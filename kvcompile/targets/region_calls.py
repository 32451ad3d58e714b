"""The rewritten graph as calls of its regions, for exports: of a region that is called again, a trace has one node.

    given' = layer_begin(given, n)      ..the region's own nodes..      layer_end(made, n)
    made   = layer_again(given, m)      the same, of other weights and caches

as in `passes/capture/traced_once.py`. Caches are updated in place inside of a region: what it leaves in them is among
what it makes. Who translates the trace puts the region's translation in the place of each `layer_again`
(`targets/onnx/copies.py`); tracing, decomposing and translating thirty equal layers takes minutes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from kvcompile.compile.regions import cut
from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.ops.opaque import Template, template
from kvcompile.passes.capture.equal_layers import Called
from kvcompile.passes.capture.traced_once import again, begin, end


@dataclass(frozen=True)
class _First:
    """A region that was traced. result: what it gives without the tensors, and the same sizes in every call"""

    number: int
    called: Called
    result: Template


class RegionCalls:
    """The regions of a graph module, to be run on its weights."""

    def __init__(self, decoder: GraphModule, caches: Collection[str]):
        """caches: the placeholders that are written to"""
        found = cut(decoder, lambda node: node.target is ops.cached_attention)
        self.modules, self._calls, self._outputs = found.modules, found.calls, found.outputs
        self._decoder = decoder
        self._weights = tuple(found.weights)
        names = (str(node.target) for node in decoder.graph.nodes if node.op == "placeholder")
        self._targets = dict(zip(found.placeholders, names, strict=True))
        self._caches = {name: target for name, target in self._targets.items() if target in caches}
        self._often = {n for n, count in Counter(call.region for call in found.calls).items() if count > 1}
        self._firsts: dict[int, list[_First]] = {}
        self._count = 0

    def run(self, values: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The graph's outputs, and the caches by name as they are then; equal regions are traced once.

        values: of the graph's placeholders, by their targets
        """
        self._firsts, self._count = {}, 0
        known: dict[str, Any] = {name: values[target] for name, target in self._targets.items()}
        known |= {name: _attribute(self._decoder, name.removeprefix("weight:")) for name in self._weights}
        for call in self._calls:
            given = [known[name] for name in call.inputs]
            written = [index for index, name in enumerate(call.inputs) if name in self._caches]
            made, left = self._call(call.region, given, written)
            known |= dict(zip(call.outputs, made, strict=True))
            known |= {call.inputs[index]: cache for index, cache in zip(written, left, strict=True)}
        return [known[name] for name in self._outputs], {t: known[name] for name, t in self._caches.items()}

    def _run(self, region: int, given: Sequence[Any]) -> list[Tensor]:
        return list(self.modules[region](*given))

    def _call(
        self, region: int, given: Sequence[Any], written: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        arguments, tensors = template(tuple(given))
        called = Called.of(arguments, tensors)
        if called is None or region not in self._often:
            return self._run(region, given), [given[index] for index in written]
        for first in self._firsts.get(region, []):
            if first.called.alike(called):
                made = again(tensors, first.number)
                break
        else:
            inside = arguments.fill(begin(tensors, self._count))
            result, results = template(tuple(self._run(region, inside)))
            made = end([*results, *(inside[index] for index in written)], self._count)
            first = _First(self._count, called, result)
            self._firsts.setdefault(region, []).append(first)
            self._count += 1
        count = len(made) - len(written)
        return list(first.result.fill(made[:count])), list(made[count:])


def _attribute(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part)
    return root
