"""A model's own Python is not told that it is traced: what it does is what it does without.

`if not torch.compiler.is_exporting(): ..` goes one way in every call that matters and another while a graph is made of
it, so the graph would be of a model that nobody runs. The libraries that kvcompile knows, torch and transformers, ask
to leave out checks and shortcuts that change nothing; they get the true answer. Dynamo, which export calls for some
operators (FlexAttention), knows the questions by what they are: they are changed where a model's own code names one.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial, partialmethod
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import transformers
from torch import nn

from kvcompile.util.own_code import KVCOMPILE, TORCH

_QUESTIONS = ("is_exporting", "is_compiling", "is_dynamo_compiling")
_KNOWN = (TORCH, os.path.dirname(transformers.__file__ or "") + os.sep)
_NAMES = {*_QUESTIONS, "is_torchdynamo_compiling", "is_torchdynamo_exporting", "is_tracing"}
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_PASSES_ON = os.path.join("utils", "import_utils.py")  # transformers' own names of the questions


@contextmanager
def as_eager(model: nn.Module) -> Iterator[list[str]]:
    """Meanwhile questions of the model's own Python are answered with no; gives the lines that asked."""
    asked: list[str] = []
    if not names_a_question(model):
        yield asked
        return
    homes: list[Any] = [torch.compiler, torch._dynamo]
    homes += [
        sys.modules[name]
        for name in dict.fromkeys(type(module).__module__ for module in model.modules())
        if name in sys.modules and not name.startswith(("torch.", "transformers."))
    ]
    originals = {getattr(home, name) for home in homes[:2] for name in _QUESTIONS if hasattr(home, name)}
    swapped = [
        (home, name, value)
        for home in homes
        for name, value in list(vars(home).items())
        if callable(value) and _among(value, originals)
    ]
    try:
        for home, name, original in swapped:
            setattr(home, name, _no(original, asked))
        yield asked
    finally:
        for home, name, original in swapped:
            setattr(home, name, original)


def names_a_question(model: nn.Module) -> bool:
    """Whether the code that the model's classes are written in has the name of a question, or that of functions and
    classes which it imports."""
    waiting = [kind.__module__ for module in model.modules() for kind in type(module).__mro__]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        home = sys.modules.get(name)
        if name in seen or home is None or not _is_own(home):
            continue
        seen.add(name)
        for value in list(vars(home).values()):
            if isinstance(value, ModuleType):
                if value.__name__.partition(".")[0] == name.partition(".")[0]:
                    waiting.append(value.__name__)
            else:
                waiting.append(of := _home(value))
                if of == name and any(_names(code) for code in _codes(value)):
                    return True
    return False


def _is_own(home: ModuleType) -> bool:
    file = getattr(home, "__file__", None) or ""
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return file.endswith(".py") and not standard and not file.startswith((*_KNOWN, *KVCOMPILE))


def _codes(value: Any) -> Iterator[CodeType]:
    """The code of a function, or of all methods of a class, wrapped or not."""
    for member in list(vars(value).values()) if isinstance(value, type) else [value]:
        yield from (function.__code__ for function in _functions(member))


def _functions(value: Any) -> Iterator[FunctionType]:
    """The functions that a callable is made of: itself, and what it wraps.

    Only what is known by its type is looked into: an object of a foreign module may answer any name, or fail.
    """
    while value is not None:
        if isinstance(value, FunctionType):
            yield value
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, (partial, partialmethod, cached_property)):
            value = value.func
        else:  # functools.wraps, lru_cache
            value = inspect.getattr_static(value, "__wrapped__", None)


def _home(value: Any) -> str:
    """The name of the module in which a class, a function or an object's class is written."""
    if isinstance(value, type):
        return value.__module__
    return next((function.__module__ for function in _functions(value)), type(value).__module__)


def _names(code: CodeType) -> bool:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return bool(_NAMES.intersection(code.co_names)) or any(map(_names, inner))


def _among(value: Any, originals: set[Any]) -> bool:
    return any(value is original for original in originals)


def _no(original: Callable[[], bool], asked: list[str]) -> Callable[[], bool]:
    def answer() -> bool:
        if not original():
            return False
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.endswith(_PASSES_ON):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(_KNOWN):
            return True
        where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if where not in asked:
            asked.append(where)
        return False

    return answer
