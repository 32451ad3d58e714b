"""Probing: parts of a captured graph evaluated at concrete sizes, so that rules find out and assume nothing.

What happens between Q K^T and the softmax is not probed but translated: `reader` (`passes/score_mod`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from kvcompile.passes.dependence import Dependence
from kvcompile.passes.detect.refused import Refused
from kvcompile.passes.graph import expr, shape, size_at
from kvcompile.passes.probe.evaluate import evaluate
from kvcompile.passes.score_mod.reader import Reader


class NotEvaluated(Refused):
    """The graph declines a length: the original model does as well."""


class Prober:
    """Evaluates parts of one captured graph at concrete sizes.

    max_seq_len: the longest sequence that the graph accepts; made_for: that the model was made for, where known
    memo:        what rules remember from layer to layer, e.g. masks that layers share
    """

    def __init__(
        self, graph_module: GraphModule, max_seq_len: int | None = None, made_for: int | None = None
    ):
        self.graph_module = graph_module
        self.max_seq_len = max_seq_len or 2**31
        self.dependence = Dependence(graph_module)
        self.reader = Reader(self.dependence)
        self.made_for = made_for
        self.memo: dict[Any, Any] = {}
        self.placeholders = {str(n.target): n for n in graph_module.graph.nodes if n.op == "placeholder"}
        ids = self.placeholders["input_ids"].meta["val"]
        self.device = ids.device
        self.batch, self.seq = (expr(dim) for dim in ids.shape)
        keep = self.placeholders.get("logits_to_keep")
        self.keep = None if keep is None else expr(shape(keep)[0])  # the symbol of K

    def found(self, result: Node) -> None:
        """Say that `result` is that of an attention block: a value of each token, like any other."""
        self.dependence.cut(result)

    def inputs(self, batch: int, seq: int, seed: int = 0) -> dict[str, Tensor]:
        """Placeholder values: tokens in {0, 1} (every vocabulary has them), positions as arange rows."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 2, (batch, seq), generator=generator)
        values = {
            "input_ids": tokens,
            "position_ids": torch.arange(seq).repeat(batch, 1),
            "logits_to_keep": torch.arange(min(seq, 3)),
        }
        return {name: values[name].to(self.device) for name in self.placeholders if name in values}

    def size(self, dim: Any, batch: int, seq: int) -> int:
        """A symbolic dimension at concrete sizes."""
        return size_at(dim, {self.batch: batch, self.seq: seq})

    def concrete(self, node: Node, batch: int, seq: int) -> tuple[int, ...]:
        return tuple(self.size(dim, batch, seq) for dim in shape(node))

    def run(
        self,
        outputs: list[Node],
        batch: int,
        seq: int,
        overrides: dict[Node, Any] | None = None,
        seed: int = 0,
        constant: Callable[[int], int] | None = None,
    ) -> list[Any]:
        """Values of `outputs` at concrete sizes, on the device of the token ids, wherever the graph has them; raises
        Refused where an operator declines them."""
        try:
            found = evaluate(self.graph_module, outputs, self.inputs(batch, seq, seed), overrides, constant)
            return self._here(found)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise NotEvaluated(f"the graph cannot be evaluated at length {seq}: {reason[:200]}") from error

    def evaluate(
        self, outputs: list[Node], inputs: dict[str, Tensor], overrides: dict[Node, Any]
    ) -> list[Tensor]:
        return self._here(evaluate(self.graph_module, outputs, inputs, overrides))

    def _here(self, found: list[Any]) -> list[Any]:
        """Values on the device of the token ids; an opaque module gives several."""
        moved: list[Any] = tree_map_only(Tensor, lambda tensor: tensor.to(self.device), found)
        return moved

    def constant(self, name: str, tensor: Tensor, beside: Node) -> Node:
        """A node of the graph with this value, a new buffer of the module on the device of `beside`; equal tensors of
        one device get one node."""
        device = beside.meta["val"].device
        bits = tensor.cpu().numpy().tobytes()
        key = ("constant", name, tuple(tensor.shape), tensor.dtype, bits, device)
        if key not in self.memo:
            number = sum(1 for other in self.memo if isinstance(other, tuple) and other[:2] == key[:2])
            path = f"kvcompile_{name}_{number}"
            self.graph_module.register_buffer(path, tensor.contiguous().to(device), persistent=False)
            graph = self.graph_module.graph
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                node = graph.get_attr(path)
            mode = self.placeholders["input_ids"].meta["val"].fake_mode
            node.meta["val"] = mode.from_tensor(getattr(self.graph_module, path), static_shapes=True)
            self.memo[key] = node
        found: Node = self.memo[key]
        return found


__all__ = ["NotEvaluated", "Prober", "Refused"]
