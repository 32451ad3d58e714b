"""How a model is called while it is traced: by keyword, with exactly the inputs that its graph shall have."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from kvcompile.util.serial import as_the_caller

WRAPPED = "kvcompile_wrapped"  # the wrapper's attribute; stripped from every name afterwards


@dataclass(frozen=True)
class CapturedInputs:
    """Which inputs the graph has besides `input_ids` [B, S]: `position_ids` [B, S], `logits_to_keep` [K]."""

    position_ids: bool
    logits_to_keep: bool

    @property
    def names(self) -> tuple[str, ...]:
        extra = (("position_ids", self.position_ids), ("logits_to_keep", self.logits_to_keep))
        return ("input_ids", *(name for name, present in extra if present))


class Wrapper(nn.Module):
    """Calls the model by keyword; the forward of each subclass names exactly the inputs of the graph."""

    def __init__(self, model: nn.Module, first: str, fixed: dict[str, Any]):
        super().__init__()
        setattr(self, WRAPPED, model)
        self.first, self.fixed = first, fixed
        self.sizes: list[tuple[Any, Any]] = []  # shapes [B, S] of the last call's inputs
        self.spread = len({weight.device for weight in model.parameters()}) > 1

    def call(self, input_ids: Tensor, **extra: Tensor) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # which has no opaque modules
            self.sizes = [
                (value.shape[0], value.shape[1]) for value in (input_ids, *extra.values()) if value.dim() == 2
            ]
        model = getattr(self, WRAPPED)
        in_dynamo = torch.compiler.is_dynamo_compiling()
        chooses = self.spread and "logits_to_keep" in extra and not in_dynamo
        with nullcontext() if in_dynamo else as_the_caller(), _IndicesBeside() if chooses else nullcontext():
            out = model(**{self.first: input_ids}, **extra, **self.fixed)
        if not torch.compiler.is_dynamo_compiling():
            _make_known(out)
        return out


def _make_known(out: Any) -> None:
    """Dataclasses in what a model gives become containers to pytree, which export takes tensors out of."""
    for leaf in pytree.tree_leaves(out):
        if is_dataclass(leaf) and not isinstance(leaf, type) and type(leaf) not in pytree.SUPPORTED_NODES:
            pytree.register_dataclass(type(leaf))
            _make_known(leaf)


class _IndicesBeside(TorchFunctionMode):
    """Copies indices to the device of what they index.

    A model over several devices is given `logits_to_keep` where its token ids come to, and indexes its last values by
    it, which stand elsewhere: PyTorch refuses that, and the copy is what a graph needs there.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            source, index = args
            beside = (each.to(source.device) if isinstance(each, Tensor) else each for each in index)
            args = (source, tuple(beside))
        return func(*args, **(kwargs or {}))


class _Plain(Wrapper):
    def forward(self, input_ids: Tensor) -> Any:
        return self.call(input_ids)


class _Positions(Wrapper):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        return self.call(input_ids, position_ids=position_ids)


class _Keep(Wrapper):
    def forward(self, input_ids: Tensor, logits_to_keep: Tensor) -> Any:
        return self.call(input_ids, logits_to_keep=logits_to_keep)


class _PositionsKeep(Wrapper):
    def forward(self, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor) -> Any:
        return self.call(input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep)


WRAPPERS = {
    CapturedInputs(False, False): _Plain,
    CapturedInputs(True, False): _Positions,
    CapturedInputs(False, True): _Keep,
    CapturedInputs(True, True): _PositionsKeep,
}


def wrap(model: nn.Module, inputs: CapturedInputs, first: str, fixed: dict[str, Any]) -> Wrapper:
    """A module with the chosen inputs around `model`, whose token ids are called `first`; `fixed` is passed on."""
    return WRAPPERS[inputs](model, first, fixed)


def example(
    inputs: CapturedInputs, batch: int, tokens: int, keep: int, device: torch.device, seed: int = 0
) -> tuple[Tensor, ...]:
    """Values of the inputs: token ids 0 and 1 (every vocabulary has them), positions from 0, logits of `keep`."""
    generator = torch.Generator().manual_seed(batch * tokens + 1000 * seed)
    values = {
        "input_ids": torch.randint(0, 2, (batch, tokens), generator=generator),
        "position_ids": torch.arange(tokens).expand(batch, tokens),
        "logits_to_keep": torch.arange(keep),
    }
    return tuple(values[name].to(device) for name in inputs.names)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first weight is."""
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), torch.device("cpu"))
