"""Where the layers of a graph stand: a model may have them on several devices (accelerate's `device_map`).

Such a model moves its values between layers itself, and the copies are in its graph. What a cached graph adds (the
tokens' positions, how many were seen, page tables, tables of cosines) comes to the model's first device, and is copied
once to each other one that needs it, before the first layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from kvcompile.passes.graph import value
from kvcompile.passes.records import AttentionSite


def device_of_site(site: AttentionSite) -> torch.device:
    """The device of an attention site: of its result, and so of its queries, keys and values."""
    device: torch.device = value(site.out).device
    return device


def places_of(sites: Sequence[AttentionSite], first: torch.device) -> dict[int, torch.device]:
    """The device of each layer; empty where all stand on `first`, where token ids come to."""
    found = {site.layer: device_of_site(site) for site in sites}
    return found if any(device != first for device in found.values()) else {}


class OnDevices:
    """Gives values of a cached graph on the devices that need them."""

    def __init__(self, graph: Graph, first: torch.device):
        """
        Args:
            first: the device of what `on` is given.
        """
        self.graph, self.first = graph, first
        self._done: dict[tuple[Node, torch.device], Node] = {}

    def on(self, node: Node, device: torch.device) -> Node:
        """A placeholder's value on `device`: itself, or the one copy there."""
        if device == self.first:
            return node
        if (node, device) not in self._done:
            target: Any = torch.ops.aten._to_copy.default
            with self.graph.inserting_after(node):
                copy = self.graph.call_function(target, (node,), {"device": device})
            self._done[node, device] = copy
        return self._done[node, device]
