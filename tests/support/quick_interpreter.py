"""Triton's interpreter without what it does again and again: the same results, and the same errors.

At each launch, and at each call of a function within a kernel, it looks through all of `triton.language` for what it
replaces by functions of its own; here it is found once, set when a launch begins and taken back when it ends. It looks
for overflows of integers, and says nothing of what it finds where kernels are not debugged; here it does not look. And
it makes a table of dtypes for each question, and each tensor its shape anew; here there is one of each kind. Together
they are half of what tests of kernels take.
"""

from __future__ import annotations

import ast
import linecache
import math
from functools import cache
from types import SimpleNamespace
from typing import Any

from triton import language
from triton.language import constexpr
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_replaced = interpreter._patch_lang
_numpy_dtype = interpreter._get_np_dtype
_computation_type = TritonSemantic.computation_type_impl
_types: dict[Any, Any] = {}
PLAIN_REWRITE = interpreter.FunctionRewriter.rewrite_ast
PLAIN_BLOCK: Any = language.block_type.__init__
_blocks: dict[tuple[Any, ...], tuple[Any, int]] = {}
_names: dict[tuple[Any, str], str] = {}


class _Language:
    """What the interpreter replaces in the modules that kernels see, and what stands there otherwise."""

    def __init__(self) -> None:
        scope = _replaced(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
        self.own: dict[tuple[Any, str], Any] = {}
        for place, name, before in scope._changes:
            self.own.setdefault((place, name), before)  # of what was replaced twice, the first
        self.interpreted = {(place, name): vars(place)[name] for place, name in self.own}
        scope.restore()
        self.launched = False

    def begin(self, kernel: Any) -> _Language:
        """Of a launch; or of a call within one, whose end nobody asks for."""
        if not self.launched:
            self.launched = True
            for (place, name), value in self.interpreted.items():
                setattr(place, name, value)
        return self

    def restore(self) -> None:
        """At the end of a launch."""
        self.launched = False
        for (place, name), value in self.own.items():
            if value is interpreter._MISSING:
                delattr(place, name)
            else:
                setattr(place, name, value)


def _dtype_in_numpy(dtype: Any, known: dict[str, Any]) -> Any:
    of = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
    if isinstance(of, language.pointer_type):
        return _numpy_dtype(of)
    found = known.get(of.name)
    if found is None:
        found = known[of.name] = _numpy_dtype(of)
    return found


@cache
def _sizes(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """How many elements a shape has, and its sizes, as tensors have them; nobody writes to them."""
    return constexpr(math.prod(shape)), language.tuple([constexpr(size) for size in shape])


def _make(self: language.tensor, handle: Any, type: language.dtype) -> None:
    """In place of a tensor's `__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _sizes(tuple(type.shape) if type.is_block() else ())


def _computed_in(semantic: Any, a: Any, a_scalar: bool, b: Any, b_scalar: bool, divides: bool) -> Any:
    """The dtype in which two are computed."""
    key = a.name, a_scalar, b.name, b_scalar, divides
    found = _types.get(key)
    if found is None:
        found = _computation_type(semantic, a, a_scalar, b, b_scalar, divides)
        if type(a) is type(b) is language.dtype:
            _types[key] = found
    return found


def _make_block(self: Any, element_ty: Any, shape: Any) -> None:
    """In place of a block type's `__init__`: those of one shape share it, as nobody writes to it."""
    values = shape.values if type(shape) is language.tuple else shape
    sizes = tuple([size.value if type(size) is constexpr else size for size in values])
    whole = {*map(type, sizes)} == {int}  # 16.0 is equal to 16, and no size
    known = _blocks.get(sizes) if whole else None
    if known is None:
        PLAIN_BLOCK(self, element_ty, shape)
        if whole:
            _blocks[sizes] = self.shape, self.numel
        return
    self.element_ty = element_ty
    self.shape, self.numel = known
    key = sizes, str(element_ty)
    name = _names.get(key)
    if name is None:
        name = _names[key] = f"<{self.shape}, {element_ty}>"
    self.name = name


def _lines_of(function: Any) -> tuple[int, list[str]] | None:
    """The number of a function's `def` in its file, from 1, and its lines from there on; None: not so easily."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename)
    first = next(
        (place for place in range(code.co_firstlineno - 1, len(lines)) if lines[place].startswith("def ")),
        None,
    )
    # Decorators of one line each stand between.
    if first is None or not all(line.startswith("@") for line in lines[code.co_firstlineno - 1 : first]):
        return None
    end = first + 1
    while end < len(lines) and (lines[end][0] in " \n)" or not lines[end].strip()):
        end += 1
    own = lines[first:end]
    if sum(line.strip().startswith("def ") for line in own) != 1:
        return None
    return first + 1, own


def _rewritten(self: Any) -> Any:
    """In place of `FunctionRewriter.rewrite_ast`."""
    found = _lines_of(self.fn)
    if found is None:
        return PLAIN_REWRITE(self)
    first, lines = found
    self.filename, self.def_file_lineno, self.def_lineno = self.fn.__code__.co_filename, first, 1
    tree = self.ast_transformer.visit(ast.parse("\n" * (first - 1) + "".join(lines)))
    return self._compile_and_exec(ast.fix_missing_locations(tree))


def install() -> None:
    """In a process whose kernels are interpreted, before the first launch."""
    known: dict[str, Any] = {}
    interpreter._patch_lang = _Language().begin
    interpreter._get_np_dtype = lambda dtype: _dtype_in_numpy(dtype, known)
    language.tensor.__init__ = _make
    TritonSemantic.computation_type_impl = _computed_in
    language.block_type.__init__ = _make_block
    interpreter.FunctionRewriter.rewrite_ast = _rewritten
    if not interpreter.interpreter_builder.options.debug:
        TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
