"""Sizes with symbols are computed once for equal expressions: the same expressions, sooner.

Tracing adds, multiplies and compares sizes some thousand times a model, and sympy works each of them out anew. Here
its answer for equal expressions of equal types is kept. PyTorch prepares each such step for a log and for a replay,
too; here it does so only where steps are recorded. Together they are a tenth of what tracing takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.fx.experimental import recording, sym_node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# For these, sympy's answer follows from the two expressions alone; for `mod`, it depends on the ranges of symbols.
METHODS = ("eq", "ne", "ge", "gt", "le", "lt", "add", "mul", "sub", "and_", "or_")
PLAIN = {name: getattr(SymNode, f"_{name}") for name in METHODS}
_MOST = 1 << 16
_VALUES = (int, float, bool)


def computed_once(name: str, method: Callable[[SymNode, SymNode], SymNode]) -> Callable[..., SymNode]:
    """A method of two symbols that keeps what it answered."""
    answers: dict[Any, tuple[Any, type, bool]] = {}
    operator = sym_node.method_to_operator(name.removesuffix("_"))

    def quick(self: SymNode, other: SymNode) -> SymNode:
        env, mine, theirs = self.shape_env, self._hint, other._hint
        if env is None or env._translation_validation_enabled or get_proxy_mode():
            return method(self, other)
        if type(mine) not in _VALUES or type(theirs) not in _VALUES:
            return method(self, other)
        left, right = self.expr, other.expr
        key = (
            *(left, type(left), self.pytype, self._optimized_summation),
            *(right, type(right), other.pytype, other._optimized_summation),
        )
        if key not in answers:
            result = method(self, other)
            if len(answers) >= _MOST:
                answers.clear()
            answers[key] = result._expr, result.pytype, result._optimized_summation
            return result
        expression, pytype, summation = answers[key]
        hint = pytype(operator(mine, theirs))
        return SymNode(expression, env, pytype, hint, optimized_summation=summation)

    return quick


def unrecorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a shape environment that is not prepared for a replay where nothing is recorded."""
    inner = inspect.unwrap(method, stop=lambda each: each is not method)

    def quick(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        return (method if self.should_record_events else inner)(self, *args, **kwargs)

    return quick


def install() -> None:
    """For this process, and all that it forks."""
    for name in METHODS:
        setattr(SymNode, f"_{name}", computed_once(name, PLAIN[name]))
    for name, method in [*vars(ShapeEnv).items()]:
        code = getattr(method, "__code__", None)
        if code is not None and code.co_filename == recording.__file__:
            setattr(ShapeEnv, name, unrecorded(method))
