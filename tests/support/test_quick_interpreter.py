"""What the interpreter runs of a kernel, and the types of its blocks, are what Triton makes of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from triton import language
from triton.language import constexpr
from triton.runtime import interpreter

from kvcompile.kernels.triton.host.source import kernel
from tests.support import quick_interpreter
from tests.support.kernel_specs import cache, spec
from tests.support.quick_interpreter import PLAIN_BLOCK, PLAIN_REWRITE, _lines_of, _rewritten

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted here"
)


def constants(code: Any) -> list[Any]:
    """All that a code object does and where, with those in it."""
    inner = [each for each in code.co_consts if hasattr(each, "co_code")]
    own = (code.co_code, code.co_names, code.co_varnames, code.co_filename, [*code.co_positions()])
    plain = [repr(each) for each in code.co_consts if not hasattr(each, "co_code")]
    return [own, plain, *(found for each in inner for found in constants(each))]


@pytest.mark.parametrize("role", ["decode", "append", "prefill"])
def test_kernels_are_rewritten_alike(role: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert interpreter.FunctionRewriter.rewrite_ast is _rewritten
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))
    made, _ = spec(
        role, cache(keys={"dtype": "int8"}, retention={"kind": "sink_window", "sinks": 4, "window": 60})
    )
    function = kernel.__wrapped__(made).function
    assert _lines_of(function.fn) is not None
    quick, plain = _rewritten(function.rewriter), PLAIN_REWRITE(function.rewriter)
    assert quick is not plain and constants(quick.__code__) == constants(plain.__code__)


def test_what_is_not_easy_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def inside() -> None:
        pass

    asked: list[Any] = []
    monkeypatch.setattr(quick_interpreter, "PLAIN_REWRITE", asked.append)
    rewriter = interpreter.FunctionRewriter(inside)
    assert _lines_of(inside) is None and _rewritten(rewriter) is None and asked == [rewriter]


@pytest.mark.parametrize("shape", [[16, 8], [constexpr(4)], [constexpr(2), 2, constexpr(1)]])
def test_types_of_blocks(shape: list[Any]) -> None:
    for element in (language.float32, language.pointer_type(language.int8)):
        plain: Any = object.__new__(language.block_type)
        PLAIN_BLOCK(plain, element, shape)
        for given in (shape, language.tuple(shape)):
            quick = language.block_type(element, given)
            assert quick == plain and str(quick) == str(plain) and quick.numel == plain.numel
            assert [*quick.shape] == [*plain.shape] and type(quick.shape) is type(plain.shape)


@pytest.mark.parametrize("shape", [[], [3], [16.0]])
def test_what_is_no_shape_is_refused(shape: list[Any]) -> None:
    language.block_type(language.float32, [16])  # which 16.0 is equal to
    for _ in range(2):
        with pytest.raises((TypeError, ValueError)):
            language.block_type(language.float32, shape)
