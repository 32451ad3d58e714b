"""Sizes with symbols are computed once for equal expressions: the same expressions, sooner.

Tracing adds, multiplies and compares sizes some thousand times a model, and sympy works each of them out anew. Here
its answer for equal expressions of equal types is kept. PyTorch prepares each such step for a log and for a replay,
too; here it does so only where steps are recorded. And it asks for guards where an answer is true whatever the sizes
are. Together they are a fifth of what tracing takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import SymBool, SymInt
from torch.fx.experimental import recording, sym_node, symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# For these, sympy's answer follows from the two expressions alone; for `mod`, it depends on the ranges of symbols.
METHODS = ("eq", "ne", "ge", "gt", "le", "lt", "add", "mul", "sub", "and_", "or_")
PLAIN = {name: getattr(SymNode, f"_{name}") for name in METHODS}
# What Python code calls for them with whole numbers, itself or with its operands in the other order.
OPERATORS = ("eq", "ne", "ge", "gt", "le", "lt", "add", "mul", "sub", "radd", "rmul", "rsub")
PLAIN_OPERATORS = {name: getattr(SymInt, f"__{name}__") for name in OPERATORS}
PLAIN_QUESTION = symbolic_shapes._guard_or
PLAIN_EXPECTATION = symbolic_shapes.expect_true
PLAIN_EVALUATION = ShapeEnv.evaluate_sym_node
PLAIN_EXPRESSION: Any = SymNode.expr.fget  # type: ignore[attr-defined]
PLAIN_NUMBER = SymNode.wrap_int
_MOST = 1 << 16
_VALUES = (int, float, bool)
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_proxy_mode = torch._C._get_dispatch_mode
_modes_before = torch._ops.mode_stack_state_for_pre_dispatch().get


def computed_once(name: str, method: Callable[[SymNode, SymNode], SymNode]) -> Callable[..., SymNode]:
    """A method of two symbols that keeps what it answered."""
    answers: dict[Any, tuple[Any, type, bool]] = {}
    operator = sym_node.method_to_operator(name.removesuffix("_"))

    def quick(self: SymNode, other: SymNode) -> SymNode:
        env, mine, theirs = self.shape_env, self._hint, other._hint
        if env is None or env._translation_validation_enabled:
            return method(self, other)
        if type(mine) not in _VALUES or type(theirs) not in _VALUES:
            return method(self, other)
        if _proxy_mode(_PROXY) is not None or _modes_before(0) is not None:
            return method(self, other)
        left, right, one, two = self.expr, other.expr, self.pytype, other.pytype
        key = (
            left,
            right,
            type(left),
            type(right),
            one,
            two,
            self._optimized_summation,
            other._optimized_summation,
        )
        answer = answers.get(key)
        if answer is None:
            result = method(self, other)
            if len(answers) >= _MOST:
                answers.clear()
            answers[key] = result._expr, result.pytype, result._optimized_summation
            return result
        expression, pytype, summation = answer
        hint = pytype(operator(mine, theirs))
        return SymNode(expression, env, pytype, hint, optimized_summation=summation)

    return quick


def of_whole_numbers(name: str, operator: Callable[[SymInt, Any], Any]) -> Callable[[SymInt, Any], Any]:
    """An operator of a size and another or an `int` that keeps what it answered; of all else, as it is."""
    answers: dict[Any, tuple[Any, type, bool]] = {}
    method = sym_node.method_to_operator(name.removeprefix("r"))
    turned = name.startswith("r")

    def quick(self: SymInt, other: Any) -> Any:
        node, kind = self.node, type(other)
        if type(node) is not SymNode:
            return operator(self, other)
        env, mine = node.shape_env, node._hint
        if kind is int:
            right, summation, value = other, False, other
        elif kind is SymInt and type(other.node) is SymNode:
            theirs = other.node
            right, summation, value = theirs.expr, theirs._optimized_summation, theirs._hint
        else:
            return operator(self, other)
        if (
            env is None
            or env._translation_validation_enabled
            or type(mine) is not int
            or type(value) is not int
        ):
            return operator(self, other)
        if _proxy_mode(_PROXY) is not None or _modes_before(0) is not None:
            return operator(self, other)
        left = node.expr
        key = left, right, node._optimized_summation, summation
        answer = answers.get(key)
        if answer is None:
            result = operator(self, other)
            if type(result) in (SymInt, SymBool) and type(result.node) is SymNode:
                if len(answers) >= _MOST:
                    answers.clear()
                own = result.node
                answers[key] = own._expr, own.pytype, own._optimized_summation
            return result
        expression, pytype, summation = answer
        hint = method(value, mine) if turned else method(mine, value)
        result = SymNode(expression, env, pytype, hint, optimized_summation=summation)
        return SymInt(result) if pytype is int else SymBool(result)

    return quick


def expression(self: SymNode) -> Any:
    """`SymNode.expr`, which asks whether it is a number only where symbols were replaced by others."""
    env = self.shape_env
    if env is not None and not env.replacements:
        return self._expr
    return PLAIN_EXPRESSION(self)


def wrapped(self: SymNode, number: int) -> SymNode:
    """`SymNode.wrap_int`: nobody writes to the node of a number, so an environment has one of each."""
    env = self.shape_env
    if env is None or type(number) is not int:
        return PLAIN_NUMBER(self, number)
    known = env.__dict__.setdefault("_numbers_of_tests", {})
    node = known.get(number)
    if node is None:
        node = known[number] = PLAIN_NUMBER(self, number)
    return node


def hidden(function: Any) -> Any:
    """A function whose frame is one of PyTorch's: the line of a model that asks is the first that is none."""
    function.__code__ = function.__code__.replace(co_filename=symbolic_shapes.__file__)
    return function


