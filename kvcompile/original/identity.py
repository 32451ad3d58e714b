"""All that a model computes with beside its graph, as one hash: weights, config, attributes, and its Python."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from threading import Event
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kvcompile.original.checks import hooks_of
from kvcompile.original.digest import of_config, of_tensors
from kvcompile.util.own_code import TORCH
from kvcompile.util.threads import take_core

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# Tensors are read as tensors, parts as parts, and hooks are looked for.
_HANDLED = frozenset(vars(nn.Module()))
_THREADS = 2  # hashing lets go of Python's lock; more threads than two wait for memory

# What was read ahead of parameters, by their ids: where each stood, its version, and its hash.
Read = dict[int, tuple[int, int, str]]
_AHEAD: WeakKeyDictionary[nn.Module, Future[Read]] = WeakKeyDictionary()


class Untold(Exception):
    """Why nobody can tell whether a model is the same as another one: some state or code of it cannot be read."""


@contextmanager
def read_ahead(model: nn.Module) -> Iterator[Callable[[Event], None]]:
    """Gives what begins to read the weights of a model on the CPU, beside whatever is done within, for an
    `identity_of` there; it begins once the event is set that it is given.

    What is written into a parameter meanwhile, as PyTorch counts it, is read again.
    """

    def begin(after: Event) -> None:
        named = [tensor for tensor in model.parameters() if _is_plain(tensor)]

        def read() -> Read:
            after.wait()
            core = take_core()
            try:
                return {
                    id(tensor): (tensor.data_ptr(), tensor._version, of_tensors([("", tensor)]))
                    for tensor in named
                }
            finally:
                core.set()

        pool = ThreadPoolExecutor(1, thread_name_prefix="kvcompile-read-ahead")
        _AHEAD[model] = pool.submit(read)
        pool.shutdown(wait=False)

    try:
        yield begin
    finally:
        _AHEAD.pop(model, None)  # it says nothing of weights that somebody changes afterwards


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor.data) is Tensor and tensor.device.type == "cpu" and not tensor.is_inference()


def identity_of(model: nn.Module) -> str:
    """A hash that two models have in common only where they compute the same; a third of a second for each GB.

    Raises:
        Untold: a module has state that is no number, text or tensor, a forward of its own, hooks, or no source file.
    """
    if hooks := hooks_of(model):
        raise Untold(f"hooks run with it: {', '.join(hooks[:3])}")
    files: set[str] = set()
    told = [of_config(model)]
    for path, module in model.named_modules():
        files.update(file for kind in type(module).__mro__ for file in _file_of(kind))
        for name, value in vars(module).items():
            if name not in _HANDLED:
                told.append(f"{path}.{name}={_read(value, files, f'{path}.{name}')}")
        told.append(f"{path}: {type(module).__module__}.{type(module).__qualname__} {module.training}")
    told += [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files)]
    told.append(_of_weights(model))
    return hashlib.sha256("\0".join(told).encode()).hexdigest()[:32]


def _of_weights(model: nn.Module) -> str:
    """Every byte of every parameter and buffer, under all names that it has."""
    named: dict[int, tuple[list[str], Tensor]] = {}
    for pairs in (
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in pairs:
            if type(tensor.data) is not Tensor and not hasattr(tensor, "__tensor_flatten__"):
                raise Untold(f"{name} is a {type(tensor.data).__name__}")
            named.setdefault(id(tensor), ([], tensor))[0].append(name)
    known = ahead.result() if (ahead := _AHEAD.get(model)) is not None else {}

    def told(names_and_tensor: tuple[list[str], Tensor]) -> str:
        names, tensor = names_and_tensor
        place, version, digest = known.get(id(tensor), (0, 0, ""))
        if not digest or not _is_plain(tensor) or (tensor.data_ptr(), tensor._version) != (place, version):
            digest = of_tensors([("", tensor)])
        return f"{' '.join(names)} {digest}"

    with ThreadPoolExecutor(_THREADS) as pool:
        return "\0".join(sorted(pool.map(told, named.values())))


def _read(value: Any, files: set[str], where: str) -> str:
    """`_told`; an object that does not let itself be read is one that cannot be told."""
    try:
        return _told(value, files, where)
    except Untold:
        raise
    except Exception as error:  # somebody's own attributes raise anything
        raise Untold(f"{where} cannot be read: {type(error).__name__}: {error}") from error


def _told(value: Any, files: set[str], where: str) -> str:
    """A value's text; files: gets those whose code it runs."""
    if isinstance(value, (FunctionType, MethodType, type)):
        if where.endswith(".forward"):
            raise Untold(f"{where} is an instance's own")
        if isinstance(value, MethodType) and not isinstance(value.__self__, (nn.Module, type)):
            raise Untold(f"{where} is a method of a {type(value.__self__).__name__}")
        if isinstance(value, FunctionType) and value.__closure__:
            raise Untold(f"{where} is a function with state")
        files.update(_file_of(value))
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, BuiltinFunctionType):
        if not isinstance(value.__self__, (ModuleType, type)):
            raise Untold(f"{where} is a method of a {type(value.__self__).__name__}")
        return f"{value.__module__}.{value.__qualname__}"
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, Tensor):
        return of_tensors([("", value)])
    if isinstance(value, nn.Module):
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return _nested(value, files, where)


def _nested(value: Any, files: set[str], where: str) -> str:
    if type(value) in (list, tuple):
        return repr([_told(each, files, where) for each in value])
    if type(value) in (set, frozenset):
        return repr(sorted(_told(each, files, where) for each in value))
    if isinstance(value, dict):
        return repr([(_told(k, files, where), _told(v, files, where)) for k, v in value.items()])
    if is_dataclass(value) or type(value) is SimpleNamespace:  # configs that somebody writes himself
        files.update(_file_of(type(value)))
        own = dict(getattr(value, "__dict__", {}))
        # Only what is not there is asked for: some configs have attributes that cannot be (Gemma 4's, by layer).
        slots = (
            [field.name for field in fields(value) if field.name not in own] if is_dataclass(value) else []
        )
        own |= {name: getattr(value, name) for name in slots}
        return f"{type(value).__module__}.{type(value).__qualname__} {_told(own, files, where)}"
    as_json: Callable[[], str] | None = getattr(value, "to_json_string", None)  # transformers' configs
    if as_json is not None:
        return as_json()
    raise Untold(f"{where} is a {type(value).__name__}")


def _file_of(code: Any) -> Iterator[str]:
    """Where code stands; nothing for PyTorch's and Python's own, which go by their versions."""
    module = getattr(code, "__module__", None) or ""
    if module in ("builtins", "abc", "types", "typing") or module.partition(".")[0] == "torch":
        return
    try:
        file = inspect.getsourcefile(code)
    except (TypeError, OSError):
        file = None
    if file is None or not Path(file).is_file():
        raise Untold(f"the source of {module}.{getattr(code, '__qualname__', code)} is in no file")
    if not file.startswith(TORCH):
        yield file
