"""Ahead of time, with no GPU: what shipped recipes need assembles for every architecture, does not spill, reads in
whole vectors, takes no more instructions per element than accepted (`tests/budgets.json`), and has the pipeline that
its stages ask for (`tests/pipelines.json`).

With other releases of Triton than 3.9, which made both files, they are left out, and the rest holds.
KVCOMPILE_ACCEPT=1 writes the budgets that it meets; `-m slow` assembles every recipe, shape and architecture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import triton

from kvcompile.errors import KernelError
from kvcompile.kernels.triton.attend import work_list
from kvcompile.kernels.triton.config import bits_of
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.host.launches import Launch
from kvcompile.kernels.triton.retention.score import SCORED
from kvcompile.kernels.triton.tools import assemble as assembling
from kvcompile.kernels.triton.tools.assemble import (
    ARCHES,
    Assembled,
    Request,
    assemble,
    attempted,
    elements,
    signature,
)
from kvcompile.layouts import CacheLayout, Paged
from tests.support.kernel_specs import DEVICES, SHAPES, Shape, cache, of_recipes, spec

BUDGETS = Path(__file__).parents[3] / "budgets.json"
PIPELINES = Path(__file__).parents[3] / "pipelines.json"
# Both files are of this release: others make other code of a loop.
MEASURED = triton.__version__.startswith("3.9.")
TOLERANCE = 1.05  # what another minor version of the compiler may add
# Outside of the main loop: so many the assembler trades for one more program on a multiprocessor.
SPILLS = 48
# Two loops, over a ring (or slots that scores choose) and over new tokens, with few registers: a program spills once,
# before and after them.
OUTSIDE = {
    "prefill baseline:sliding llama sm_120": 64,
    "prefill paged:sliding llama sm_120": 80,
    "prefill paged:causal llama sm_120": 72,
    "prefill sinks_h2o_fp8:causal smollm2 sm_90": 49,
    "prefill fp8:sliding smollm2 sm_90": 51,
    "prefill chat:sliding smollm2 sm_90": 55,
    "columns sinks_h2o_fp8:causal llama sm_100, many: ('new',)": 58,
}
# Of new tokens' rows, sums begin with the result over older ones: on sm_80 a warp has 128 channels of it, which some
# registers of the loop over tiles at the edges wait for.
CONTINUED = 56
# Prompts over lists of numbers, of 256 channels: a thread's bytes of a tile stand in fours.
NARROW = {
    f"prefill {recipe}:{kind} gemma sm_90": 32
    for recipe in ("nf4", "mxfp4")
    for kind in ("causal", "sliding")
}
LAYOUTS = dict(of_recipes())
# Of no recipe, but with tiles of their own.
BESIDE = {
    "int4_pages:causal": replace(LAYOUTS["int4:causal"], placement=Paged(16)),
    "kivi4_pages:causal": replace(LAYOUTS["kivi4:causal"], placement=Paged(32)),
}
# Of a prompt that is long enough for its slots to be decoded to rows (`host/over_rows.py`).
OVER_ROWS = {"kivi4_rows:causal": LAYOUTS["kivi4:causal"]}
# Of three groups of channels.
THREE = {"phi3": Shape((32, 32), (96, 96))}
MANY = 64  # new tokens of a prompt
LONG = 1024  # of one whose older tokens are decoded to rows
# Decode without all that a pipeline must have, of a recipe, or of its shape, and why.
UNPIPELINED = {
    "nf4": "codes of a codebook are chosen by selects on bytes",
    "mxfp4": "codes of a codebook are chosen by selects on bytes",
    "sinks_h2o_fp8": "every tile may have tokens in full, and reads which tokens its slots hold",
    "streaming": "cosines and sines of keys that turn take the shared memory of a second buffer",
    "streaming_int8": "cosines and sines of keys that turn take the shared memory of a second buffer",
    "int4 mla": "18 groups of channels are no power of two: pieces read the scales of theirs, some of them two bytes",
    "kivi2 mla": "a tile in both forms, codes and in full, takes the registers of a second buffer",
    "kivi4 mla": "a tile in both forms, codes and in full, takes the registers of a second buffer",
}
# Prompts that must have such a pipeline, of 32/8 heads of 128 channels. Rings of codes, lists of numbers and latent
# rows have one buffer, of other heads the scales of 4 bits are waited for: `tests/pipelines.json` holds some of those.
PROMPTS = (
    "baseline",
    "fp8",
    "int8",
    "int4",
    "kivi4",
    "kivi4_rows",
    "paged",
    "paged_int8",
    "quest",
    "quest_int8",
)
# There tiles of `int4` have 32 slots, whose scales are two bytes a thread.
WAITING = {"int4 sm_120"}


def asked(launch: Launch, arch: int) -> Request:
    return Request(launch.spec, arch, launch.num_warps, launch.num_stages, launch.known)


def request(role: str, name: str, shape: str, arch: int) -> Request:
    """The first kernel of that role that a site launches for a single token, or else for a prompt."""
    layout = (LAYOUTS | BESIDE | OVER_ROWS)[name]
    lengths = (LONG,) if name in OVER_ROWS else (1, MANY, LONG)
    own = ((SHAPES | THREE)[shape].kernels(layout, DEVICES[arch], tokens) for tokens in lengths)
    return asked(next(launch for found in own for launch in found if launch.spec.role == role), arch)


def name_of(role: str, name: str, shape: str, arch: int) -> str:
    return f"{role} {name} {shape} sm_{arch}"


# Each storage and each placement of the recipes once on sm_90, the extremes on the others.
QUICK = (
    ("decode", "baseline:causal", "llama", 90),
    ("decode", "baseline:causal", "llama", 100),
    ("decode", "baseline:causal", "mla", 90),
    ("decode", "int4:causal", "mla", 90),
    ("decode", "sinks_h2o_fp8:causal", "mla", 90),
    ("decode", "baseline:sliding", "gemma", 90),
    ("decode", "fp8:causal", "gemma", 90),
    ("decode", "fp8:causal", "llama", 80),
    ("decode", "fp8:causal", "llama", 90),
    ("decode", "paged_int8:causal", "llama", 90),
    ("decode", "paged_int8:causal", "llama", 100),
    ("decode", "int8:causal", "llama", 120),
    ("decode", "int4:causal", "llama", 90),
    ("decode", "int4_pages:causal", "llama", 90),
    ("decode", "int4:causal", "smollm2", 90),
    ("decode", "kivi4:causal", "llama", 90),
    ("decode", "kivi4_pages:causal", "llama", 90),
    ("decode", "kivi2:causal", "llama", 90),
    ("decode", "h2o_int8:causal", "llama", 90),
    ("decode", "streaming:causal", "smollm2", 90),
    ("decode", "quest_int8:causal", "llama", 90),
    ("page_bounds", "quest:causal", "llama", 90),
    ("combine", "kivi4:causal", "llama", 90),
    ("append", "int4:causal", "llama", 80),
    ("decoded_rows", "int4:causal", "llama", 90),
    ("prefill", "baseline:causal", "llama", 80),
    ("prefill", "baseline:causal", "llama", 90),
    ("prefill", "baseline:causal", "llama", 100),
    ("prefill", "paged:causal", "llama", 90),
    ("prefill", "paged_int8:causal", "llama", 90),
    ("prefill", "kivi4:causal", "llama", 90),
    ("prefill", "kivi4_rows:causal", "llama", 90),
    ("decoded_rows", "kivi4_rows:causal", "llama", 90),
    ("prefill", "int4:causal", "llama", 100),
    ("prefill", "int4:causal", "mla", 90),
    ("prefill", "sinks_h2o_fp8:causal", "llama", 86),
)

# Of these, other shapes, each of which takes Triton some ten seconds: for each of a pipeline's copies it looks through
# the whole kernel (`TritonGPUCoalesceAsyncCopy`).
OTHER_SHAPES = (
    ("decode", "int4:causal", "phi3", 90),
    ("decode", "kivi4:causal", "mqa", 90),
    ("decode", "kivi4:causal", "gemma", 90),
    ("decode", "kivi4_pages:causal", "smollm2", 90),
    ("decode", "kivi2:causal", "smollm2", 90),
    ("decode", "kivi2:causal", "mqa", 90),
    ("decode", "kivi2:causal", "gemma", 90),
)


def widest(request: Request) -> int:
    """Bits that the widest loads of a main loop must have: 128, or half of a thread's share of a tile of keys."""
    spec = request.spec
    bits = bits_of(spec.layout.keys, spec.head_dim, spec.torch_dtype)
    share = spec.block_n * spec.head_dim * bits // (request.num_warps * 32)
    return 128 if share >= 256 else share // 2