def without_guards(method: Callable[..., Any]) -> Callable[..., Any]:
    """`ShapeEnv.evaluate_sym_node` that looks for guards only where the answer depends on sizes."""

    def quick(self: ShapeEnv, sym_node: SymNode, *args: Any, **kwargs: Any) -> Any:
        expression = sym_node._expr
        if expression is sympy.true or expression is sympy.false:
            return expression
        return method(self, sym_node, *args, **kwargs)

    return hidden(quick)


def _constant(condition: Any) -> bool | None:
    """What a condition is whatever the sizes are; None: that depends on them."""
    if condition is True or condition is False:
        return bool(condition)
    if type(condition) is SymBool:
        expression = condition.node._expr
        if expression is sympy.true or expression is sympy.false:
            return expression is sympy.true
    return None


def asked(condition: Any, default: bool) -> bool:
    """In place of `symbolic_shapes._guard_or`: what is so whatever the sizes are is not asked."""
    known = _constant(condition)
    return PLAIN_QUESTION(condition, default) if known is None else known


def expected(condition: Any, skip: int = 0) -> bool:
    """In place of `symbolic_shapes.expect_true`."""
    known = _constant(condition)
    return PLAIN_EXPECTATION(condition, skip + 1) if known is None else known


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
    for name in OPERATORS:
        setattr(SymInt, f"__{name}__", of_whole_numbers(name, PLAIN_OPERATORS[name]))
    SymNode.expr = property(expression)  # type: ignore[method-assign, assignment]
    SymNode.wrap_int = wrapped  # type: ignore[method-assign]
    ShapeEnv.evaluate_sym_node = without_guards(PLAIN_EVALUATION)  # type: ignore[method-assign]
    symbolic_shapes._guard_or = hidden(asked)
    symbolic_shapes.expect_true = hidden(expected)
    for name, method in [*vars(ShapeEnv).items()]:
        code = getattr(method, "__code__", None)
        if code is not None and code.co_filename == recording.__file__:
            setattr(ShapeEnv, name, unrecorded(method))
