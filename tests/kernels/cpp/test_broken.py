"""Kernels with one line of their text broken: each is caught by the cases of `test_attention.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcompile.kernels.cpp.host import ops, source
from kvcompile.kernels.cpp.spec import CppSpec
from tests.kernels.cpp.test_attention import CASES, PROMPTS, QUADS, WHOLE
from tests.kernels.cpp.test_expression import CARRIED, PLAIN
from tests.support.triton_attention import check

# What is broken, by what, and the case that must tell.
BREAKS: dict[str, tuple[str, str, str]] = {
    "the newest token is not read": ("plain", "return length;\n}", "return length - 1;\n}"),
    "a token goes to the next slot": (
        "plain",
        "const int64_t slot = token;",
        "const int64_t slot = token + 1;",
    ),
    "scores are not scaled": ("plain", "(own, SM_SCALE, out[h]", "(own, 1.0f, out[h]"),
    "the sink has no share": ("half", "all.total = std::exp(sink - all.top);", ""),
    "K's scale is dropped": ("int8", "multiply(scores, factor, block.count);", ""),
    "V's scale is dropped": ("int8", "multiply(p, factor, block.count);", ""),
    "another scale is written": ("int8", "absmax(x, N), ", "2.0f * absmax(x, N), "),
    "another row of the page": ("pages", "at.head}, row % PER_PAGE)", "at.head}, (row ^ 1) % PER_PAGE)"),
    "heads of a page mixed": (
        "pages by turns",
        "first.head + h};\n        const int count",
        "first.head};\n        const int count",
    ),
    "a window one short": ("ring", "key > query - 6", "key > query - 5"),
    "places are those of the sequence": ("in cache", "token[i] - gone", "token[i]"),
    "chunks are not told apart": ("window, chunked", "key / 8 == query / 8", "true"),
    "a group's least is that of its last": ("kivi", "low = std::min(low, group[t][c])", "low = group[t][c]"),
    "newest tokens are read quantized": (
        "residuals",
        "return token >= newest_from(length)",
        "return token > newest_from(length)",
    ),
    "the result stays turned": ("residuals", "    hadamard<8>(sum, V_DIM);\n", ""),
    "no score is left": ("H2O", "gained[j - i];", "0.0f;"),
    "the age is not counted": ("H2O in cache", "std::max<int64_t>(position - token[i], 1)", "int64_t{1}"),
    "only the first head counts": ("TOVA", "h < HEADS; ++h) {", "h < 1; ++h) {"),
    "pages that were not chosen": ("Quest", "chosen[i] >= length || ", ""),
    "a prompt's scores are not scaled": ("plain prompt", "DEPTH, SM_SCALE, own", "DEPTH, 1.0f, own"),
    "late blocks of keys are left out": ("plain prompt", "keys.least > high", "keys.most > high"),
    "early queries see late keys": ("plain prompt", "keys.most <= low", "keys.most <= high"),
    "a block is seen whole": ("window prompt", "keys.least > high - 100", "keys.least > low - 100"),
    "tokens before a window are seen": ("window prompt", "key > query - 100", "key > query - 101"),
    "forms of a token are all seen": ("residual prompt", " && (!may || may[j * allowed.stride[2]])", ""),
    "the sink of a prompt has no share": (
        "capped prompt",
        "total * more + std::exp(sink - top)",
        "total * more",
    ),
    "the first tokens are as far as they were": (
        "in-cache prompt",
        "block.place[j] < FIRST; ++m",
        "false; ++m",
    ),
    "a bias by another place": ("in-cache prompt", "std::min(at, FARTHEST) : at", "at : at"),
    "shares of another sum": ("H2O prompt", "top + std::log(total)", "top + 0.5f * std::log(total)"),
    "a block of keys gets nothing": ("H2O prompt", "mine / units * BLOCK", "mine / units / 2 * BLOCK"),
    "weights that were kept are below an earlier top": ("H2O prompt", "set1(factor[r])", "set1(1.0f)"),
    "shares are no mean": ("H2O prompt", "mul(column[i], set1(", "kv::add(column[i], set1("),
    "heads of a layer are left out": (
        "SnapKV prompt",
        "(unit + 1) * PER_UNIT; ++head",
        "unit * PER_UNIT + 1; ++head",
    ),
    "more queries count": ("SnapKV prompt", "queries - 30, 0", "queries - 90, 0"),
    "a prompt's scores are not capped": ("capped prompt", "mul(tanh(", "mul(("),
    "bytes of a sum by 255": ("whole int8", "fma(x, set1(256.0f)", "fma(x, set1(255.0f)"),
    "codes count from 0": ("whole int8", "set1_int(-128 * q.sum[first + s / P][s % P])", "set1_int(0)"),
    "a span's least is dropped": (
        "whole int4",
        "x = fma(load(least[s] + start), set1(q.span[first + g][s]), x);",
        "",
    ),
    "spans have the first one's weights": ("whole int4", "SPANS + (high ? b : a)]", "SPANS + a]"),
    "high halves of keys count as they stand": (
        "whole int4",
        "+ start), set1(1.0f / 16))",
        "+ start), set1(1.0f))",
    ),
    "high halves of values count as they stand": (
        "whole int4",
        "weights.scale[high] / 16)",
        "weights.scale[high])",
    ),
    "a row of a pair is the other": ("whole pairs", "rows.at(i + 1 < n ? i + 1 : i)", "rows.at(i)"),
    "a mask is dropped": ("expression", " : -INFINITY;", " : 0.0f;"),
    "an element beside the right one": (
        "expression",
        "std::min(std::max<int64_t>(place, 0), size - 1)",
        "std::min(std::max<int64_t>(place, 0) + 1, size - 1)",
    ),
    "what counts from the end is cut off": (
        "carried from the end",
        "place < 0 ? place + size : place",
        "place",
    ),
    "a query that sees nothing gives no number": (
        "carried holes",
        "if (all.total == 0.0f) all = {0.0f, 1.0f};",
        "",
    ),
    "a prompt's query that sees nothing gives no number": (
        "carried holes",
        "if (total == 0.0f) top = 0.0f, total = 1.0f;",
        "",
    ),
    "quotients round to 0": ("carried behind", "a / b - (a % b < 0)", "a / b"),
    "integers have 32 bits": ("carried wide", "const int64_t e", "const int32_t e"),
    "keys that are read stay turned": ("turned before RoPE", "hadamard<8>(decoded", "hadamard<1>(decoded"),
    "queries are turned that meet such keys": (
        "turned before RoPE",
        "  q.ready();\n",
        "  hadamard<8>(q.own, DIM);\n  q.ready();\n",
    ),
    "every form is read": ("H2O residual prompt", "form_of(query, key) == block.form[j] && ", ""),
    "forms are left out": (
        "H2O residual prompt",
        "keys.most < keys_from(low) : keys",
        "keys.most < keys_from(high) : keys",
    ),
    "keys stand where their tokens do": ("H2O in-cache prompt", "block.at[i]", "block.place[i]"),
    "queries stand where their tokens do": ("H2O in-cache prompt", "asked.at[", "asked.position["),
    "shares are joined unscaled": (
        "two pieces",
        "const float share = std::exp(own.top - all.top);",
        "const float share = 0.5f;",
    ),
}


SITES = CASES | PROMPTS | {f"whole {name}": case for name, case in WHOLE.items()}
SITES |= {f"carried {name}": replace(PLAIN, carried=made()) for name, made in CARRIED.items()}
SITES["whole pairs"] = replace(WHOLE["in the model's"], dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))
    torch.set_num_threads(2)  # so prompts come in several blocks of queries
    yield
    torch.set_num_threads(1)
    ops.forget()
    source._kernel.cache_clear()


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=() if n % 12 == 6 else pytest.mark.slow) for n, what in enumerate(BREAKS)],
)
def test_broken_on_purpose(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, text, broken = BREAKS[what]
    headers = {
        f'#include "{name}.h"\n': (source.INCLUDE / f"{name}.h")
        .read_text("utf-8")
        .replace("#pragma once\n", "")
        for name in ("pairs", "quads", "address", "expression")
    }
    if case.startswith("whole"):
        monkeypatch.setattr(source, "isa", lambda: QUADS)
    made = source.generate
    done = []

    def generate(spec: CppSpec) -> str:
        # What is in a header stands in the file itself, so that it is broken alone.
        whole = made(spec)
        for include, header in headers.items():
            whole = whole.replace(include, header)
        done.append(text in whole)
        return whole.replace(text, broken)

    monkeypatch.setattr(source, "generate", generate)
    source._kernel.cache_clear()
    ops.forget()
    with pytest.raises((AssertionError, ValueError)):  # the latter: tokens went that may not
        check(SITES[case], "cpp")
    assert any(done), "the text is not there any more"
