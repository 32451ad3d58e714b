"""Functions that kernels of several roles call: conversions, a Hadamard rotation, packing of bits.

Their text is `templates/helpers.py.jinja`. A kernel's file has a copy of those that it calls, so that it reads and
runs by itself.

| function | for |
|---|---|
| fp8_e4m3_bits, fp8_e5m2_bits | reading fp8 where the hardware has no conversion (below sm_89, and interpreted) |
| to_fp8_e4m3_bits, to_fp8_e5m2_bits | writing it there |
| bfloat16_bits | writing bfloat16 where Triton's interpreter would cut off |
| to_nearest_even | whole numbers, as torch.round |
| floor_divided, floor_remainder, trunc_divided | integers that may be negative: Triton's own differ interpreted |
| moved_down, halves_of, bytes_of | numbers out of the words that they stand in |
| product | a product that no sum takes up unrounded |
| made_once | a block that two products read, and that is made for both at once |
| butterflies | the Hadamard rotation of a tile, without its factor; `hadamard` prints the call |
| packed | small integers into bytes, as kernels/reference/packing.py has them |
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import resources

from kvcompile.layouts.storage.hadamard import block


def with_helpers(text: str) -> str:
    """The kernel `text` with the helpers that it calls, and those that these call, before it."""
    known = _helpers()
    wanted: set[str] = set()
    found = _called(text) & known.keys()
    while found - wanted:
        wanted |= found
        found = {name for helper in wanted for name in _calls()[helper]} & known.keys()
    return "\n\n\n".join([*(source for name, source in known.items() if name in wanted), text.strip()]) + "\n"


def module(text: str) -> str:
    """A file that runs by itself: the imports, the helpers that the kernel `text` calls, and the kernel."""
    return f"import triton\nimport triton.language as tl\n\n\n{with_helpers(text)}"


def hadamard(x: str, rows: int, width: int, dim: int) -> str:
    """An expression: the float32 tile `x` [rows, width] rotated in blocks of the largest power of two dividing `dim`.

    width: a power of two, of which the channels beyond `dim` are zeros
    """
    size = block(dim)
    return f"butterflies({x}, {rows}, {width}, {size}, {size.bit_length() - 1}) * {size**-0.5!r}"


def stored(x: str, dtype: str, interpreted: bool) -> str:
    """An expression: float32 `x` in the dtype called `dtype`, to nearest even."""
    if interpreted and dtype == "bfloat16":
        return f"bfloat16_bits({x})"
    return x if dtype == "float32" else f"{x if x.isidentifier() else f'({x})'}.to(tl.{dtype})"


@cache
def _helpers() -> dict[str, str]:
    """Each helper's source, by name."""
    text = resources.files("kvcompile.kernels.triton").joinpath("templates", "helpers.py.jinja").read_text()
    return {
        node.name: "\n".join(text.splitlines()[node.lineno - 1 - len(node.decorator_list) : node.end_lineno])
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }


@cache
def _calls() -> dict[str, set[str]]:
    """What each helper calls."""
    return {name: _called(source) for name, source in _helpers().items()}


def _called(text: str) -> set[str]:
    return {
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
