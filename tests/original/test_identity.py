"""Two models have an identity in common only where they compute the same, and what cannot be told has none."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvcompile.original import identity
from kvcompile.original.identity import Untold, identity_of, read_ahead
from kvcompile.util import threads
from tests.support.models import NanoGPT, TinyConfig, TinyLlama, make, tiny_hf

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny_hf,
    "gpt2": lambda: tiny_hf("gpt2"),
    "by hand": lambda: make(NanoGPT),
    "by hand, with a config": lambda: TinyLlama(TinyConfig()),
}


def _plus(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[-1] += 1


def _first_linear(model: nn.Module) -> nn.Module:
    return next(part for part in model.modules() if isinstance(part, nn.Linear))


def _of_config(model: Any) -> None:
    model.config.rms_norm_eps = 0.25


def _buffer(model: nn.Module) -> None:
    _plus(next(buffer for buffer in model.buffers() if buffer.is_floating_point()))


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number of a weight": lambda model: _plus(next(model.parameters())),
    "the last weight": lambda model: _plus([*model.parameters()][-1]),
    "a buffer": _buffer,
    "the config": _of_config,
    "an attribute": lambda model: setattr(model, "scale", 0.5),
    "an attribute of a part": lambda model: setattr(_first_linear(model), "steps", [1, (2, "x")]),
    "a tensor as an attribute": lambda model: setattr(model, "table", torch.arange(3)),
    "training": lambda model: _first_linear(model).train(),
    "a part": lambda model: model.add_module("more", nn.Linear(2, 2)),
    "the order of dimensions": lambda model: _transposed(_first_linear(model)),
    "dtype": lambda model: model.bfloat16(),
    "a namespace": lambda model: setattr(model, "settings", SimpleNamespace(eps=1e-5)),
    "a function": lambda model: setattr(model, "act", nn.functional.silu),
}


def _transposed(part: nn.Module) -> None:
    part.weight = nn.Parameter(part.weight.detach().t().contiguous())


@pytest.mark.parametrize("name", MODELS)
def test_equal_models_have_it_in_common(name: str) -> None:
    one, other = MODELS[name](), MODELS[name]()
    other.load_state_dict(one.state_dict())
    assert identity_of(one) == identity_of(other) == identity_of(one)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_it(change: str) -> None:
    model = tiny_hf()
    before = identity_of(model)
    CHANGES[change](model)
    assert identity_of(model) != before


def test_what_is_deep_in_attributes_counts() -> None:
    model = make(NanoGPT)
    model.settings = {"a": [SimpleNamespace(b=(1, TinyConfig()))]}
    before = identity_of(model)
    model.settings["a"][0].b = (1, replace(TinyConfig(), vocab_size=7))
    assert identity_of(model) != before


def test_the_text_of_its_classes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same name, weights and attributes, and another forward."""
    found = []
    for text in ("return x + 1", "return x + 2"):
        path = tmp_path / "own_model.py"
        path.write_text(
            f"from torch import nn\n\n\nclass Own(nn.Linear):\n    def forward(self, x):\n        {text}\n"
        )
        spec = importlib.util.spec_from_file_location("own_model", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "own_model", module)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        torch.manual_seed(0)
        found.append(identity_of(module.Own(2, 2)))
    assert found[0] != found[1]


class _Opaque:
    pass


@dataclass
class _ByLayer:
    """As configs of transformers with attributes by layer are: what is asked of the whole raises."""

    size: int

    def __getattribute__(self, name: str) -> Any:
        if name == "size":
            raise ValueError("size is another one in each layer")
        return super().__getattribute__(name)


@dataclass
class _Computed(_ByLayer):
    __slots__ = ()

    def __post_init__(self) -> None:
        del self.__dict__["size"]


def test_attributes_that_cannot_be_asked_for_are_read_where_they_stand() -> None:
    model = make(NanoGPT)
    found = []
    for size in (1, 1, 2):
        model.settings = _ByLayer(size)
        found.append(identity_of(model))
    assert found[0] == found[1] != found[2]


def _captures(number: int) -> Callable[[Any], Any]:
    return lambda x: x * number


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda model: setattr(model, "forward", lambda input_ids: None), "an instance's own"),
        (lambda model: model.register_forward_hook(lambda *_: None), "hooks run with it"),
        (lambda model: setattr(model, "helper", _Opaque()), "is a _Opaque"),
        (lambda model: setattr(model, "act", _captures(3)), "is a function with state"),
        (lambda model: setattr(model, "more", iter([1])), "is a list_iterator"),
        (lambda model: setattr(model, "log", [1].append), "is a method of a list"),
        (lambda model: setattr(model, "settings", _Computed(1)), "settings cannot be read: ValueError"),
    ],
)
def test_what_cannot_be_told_has_none(change: Callable[[nn.Module], object], why: str) -> None:
    model = make(NanoGPT)
    change(model)
    with pytest.raises(Untold, match=why):
        identity_of(model)


def test_a_class_without_a_file_has_none() -> None:
    names: dict[str, Any] = {"__name__": "typed_in"}
    exec("from torch import nn\nclass Typed(nn.Linear):\n    pass", names)
    with pytest.raises(Untold, match=r"the source of typed_in\.Typed is in no file"):
        identity_of(names["Typed"](2, 2))


def _now() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_weights_are_read_once_there_is_a_core_and_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_beside", {})
    go, reading, free = threading.Event(), threading.Event(), threading.Event()
    of_tensors = identity.of_tensors

    def slow(named: Any) -> str:
        reading.set()
        free.wait(60)
        return of_tensors(named)

    monkeypatch.setattr(identity, "of_tensors", slow)
    model = tiny_hf()
    with read_ahead(model) as read:
        read(go)
        assert not reading.wait(0.1) and threads.cores_taken() == 0
        go.set()
        assert reading.wait(60) and threads.cores_taken() == 1
        free.set()
        identity_of(model)
        assert threads.cores_taken() == 0


@pytest.mark.parametrize("when", ["before", "meanwhile", "to another tensor"])
def test_what_was_read_ahead_is_what_is_there(when: str) -> None:
    model = tiny_hf()
    plain = identity_of(model)
    if when == "before":
        _plus(next(model.parameters()))
    with read_ahead(model) as read:
        read(_now())
        identity._AHEAD[model].result()  # all has been read: what is written from here on comes later
        if when == "meanwhile":
            _plus(next(model.parameters()))
        elif when != "before":
            part = _first_linear(model)
            part.weight.data = part.weight.detach() + 1
        found = identity_of(model)
    assert found != plain and found == identity_of(model)
    with read_ahead(model) as read:
        read(_now())
        assert identity_of(model) == found


def test_nothing_is_believed_of_what_was_read_once_that_has_ended() -> None:
    """A write to `.data` is one that PyTorch does not count."""
    model = tiny_hf()
    with read_ahead(model) as read:
        read(_now())
        before = identity_of(model)
    next(model.parameters()).data.add_(1)
    assert identity_of(model) != before


def test_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[torch.Tensor] = []

    def of_tensors(named: Any) -> str:
        read.extend(tensor for _, tensor in named)
        return f"{len(read)}"

    monkeypatch.setattr(identity, "of_tensors", of_tensors)
    model = tiny_hf()
    with read_ahead(model) as begin:
        begin(_now())
        identity_of(model)
    parameters = [*model.parameters()]
    assert sum(isinstance(tensor, nn.Parameter) for tensor in read) == len(parameters)
