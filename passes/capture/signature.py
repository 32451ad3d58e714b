"""How a decoder is called: by token ids alone; what else its forward takes, and whether it runs."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from kvcompile.errors import ModelError
from kvcompile.passes.capture.first_line import first_line
from kvcompile.passes.capture.inputs import CapturedInputs, device_of, example
from kvcompile.passes.capture.settings import eval_mode
from kvcompile.passes.recurrent.state import attributes_restored
from kvcompile.util.serial import as_the_caller


def signature(model: nn.Module) -> tuple[str, frozenset[str]]:
    """The name of the parameter that takes the token ids, and the names of all parameters."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {name}")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; kvcompile takes decoder-only models")
    parameters = inspect.signature(model.forward).parameters
    required = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    first = "input_ids" if "input_ids" in parameters else required[0] if len(required) == 1 else ""
    if not first or set(required) - {first}:
        raise ModelError(
            f"{name}.forward must be callable with input_ids alone; it takes ({', '.join(parameters)})"
        )
    if "decoder_input_ids" in parameters:
        raise ModelError(f"{name} is an encoder-decoder model; kvcompile takes decoder-only models")
    return first, frozenset(parameters)


def declined(model: nn.Module, first: str, size: tuple[int, int]) -> str:
    """What a model raises for token ids of this size, in a line; empty: nothing."""
    (ids,) = example(CapturedInputs(False, False), *size, 1, device_of(model))
    with eval_mode(model), attributes_restored(model), torch.no_grad(), as_the_caller():
        try:
            model(**{first: ids})
        except Exception as error:  # a model raises anything
            return first_line(error)
    return ""
