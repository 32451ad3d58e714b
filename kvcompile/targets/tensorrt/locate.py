"""Where in the model a node of an ONNX graph stands, for messages: its layer is that of the cache it leads to.

Names of nodes are the exporter's. What a user knows are layers, and caches are named after theirs
(`cache_3_keys_data`): a node before the attention of a layer leads to the new values of that layer's cache, and a node
behind the last attention only comes from caches.
"""

from __future__ import annotations

import re
from collections import deque

import onnx_ir as ir

_CACHE = re.compile(r"^cache_(\d+)_")


def place_of(node: ir.Node) -> str:
    """A node in words: its name, operator and layer."""
    layer = layer_of(node)
    where = "" if layer is None else f", layer {layer}"
    return f"{node.name or '(no name)'} ({node.op_type}{where})"


def layer_of(node: ir.Node) -> int | None:
    """The layer of the first cache that the node leads to, else of the last that it comes from; None: neither."""
    queue, seen = deque([node]), {node}
    while queue:
        here = queue.popleft()
        for value in here.outputs:
            found = _layer(value) if value.is_graph_output() else None
            if found is not None:
                return found
            for user, _ in value.uses():
                if user not in seen:
                    seen.add(user)
                    queue.append(user)
    queue, seen = deque([node]), {node}
    while queue:
        here = queue.popleft()
        for taken in here.inputs:
            if taken is None:
                continue
            found = _layer(taken)
            if found is not None:
                return found
            before = taken.producer()
            if before is not None and before not in seen:
                seen.add(before)
                queue.append(before)
    return None


def _layer(value: ir.Value) -> int | None:
    match = _CACHE.match(value.name or "")
    return None if match is None else int(match[1])
