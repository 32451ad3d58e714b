"""Which inputs of a graph its model may be called without: those that change nothing where they are 0, 1, 2, ..

How one forward is held against another is said in `own_positions.py`; here is what is asked, once each, and what is
told of an input that does change something.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from kvcompile.passes.capture.inputs import CapturedInputs, example
from kvcompile.passes.capture.own_positions import Alone

log = logging.getLogger(__name__)
_COUNTED = (8, 12)  # tokens by which a model's own positions are seen
NOT_SHOWN = {
    "position_ids": "that the model's own positions are 0, 1, 2, .. is not shown: it makes them itself, in the graph",
    "logits_to_keep": "that logits_to_keep only chooses among the tokens is not shown: all logits are computed",
}


class Shown:
    """What a model may be given 0, 1, 2, .. for, as its users do not: it does the same without, in the same way.

    True where the model cannot be called. It is in eval mode while it is asked.
    """

    def __init__(self, model: nn.Module, first: str, takes: frozenset[str], device: torch.device):
        self.alone, self.takes, self.device = Alone(model, first), takes, device
        self.known: dict[frozenset[str], bool] = {frozenset(): True}
        self._news: list[str] = []

    def may_be(self, inputs: CapturedInputs) -> bool:
        """Whether the model takes these inputs, and none of them is known not to be shown."""
        names = frozenset(inputs.names[1:])
        asked = (names, *(frozenset([name]) for name in names))
        return names <= self.takes and all(self.known.get(each, True) for each in asked)

    def left_out(self, inputs: CapturedInputs) -> bool:
        """Whether leaving out all inputs but the ids together is the same as giving them; if not, each is asked for."""
        names = frozenset(inputs.names[1:])
        if self._asked(names):
            return True
        for name in sorted(names, reverse=True):
            if not self._asked(frozenset([name])):
                self._news.append(NOT_SHOWN[name])
        return False

    def news(self) -> list[str]:
        """What was found not to be shown since this was last asked for, a line each."""
        found, self._news = self._news, []
        return found

    def _asked(self, names: frozenset[str]) -> bool:
        if names not in self.known:
            lengths = _COUNTED if "position_ids" in names else _COUNTED[:1]
            self.known[names] = all(self._same(names, tokens) for tokens in lengths)
        return self.known[names]

    def _same(self, names: frozenset[str], tokens: int) -> bool:
        inputs = CapturedInputs("position_ids" in names, "logits_to_keep" in names)
        ids, *given = example(inputs, 1, tokens, tokens, self.device)
        try:
            with torch.no_grad():
                return self.alone.same_as(ids, dict(zip(inputs.names[1:], given, strict=True)))
        except Exception as error:  # whatever is wrong shows better while it is traced
            log.debug("%s was not compared: %s", ", ".join(sorted(names)), error, exc_info=True)
            return True
