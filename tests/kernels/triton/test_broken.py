"""Kernels broken on purpose, a line of their text at a time: each is caught by what the other tests check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from kvcompile.kernels.triton import generate
from kvcompile.kernels.triton.host import source
from kvcompile.kernels.triton.params import KernelSource
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import (
    CacheLayout,
    InKeys,
    Paged,
    Ring,
    SinkWindow,
    Slots,
    fp8,
    int8,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec
from tests.support import carried_scores
from tests.support.generated import forgotten
from tests.support.triton_attention import H2O, Case, check
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CHUNKS = (19, 1, 5)  # a pass of more than a tile of slots, a step, and a pass over what they left
PADS = (2,)  # of one sequence, so that decode is cut into splits


@dataclass(frozen=True)
class Break:
    """In the text of kernels of a role, `what` becomes `into`, everywhere; it must be there."""

    roles: tuple[str, ...]
    what: str
    into: str


BOTH = ("decode", "prefill")
PLAIN = Case(CacheLayout(), chunks=CHUNKS, pads=PADS)
LONG = replace(PLAIN, chunks=(90, 1))  # shares of several tiles
SEVERAL = replace(LONG, heads=(4, 2), pads=(50, 2, 0))  # sequences, so that decode goes over a list
INT8 = Case(CacheLayout(int8(), int8(), Paged(8)), chunks=CHUNKS, pads=PADS)
# Over a list, joined by a launch: sequences that may have common pages, and such as have none.
BUNDLED = replace(INT8, chunks=(90, 1), heads=(4, 2), pads=(50, 0))
GATHERED = replace(BUNDLED, score=ScoreSpec(bias=BiasSpec("alibi")))
INT4 = Case(CacheLayout(uint(4, 16), uint(4, 16)), (2, 1), (32, 32), chunks=CHUNKS, pads=PADS)
GROUPS = Case(
    CacheLayout(uint(4, 16), uint(4, 16)), (2, 1), (64, 64), torch.float16, chunks=CHUNKS, pads=PADS
)
THREE = replace(INT4, dims=(48, 48))  # groups, whose rows begin within words
TILES = replace(GROUPS, layout=CacheLayout(per_channel(4, 8, 16), uint(4, 16)))  # of several groups of tokens
KIVI = Case(CacheLayout(per_channel(4, 16, 16), with_residual(int8(), 5)), chunks=CHUNKS, pads=PADS)
MIXED = replace(INT4, layout=CacheLayout(uint(4, 16), with_residual(uint(4, 16), 5)), dtype=torch.float16)
STREAM = Case(
    CacheLayout(int8(), int8(), Ring(), SinkWindow(3, 9, "in_cache")),
    score=ScoreSpec(sinks=True),
    rotary=RotaryForm("half", 0, 16),
    chunks=CHUNKS,
    pads=PADS,
)
SLIDING = Case(CacheLayout(), mask=MaskSpec("sliding", 7), score=ScoreSpec(4.0), chunks=CHUNKS, pads=PADS)
HEAVY = Case(CacheLayout(int8(), int8(), Slots(), H2O), chunks=CHUNKS, pads=PADS)
ALIBI = replace(PLAIN, score=ScoreSpec(bias=BiasSpec("alibi")))
CALIBRATED = Case(CacheLayout(fp8(scale="head"), fp8(scale="tensor")), chunks=CHUNKS, pads=PADS)
LATENT = Case(CacheLayout(int8(), InKeys(16)), (4, 1), (32, 16), chunks=CHUNKS, pads=PADS)
TURNED = Case(CacheLayout(int8(), with_hadamard(int8())), chunks=CHUNKS, pads=PADS)

BEHIND = replace(PLAIN, carried=carried_scores.behind())
WINDOWS = replace(PLAIN, carried=carried_scores.windows(2))
FROM_THE_END = replace(PLAIN, carried=carried_scores.from_the_end())

BROKEN: dict[str, tuple[Break, Case]] = {
    "a query sees the next token": (
        Break(("prefill",), "key[None, :] <= position", "key[None, :] - 1 <= position"),
        PLAIN,
    ),
    "a query does not see its own key": (
        Break(("prefill",), "key[None, :] <= position", "key[None, :] < position"),
        PLAIN,
    ),
    "a window of one more": (
        Break(("prefill",), "> position[:, None] - 7)", ">= position[:, None] - 7)"),
        SLIDING,
    ),
    "decode sees one slot less": (Break(("decode",), "end = far + 1", "end = far"), PLAIN),
    "a plain tile too many": (Break(("prefill",), "plain_end = near + 1", "plain_end = near + 16"), PLAIN),
    "a tile too few": (Break(BOTH, "stop = tiles", "stop = tiles - 1"), PLAIN),
    "splits that overlap": (
        Break(("decode",), "begin = split * share", "begin = tl.maximum(split * share - 1, 0)"),
        PLAIN,
    ),
    "shares of a list that overlap": (
        Break(("decode",), "here = tl.program_id(0) * share", "here = tl.program_id(0) * (share - 1)"),
        SEVERAL,
    ),
    "a list that ends before its last tile": (
        Break(("decode",), "here + share, work)", "here + share, work - 1)"),
        SEVERAL,
    ),
    "two parts of a list in one place": (
        Break(
            ("decode",), "part = tl.program_id(0) + batch * 2 + own", "part = tl.program_id(0) + batch * 2"
        ),
        GATHERED,
    ),
    "a part of a bundle's list that is not joined": (
        Break(("decode",), "- 1) // share - tl.program_id(0) + 1)", "- 1) // share - tl.program_id(0))"),
        BUNDLED,
    ),
    "a part that is not joined": (Break(("decode",), "// share - first + 1", "// share - first"), SEVERAL),
    "who comes first joins the parts": (Break(("decode",), "arrived == parts - 1", "arrived == 0"), SEVERAL),
    "parts of another head": (Break(("decode",), "* 2 + g[:, None]", "* 2 + 1 - g[:, None]"), SEVERAL),
    "parts of a list weighed alike": (
        Break(("decode",), "tl.sum(values * weight[:, :, None], 1)", "tl.sum(values, 1)"),
        SEVERAL,
    ),
    "a sequence of no tokens gives ones": (
        Break(("decode",), "tl.store(row, tl.zeros([512]", "tl.store(row, 1 + tl.zeros([512]"),
        replace(SEVERAL, chunks=(1, 19), pads=(0, 12)),
    ),
    "parts of a list of another head, joined by a launch": (
        Break(("combine",), "* 2 + head % 2", "* 2 + (head + 1) % 2"),
        GATHERED,
    ),
    "parts of a bundle's list of another head, joined by a launch": (
        Break(("combine",), "* 16 + head % 2", "* 16 + (head + 1) % 2"),
        BUNDLED,
    ),
    "no scale of scores": (Break(BOTH, "s = s * 0.36067376022224085", "s = s"), PLAIN),
    "scores in base e": (Break(BOTH, "tl.exp2(s - highest[:, None])", "tl.exp(s - highest[:, None])"), PLAIN),
    "old sums are not rescaled": (
        Break(("decode",), "total = total * alpha[:, None] +", "total = total +"),
        LONG,
    ),
    "old sums of a prompt are not rescaled": (
        Break(("prefill",), "total = total * alpha +", "total = total +"),
        PLAIN,
    ),
    "old values are not rescaled": (Break(BOTH, "acc0 = acc0 * alpha[:, None]", "acc0 = acc0"), PLAIN),
    "rescaled the wrong way": (Break(BOTH, "tl.exp2(top - highest)", "tl.exp2(highest - top)"), PLAIN),
    "heads of a group mixed up": (Break(("prefill",), "% 2\n", "// 2 % 2\n"), PLAIN),
    "the scale of another token": (
        Break(BOTH, "keys_scale_ptr + base + n", "keys_scale_ptr + base + (n - (n > 0))"),
        replace(INT8, layout=CacheLayout(int8(), int8())),
    ),
    "the scale of values at keys": (
        Break(BOTH, "tl.log2(tl.maximum(v_scale,", "tl.log2(tl.maximum(k_scale,"),
        replace(INT8, dtype=torch.float16),
    ),
    "the next page": (Break(BOTH, "(start + n) // 8", "(((start + n) // 8) ^ 1)"), INT8),
    "a slot beside in its page": (Break(BOTH, "(start + n) % 8", "(((start + n) % 8) ^ 1)"), INT8),
    "nibbles swapped": (Break(BOTH, ">> 4) & 15", ">> 0) & 15"), INT4),
    "nibbles of words swapped": (
        Break(("decode",), ">> 8) & 240", ">> 0) & 240"),
        replace(INT4, dtype=torch.float16),
    ),
    "queries of a piece have less than its codes are owed": (
        Break(("decode",), "* 16.0).to(tl.float16)", "* 8.0).to(tl.float16)"),
        replace(INT4, dtype=torch.float16),
    ),
    "sums of values have less than codes are owed": (
        Break(("decode",), "* 1048576.0", "* 524288.0"),
        replace(INT4, dtype=torch.float16),
    ),
    "minima of keys have what codes are owed": (
        Break(("decode",), f"* {2.0**-20!r}", "* 1.0"),
        replace(INT4, dtype=torch.float16),
    ),
    "values in full have what codes are owed": (
        Break(BOTH, f" * {2.0**-24!r}", " * 1.0"),
        MIXED,
    ),
    "bytes of words swapped": (
        Break(BOTH, "k_words0 >> 8)", "k_words0 >> 0)"),
        replace(INT8, dtype=torch.float16),
    ),
    "a scale of values that no probability is freed of": (
        Break(BOTH, "v_unit = tl.exp2(-v_exponent)", "v_unit = tl.exp2(0.0 * v_exponent)"),
        replace(INT8, dtype=torch.float16),
    ),
    "rows of a group of channels that is another row's": (
        Break(("decode",), "(kc0 // 16)", "((kc0 // 16) ^ 1)"),
        replace(INT4, dtype=torch.float16),
    ),
    "a result of another group's rows": (
        Break(("decode",), "(vc0 // 16)", "((vc0 // 16) ^ 1)"),
        replace(INT4, dtype=torch.float16),
    ),
    "codes of a prompt take the scale of another group": (
        Break(
            ("prefill",),
            "scale_ptr + base * 4 + n[:, None] * 4 + tl",
            "scale_ptr + base * 4 + n[:, None] * 4 + 3 - tl",
        ),
        GROUPS,
    ),
    "codes take the scales of another group of tokens": (
        Break(BOTH, "// 8 + tl.arange(0, 2)[:, None]", "// 8 + 1 - tl.arange(0, 2)[:, None]"),
        TILES,
    ),
    "slots that are counted by sixteens are not": (
        Break(BOTH, "(slots_16 * 16)", "slots_16"),
        replace(PLAIN, chunks=(29, 1), pads=(2, 0)),
    ),
    "no minimum of keys": (
        Break(("prefill",), "s = s + q_sum0[:, None] * k_minimum0[None, :]", "s = s"),
        INT4,
    ),
    "no minimum of keys in a step": (
        Break(("decode",), "s = s + q_sum0[:, None] * ", "s = s + 0.0 * "),
        INT4,
    ),
    "minima of keys that are not the group's": (
        Break(("decode",), "// 16 == column % 2)", "// 16 != column % 2)"),
        replace(INT4, dtype=torch.float16),
    ),
    "what tf32 has of a query's sum, twice": (
        Break(("decode",), "q_high, q_minima - q_high)", "q_high, q_high)"),
        replace(INT4, dtype=torch.float16),
    ),
    "minima of values of another group": (
        Break(("decode",), "(column // 1)", "(column ^ 1)"),
        replace(INT4, dtype=torch.float16),
    ),
    "minima of values that are products, not rescaled": (
        Break(("decode",), "    minima0 = minima0 * alpha[:, None]", "    minima0 = minima0"),
        replace(INT4, dtype=torch.float16, chunks=LONG.chunks),
    ),
    "minima of values not rescaled": (
        Break(("decode",), "minima0 = minima0 * alpha[:, None]", "minima0 = minima0"),
        replace(INT4, chunks=LONG.chunks),
    ),
    "rows of three numbers that all begin a word": (
        Break(("decode",), "k_scale_byte % 4 * 8", "k_scale_byte % 2 * 8"),
        THREE,
    ),
    "three numbers, the last of the next row": (
        Break(("decode",), "v_scale_byte // 4 + 1", "v_scale_byte // 4 + 2"),
        THREE,
    ),
    "the scales of another group": (Break(BOTH, "// 16 * 16 + kc0", "// 16 * 16 + (kc0 ^ 1)"), KIVI),
    "one token less in full": (Break(("decode",), "v_in_full = ((key >= (", "v_in_full = ((key > ("), KIVI),
    "the ring of newest one on": (Break(("decode",), "key % 5", "(key + 1) % 5"), KIVI),
    "new tokens in full one on": (
        Break(
            ("prefill",),
            "(key - first)[:, None].to(tl.int64) * v_s2",
            "(tl.maximum(key - 1, first) - first)[:, None].to(tl.int64) * v_s2",
        ),
        KIVI,
    ),
    "keys turn one place on": (
        Break(("decode",), "tl.maximum(place, 0)", "tl.maximum(place + (key > 4), 0)"),
        STREAM,
    ),
    "sinks stay where they were": (
        Break(("prefill",), "s = tl.where((key < 3)[None, :], f", "s = tl.where((key < 0)[None, :], f"),
        STREAM,
    ),
    "a sink logit weighs double": (
        Break(("prefill", "combine"), "tl.exp2(sink - highest)", "2.0 * tl.exp2(sink - highest)"),
        STREAM,
    ),
    "no softcap": (
        Break(BOTH, "s = 5.7707801635558535 - 11.541560327111707 / (tl.exp2(s) + 1.0)", "s = s * 2.0"),
        SLIDING,
    ),
    "distances the other way": (Break(BOTH, "s = s - slope", "s = s + slope"), ALIBI),
    "a calibrated scale twice": (Break(BOTH, "* keys_scale)", "* keys_scale * keys_scale)"), CALIBRATED),
    "values without their scale": (Break(BOTH, "acc0 * values_scale", "acc0 * 1.0"), CALIBRATED),
    "values of the latent's other half": (Break(BOTH, "tl.dot(w, k0, acc0", "tl.dot(w, k1, acc0"), LATENT),
    "a negative number divided toward zero": (
        Break(BOTH, "tl.where(a >= 0, quotient, -1 - quotient)", "tl.where(a >= 0, quotient, -quotient)"),
        BEHIND,
    ),
    "a remainder that is negative": (
        Break(
            BOTH, "tl.where(a >= 0, remainder, b - 1 - remainder)", "tl.where(a >= 0, remainder, -remainder)"
        ),
        BEHIND,
    ),
    "divided toward zero, rounded down": (Break(BOTH, "= trunc_divided(", "= floor_divided("), BEHIND),
    "an expression of scores in base 2": (Break(BOTH, "s * 0.6931471805599453", "s"), BEHIND),
    "scores that an expression leaves in base e": (Break(BOTH, " * 1.4426950408889634", ""), BEHIND),
    "what an expression hides is seen": (
        Break(BOTH, 'e21, s, float("-inf")', 'e21 | True, s, float("-inf")'),
        BEHIND,
    ),
    "the window of another head": (Break(BOTH, "e0 = heads[:, None]", "e0 = heads[:, None] // 2"), WINDOWS),
    "a place from the end is taken for the first": (Break(BOTH, "+ leaf0_n0, ", "* 0, "), FROM_THE_END),
    "a place beyond the last": (Break(BOTH, "leaf0_n0 - 1", "leaf0_n0 - 2"), FROM_THE_END),
    "splits weighed alike": (
        Break(("combine",), "tl.sum(parts * weight[:, None], 0)", "tl.sum(parts, 0)"),
        PLAIN,
    ),
    "totals of splits not weighed": (
        Break(("combine",), "tl.sum(totals * weight, 0)", "tl.sum(totals, 0)"),
        PLAIN,
    ),
    "turned back by another factor": (
        Break(("combine",), "butterflies(out[None, :]", "butterflies(1.01 * out[None, :]"),
        TURNED,
    ),
    "logits of another slot": (
        Break(("decode",), "+ (start + n)[None, :], (s", "+ (start + (n - (n > 0)))[None, :], (s"),
        HEAVY,
    ),
    "shares of all heads to one": (Break(("columns",), "pooled = pooled + p", "pooled = p"), HEAVY),
    "columns of padding counted": (
        Break(("columns",), "tl.exp2(s - lse[:, None])", "tl.exp2(s - 0.9 * lse[:, None])"),
        HEAVY,
    ),
    "columns of new tokens shifted": (
        Break(("columns",), "+ 9 + start + n", "+ 9 + start + (n - (n > 0))"),
        HEAVY,
    ),
}


@pytest.fixture
def forgets() -> Iterator[None]:
    """Kernels that were generated before or in a test are not taken for those of another."""
    with forgotten():
        yield


@pytest.mark.few(3)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_on_purpose(monkeypatch: pytest.MonkeyPatch, forgets: None, name: str) -> None:
    broken, case = BROKEN[name]
    met: set[str] = set()

    def generated(spec: KernelSpec) -> KernelSource:
        made = generate.generate(spec)
        if spec.role not in broken.roles or broken.what not in made.text:
            return made
        met.add(spec.role)
        return replace(made, text=made.text.replace(broken.what, broken.into))

    monkeypatch.setattr(source, "generate", generated)
    with pytest.raises(AssertionError) as caught:
        check(case)
    assert met, f"no kernel of {broken.roles} has {broken.what!r}"
    assert str(caught.value).split(" ")[0] in ("padding", "off", "kept", "other", "not"), caught.value


@pytest.mark.parametrize(
    "case", list({case: None for _, case in BROKEN.values()}), ids=lambda case: str(case.layout)
)
def test_what_is_broken_is_right_before(case: Case) -> None:
    check(case)
