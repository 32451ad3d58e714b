"""The inline assembly of kernels, run instruction by instruction: what a GPU would do, without one.

The interpreter runs the plain form of the same conversions, so these are all that no other test reaches. A few lines of
Python know the PTX instructions that occur (PTX ISA, "prmt", "lop3", "sub", "fma.rn").
"""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import resources
from itertools import product

import numpy as np
import pytest
import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tile.reader import reader
from kvcompile.layouts import CacheLayout, uint

HALF = np.float16


@cache
def assembly() -> dict[str, str]:
    """Function -> its assembly text."""
    text = resources.files("kvcompile.kernels.triton").joinpath("templates", "helpers.py.jinja").read_text()
    found = {}
    for node in ast.parse(text).body:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "inline_asm_elementwise":
                assert isinstance(node, ast.FunctionDef) and isinstance(call.args[0], ast.Constant)
                found[node.name] = str(call.args[0].value)
    return found


def halves(word: int) -> np.ndarray:
    return np.array([word & 0xFFFF, word >> 16], dtype=np.uint16).view(HALF)


def word(pair: np.ndarray) -> int:
    low, high = pair.astype(HALF).view(np.uint16)
    return int(low) | int(high) << 16


def statements(text: str) -> list[str]:
    """The instructions of `text`; a register that is taken apart into two halves is an instruction for each."""
    text = re.sub(r"\.reg[^;]*;", "", text)
    text = re.sub(r"mov\.b32 \{(\w+), (\w+)\}, (\w+);", r"and.b32 \1, \3, 0xFFFF; shr.b32 \2, \3, 16;", text)
    return [line.strip() for line in re.split(r"[;{}]", text) if line.strip()]