def check(
    cases: Mapping[str, Request], budgeted: bool, found: Iterable[Assembled] | None = None
) -> Iterator[str]:
    """What is wrong. budgeted: each of them must have a budget; found: what they were assembled to already."""
    budgets = json.loads(BUDGETS.read_text("utf-8")) if BUDGETS.exists() else {}
    pipelines = json.loads(PIPELINES.read_text("utf-8")) if PIPELINES.exists() else {}
    accepts = budgeted and MEASURED and bool(os.environ.get("KVCOMPILE_ACCEPT"))
    for name, made in zip(cases, assemble(cases.values()) if found is None else found, strict=True):
        wrong = []
        most = CONTINUED if "continued" in cases[name].spec.options and made.arch == 80 else SPILLS
        if made.loop_spills or made.spills > OUTSIDE.get(name, most):
            wrong.append(f"spills: {made.spills} instructions, {made.loop_spills} of them in the main loop")
        if made.shared > DEVICES[made.arch].shared:
            wrong.append(
                f"{made.shared:,} bytes of shared memory, a program has {DEVICES[made.arch].shared:,}"
            )
        if made.role in ("decode", "prefill"):
            bits = NARROW.get(name, widest(cases[name]))
            if max(made.loads, default=0) < bits:
                wrong.append(f"no load of {bits} bits in the main loop: {made.loads}")
            if not made.products:
                wrong.append("no matrix product in the main loop")
        taken = made.per_element
        if accepts and taken is not None:
            budgets[name] = taken
        limit = budgets.get(name)
        if taken is None or (limit is None and not budgeted):
            pass
        elif limit is None:
            wrong.append("has no budget: KVCOMPILE_ACCEPT=1 writes one")
        elif MEASURED and taken > limit * TOLERANCE:
            wrong.append(f"{taken} instructions per element, the budget is {limit}")
        wrong += _unpipelined(name, made)
        expected = ("",) if work_list.JOINED in cases[name].spec.options else ()
        if made.handovers != expected:
            wrong.append(f"programs hand over by {made.handovers}, expected {expected}")
        if made.overtaken:
            wrong.append(f"buffers are filled before they are read: {made.overtaken}")
        if made.lost:
            wrong.append(f"products read other tiles than theirs: {made.lost}")
        if MEASURED and (one := pipeline_of(made)) is not None and (accepts or name in pipelines):
            if accepts:
                pipelines[name] = one
            wrong += worse(one, pipelines[name])
        yield from (f"{name}: {problem}" for problem in wrong)
    if accepts:
        PIPELINES.write_text(json.dumps(dict(sorted(pipelines.items())), indent=1) + "\n", "utf-8")
        BUDGETS.write_text(json.dumps(dict(sorted(budgets.items())), indent=1) + "\n", "utf-8")


