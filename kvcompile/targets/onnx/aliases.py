"""Which caches a runtime may update where they stand, seen from an ONNX graph.

A cache and its new value may have one address where nothing reads the old value but the node that writes tokens into
it: ScatterND or TensorScatter, of which runtimes copy the other rows only where the addresses differ. Wherever
something else reads the old value (many queries attend to a ring's old slots, and only then are they overwritten), the
order of the two is the runtime's own, and the result must have a place of its own.
"""

from __future__ import annotations

import onnx_ir as ir

from kvcompile.targets.manifest import Alias

_WRITERS = ("ScatterND", "TensorScatter")


def aliases(model: ir.Model, caches: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[Alias, ...]:
    """The pairs of `caches` and `outputs` (their names in the graph), and whether they may be one."""
    inputs = {value.name: value for value in model.graph.inputs}
    return tuple(
        Alias(input=cache, output=output, in_place=_only_written(inputs[cache]))
        for cache, output in zip(caches, outputs, strict=True)
    )


def _only_written(cache: ir.Value) -> bool:
    if cache.is_graph_output():
        return False
    uses = [use for use in cache.uses() if use.node.op_type != "Shape"]  # which reads none of its numbers
    if len(uses) != 1:
        return False
    node, place = uses[0]
    return node.op_type in _WRITERS and place == 0