def run(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """Registers after the instructions of `text`, each of 32 bits."""
    registers = dict(inputs)

    def value(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    for line in statements(text):
        operation, rest = line.split(maxsplit=1)
        target, *names = (name.strip() for name in rest.split(","))
        a = [value(name) for name in names]
        match operation:
            case "mov.b32":
                registers[target] = a[0]
            case "xor.b32":
                registers[target] = a[0] ^ a[1]
            case "prmt.b32":
                source = [(x >> 8 * i) & 0xFF for x in a[:2] for i in range(4)]
                chosen = [(a[2] >> 4 * i) & 0xF for i in range(4)]
                assert max(chosen) < 8, "no signs are replicated here"
                registers[target] = sum(source[c] << 8 * i for i, c in enumerate(chosen))
            case "lop3.b32":
                bits = zip(*(f"{x:032b}" for x in a[:3]), strict=True)
                table = a[3]
                registers[target] = int("".join(str(table >> int("".join(b), 2) & 1) for b in bits), 2)
            case "and.b32":
                registers[target] = a[0] & a[1]
            case "shl.b32":
                registers[target] = a[0] << a[1] & 0xFFFFFFFF
            case "shr.b32":
                registers[target] = a[0] >> a[1]
            case "cvt.rn.f16x2.e4m3x2":
                pair = torch.tensor([a[0] & 0xFF, a[0] >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn)
                registers[target] = word(pair.to(torch.float16).numpy())
            case "mul.rn.f32":
                single = np.array(a[:2], dtype=np.uint32).view(np.float32)
                registers[target] = int((single[:1] * single[1:]).view(np.uint32)[0])
            case "mul.f16x2":
                registers[target] = word(halves(a[0]) * halves(a[1]))
            case "sub.f16x2":
                registers[target] = word(halves(a[0]) - halves(a[1]))
            case "fma.rn.f16x2":
                exact = halves(a[0]).astype(np.float64) * halves(a[1]) + halves(a[2])
                registers[target] = word(exact)
            case _:
                raise ValueError(f"no such instruction here: {line.strip()}")
    return registers


def test_all_assembly_is_run_here() -> None:
    kinds = ("halves", "subnormals")
    bits = {f"bits{w}_at{s}_{kind}" for w in (2, 4) for s in range(0, 16, w) for kind in kinds}
    fp8 = {"fp8_e4m3_halves", "fp8_e5m2_halves"}
    forms = ("int8", "uint8", "fp8_e4m3", "fp8_e5m2", "native_e4m3")
    words = {f"{form}_at{bit}_halves" for form in forms for bit in (0, 8)}
    others = {
        "product",
        "log2_of",
        "int8_halves",
        "uint8_halves",
        "halfwords",
        "affine",
        "affine_at0",
        "affine_at1",
    }
    lowest = {f"int8_at{bit}_subnormals" for bit in (0, 8)}
    assert set(assembly()) == {*others, *fp8, *bits, *words, *lowest}


@pytest.mark.parametrize("bit", [0, 8])
def test_signed_codes_count_from_the_lowest(bit: int) -> None:
    """(x + 128) * 2^-24 of both bytes, whatever the other bytes of the words are."""
    for a, b in ((x, 255 - x) for x in range(256)):
        words = (a << bit | 0x5A << (8 - bit)) | (b << bit | 0xC3 << (8 - bit)) << 16
        out = run(assembly()[f"int8_at{bit}_subnormals"], {"$1": words})
        signed = [x - 256 * (x > 127) for x in (a, b)]
        assert list(halves(out["$0"])) == [(x + 128) * 2.0**-24 for x in signed]


def constraints() -> dict[str, list[str]]:
    """The constraints of each helper's operands, outputs first."""
    text = resources.files("kvcompile.kernels.triton").joinpath("templates", "helpers.py.jinja").read_text()
    found = {}
    for node in ast.parse(text).body:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "inline_asm_elementwise":
                assert isinstance(node, ast.FunctionDef) and isinstance(call.args[1], ast.Constant)
                found[node.name] = str(call.args[1].value).split(",")
    return found


@pytest.mark.parametrize("name", sorted(assembly()))
def test_an_output_may_have_the_register_of_an_input(name: str) -> None:
    """If an input is read after an output was written, that output needs a register of its own, and says so (`&`)."""
    operands = constraints()[name]
    outputs = {f"${place}" for place, kind in enumerate(operands) if kind.startswith("=")}
    inputs = {f"${place}" for place, kind in enumerate(operands) if not kind.startswith("=")}
    written: set[str] = set()
    for line in statements(assembly()[name]):
        target, *read = (one.strip() for one in line.split(maxsplit=1)[1].split(","))
        if inputs & set(read):
            late = {one for one in written if not operands[int(one[1:])].startswith("=&")}
            assert not late, f"{name}: {line.strip()} reads an input after {late} was written"
        written |= {target} & outputs
    assert written == outputs


def test_a_product_is_rounded() -> None:
    """Not kept for the sum that it goes into: that would be another number."""
    pairs = np.random.default_rng(0).standard_normal((200, 2)).astype(np.float32)
    for pair in pairs:
        first, second = (int(bits) for bits in pair.view(np.uint32))
        got = run(assembly()["product"], {"$1": first, "$2": second})["$0"]
        exact = np.float64(pair[0]) * np.float64(pair[1])
        assert np.array([got], dtype=np.uint32).view(np.float32)[0] == np.float32(exact) != exact


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_becomes_float16(name: str, dtype: torch.dtype) -> None:
    """All that is ever stored: finite numbers."""
    known = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float16).numpy()
    stored = [byte for byte in range(256) if np.isfinite(known[byte])]
    for start in range(len(stored) - 3):
        four = stored[start : start + 4]
        out = run(assembly()[f"fp8_{name}_halves"], {"$2": sum(b << 8 * i for i, b in enumerate(four))})
        assert [*halves(out["$0"]), *halves(out["$1"])] == [known[b] for b in four]


@pytest.mark.parametrize(("name", "offset"), [("int8_halves", 256), ("uint8_halves", 0)])
def test_bytes_become_float16(name: str, offset: int) -> None:
    for first in range(0, 256, 4):
        numbers = [first, first + 3, 255 - first, first + 1]
        packed = sum(n << 8 * i for i, n in enumerate(numbers))
        out = run(assembly()[name], {"$2": packed})
        got = [*halves(out["$0"]), *halves(out["$1"])]
        assert got == [n - offset if n >= 128 else n for n in numbers]


def test_bytes_are_spread() -> None:
    out = run(assembly()["halfwords"], {"$2": 0xFF804001})
    assert (out["$0"], out["$1"]) == (0x00400001, 0x00FF0080)


@pytest.mark.parametrize("odd", [0, 1])
def test_codes_become_numbers(odd: int) -> None:
    """code * scale + minimum of two channels, whose numbers are the lower or the upper ones of two words each."""
    g = np.random.default_rng(odd)
    for _ in range(50):
        codes, scales, minima = g.integers(0, 16, 2), g.standard_normal(4), g.standard_normal(4)
        words = [word(pair) for pair in (codes, scales[:2], scales[2:], minima[:2], minima[2:])]
        out = run(assembly()[f"affine_at{odd}"], {f"${n + 1}": one for n, one in enumerate(words)})
        scale, minimum = (x.astype(HALF).astype(np.float64)[odd::2] for x in (scales, minima))
        assert list(halves(out["$0"])) == list((codes * scale + minimum).astype(HALF))


@pytest.mark.parametrize("bit", [0, 8])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("int8", torch.int8),
        ("uint8", torch.uint8),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("native_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_bytes_of_words_become_float16(form: str, dtype: torch.dtype, bit: int) -> None:
    """A byte of each of two words, whatever stands in the other bytes."""
    known = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float16).numpy()
    stored = [byte for byte in range(256) if np.isfinite(known[byte])]
    for a, b, other in product(stored, (stored[0], stored[len(stored) // 2], stored[-1]), (0, 0x5A, 255)):
        low, high = a | other << 8, b | other << 8
        if bit:
            low, high = other | a << 8, other | b << 8
        out = run(assembly()[f"{form}_at{bit}_halves"], {"$1": low | high << 16})
        assert list(halves(out["$0"])) == [known[a], known[b]]


def owed(width: int, bit: int) -> int:
    """`TileLoader.power` of the codes that stand from `bit` of a word on."""
    stored = CacheLayout(uint(width, 0), uint(width, 0))
    spec = KernelSpec("decode", SiteSpec(stored, sm_scale=1.0), 1, 1, 256, 256, "bfloat16")
    part = reader(spec, "keys")
    assert part.words and part.subnormal
    return next(part.power(i) for i in range(len(part.pieces)) if part.word(i)[1] == bit)


@pytest.mark.parametrize(("width", "shift"), [(w, s) for w in (2, 4) for s in range(0, 16, w)])
def test_bits_become_float16(width: int, shift: int) -> None:
    """As integers, and as the subnormal numbers that a loader says they are, of pieces that cover their bit."""
    power = owed(width, shift)
    assert 16 <= power <= 24
    for a, b in product(range(256), (0, 0x5A, 0xA5, 255)):
        if shift >= 8:  # the other byte is not what is asked for
            a, b = a << 8 | b, b << 8 | a
        codes = [(x >> shift) & (2**width - 1) for x in (a, b)]
        out = run(assembly()[f"bits{width}_at{shift}_halves"], {"$1": a | b << 16})
        assert list(halves(out["$0"])) == codes
        out = run(assembly()[f"bits{width}_at{shift}_subnormals"], {"$1": a | b << 16})
        assert list(halves(out["$0"])) == [code * 2.0**-power for code in codes]