def pipeline_of(made: Assembled) -> dict[str, int] | None:
    """What `tests/pipelines.json` has of a kernel: None of one whose main loop has no product."""
    if made.pipeline is None or made.role not in ("decode", "prefill"):
        return None
    found = {"buffers": made.pipeline.buffers, "wait": made.pipeline.wait or 0}
    found |= {"sync_loads": made.pipeline.sync_loads, "barriers": made.barriers}
    return found | {"byte_loads": made.byte_loads}


def worse(found: Mapping[str, int], accepted: Mapping[str, int]) -> list[str]:
    """In what a main loop is worse than accepted."""
    more = [name for name in ("buffers", "wait") if found[name] < accepted[name]]
    more += [name for name in ("sync_loads", "barriers", "byte_loads") if found[name] > accepted[name]]
    return [f"{name} of the main loop: {found[name]}, accepted are {accepted[name]}" for name in more]


def _unpipelined(name: str, made: Assembled) -> list[str]:
    """What a main loop lacks: two buffers, copies on their way when a turn begins, nothing read while it waits."""
    _, layout, shape, arch = name.partition(",")[0].split()
    recipe, _, attention = layout.partition(":")
    if made.role == "prefill":
        held = recipe in PROMPTS and (attention, shape) == ("causal", "llama")
        if not held or f"{recipe} {arch}" in WAITING:
            return []
    elif made.role != "decode" or recipe in UNPIPELINED or f"{recipe} {shape}" in UNPIPELINED:
        return []
    found = pipeline_of(made)
    assert found is not None
    ideal = {"buffers": 2, "wait": 1, "sync_loads": 0, "barriers": found["barriers"], "byte_loads": 0}
    return worse(found, ideal)


@lru_cache
def cases_of_recipes() -> dict[str, Request]:
    """When they are asked for: a launch generates its kernels."""
    return {name_of(*case): request(*case) for case in QUICK}


BROKEN = Request(spec("decode", CacheLayout(), "llama", "no such option")[0], 90, num_warps=3)


@pytest.fixture(scope="module")
def together() -> dict[str, Assembled | str]:
    """All of this file in one process, with the texts of main loops; what does not assemble is last."""
    cases = cases_of_recipes()
    return dict(zip([*cases, "broken"], attempted([*cases.values(), BROKEN], listing=True), strict=True))


def test_kernels_of_shipped_recipes(together: dict[str, Assembled | str]) -> None:
    cases = cases_of_recipes()
    found = [together[name] for name in cases]
    assert not [text for text in found if isinstance(text, str)]
    wrong = list(check(cases, True, [one for one in found if isinstance(one, Assembled)]))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kernels_of_other_shapes() -> None:
    wrong = list(check({name_of(*case): request(*case) for case in OTHER_SHAPES}, budgeted=True))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kernel_of_every_recipe(name: str, shape: str) -> None:
    """On sm_90, and of the first shape on all."""
    cases: dict[str, Request] = {}
    for arch in ARCHES if shape == "llama" else (90,):
        for tokens in (1, MANY, LONG):
            for launch in SHAPES[shape].kernels(LAYOUTS[name], DEVICES[arch], tokens):
                first = name_of(launch.spec.role, name, shape, arch)
                more = f"{first}, {'one token' if tokens == 1 else 'many'}: {launch.spec.options}"
                if (own := asked(launch, arch)) not in cases.values():
                    cases[more if first in cases else first] = own
    wrong = list(check(cases, budgeted=False))
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("recipe", "arches"),
    [("nf4", (80, 86, 100, 120)), ("mxfp4", (80, 86, 100, 120)), ("kivi2", (80, 86, 100, 120))],
)
def test_steps_of_16_heads_to_a_kv_head(recipe: str, arches: tuple[int, ...]) -> None:
    """Elsewhere than on sm_90: of codebooks, rows that stand once for each group take the registers of 32 slots."""
    for made in assemble(request("decode", f"{recipe}:causal", "mqa", arch) for arch in arches):
        assert made.loop_spills == 0 and made.spills <= SPILLS and not made.overtaken, (recipe, made.arch)
        assert made.shared <= DEVICES[made.arch].shared


def test_the_figures_of_a_kernel_whose_loop_is_known(together: dict[str, Assembled | str]) -> None:
    """A tile of 64 keys and values of 128 bf16 channels: 16 loads of 128 bits for each of 128 threads, and 32 products
    of 16 x 8 x 16 for each of 4 warps; in all, two or so instructions per element."""
    made = together["decode baseline:causal llama sm_90"]
    assert isinstance(made, Assembled)
    assert elements(request("decode", "baseline:causal", "llama", 90).spec) == 64 * 256
    assert made.loads == {128: 64 * 256 * 2 // 16 // 128}
    assert made.products == 2 * (16 * 64 * 128) // (16 * 8 * 16) // 4
    assert made.per_element is not None and 1.7 < made.per_element < 2.1
    assert made.instructions == round(made.per_element * 64 * 256 / 128)
    assert len(made.main_loop) >= made.instructions and "HMMA" in "".join(made.main_loop)
    assert elements(request("combine", "kivi4:causal", "llama", 90).spec) is None
    latent = request("decode", "baseline:causal", "mla", 90).spec
    assert elements(latent) == latent.block_n * 576  # values are in the keys


def test_who_adds_shares_to_scores_takes_no_program_from_a_multiprocessor(
    together: dict[str, Assembled | str],
) -> None:
    """Three of four warps, as of int8 without scores: what stands behind the loop has registers of the whole kernel."""
    case = request("decode", "h2o_int8:causal", "llama", 90)
    made = together["decode h2o_int8:causal llama sm_90"]
    assert isinstance(made, Assembled) and SCORED in case.spec.options and case.num_warps == 4
    assert made.registers <= 168


def test_what_does_not_assemble_is_an_error_that_names_it(
    together: dict[str, Assembled | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembling, "attempted", lambda *_: [together["broken"]])
    with pytest.raises(
        KernelError, match=r"does not assemble(.|\n)*num_warps(.|\n)*decode for sm_90: .*no such option"
    ):
        assemble([BROKEN])
    assert Request.from_json(BROKEN.to_json()) == BROKEN


def test_addresses_and_strides_are_aligned_and_sizes_are_not() -> None:
    source = generate(spec("append", cache(), "llama", "one")[0])
    types, constants, attributes = signature(source)
    assert not constants
    aligned = {list(types)[place] for (place,) in attributes}
    assert {name for name in types if name.endswith("_ptr")} < aligned
    assert "k_s0" in aligned and "tokens" in types and "tokens" not in aligned
