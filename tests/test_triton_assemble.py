"""Ahead of time, with no GPU: what shipped recipes need assembles for sm_80, sm_90 and sm_100, does not spill, reads in
whole vectors, and takes no more instructions per element than accepted (`tests/budgets.json`).

KVCOMPILE_ACCEPT=1 writes the budgets that it meets; `-m slow` assembles every recipe, shape and architecture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcompile.errors import KernelError
from kvcompile.kernels.triton.assemble import ARCHES, Assembled, Request, assemble, elements, signature
from kvcompile.kernels.triton.generate import generate
from kvcompile.layouts import CacheLayout
from tests.kernel_specs import DEVICES, HALF, SHAPES, cache, decode_options, of_recipes, spec

BUDGETS = Path(__file__).parent / "budgets.json"
TOLERANCE = 1.05  # what another minor version of the compiler may add
LAYOUTS = dict(of_recipes())
ROLES = ("decode", "combine", "append", "prefill")


def request(role: str, name: str, shape: str, arch: int) -> Request:
    layout = LAYOUTS[name]
    options = {
        "decode": decode_options(layout),
        "combine": ("lse",) if decode_options(layout) else (),
        "append": ("one", "rope", "q_out"),
        "prefill": () if layout.in_order else ("new",),
    }[role]
    more = {"rotary": HALF} if role == "append" and shape == "llama" else {}
    if role == "append" and not more:
        options = ("one",)
    made, used = spec(role, layout, shape, *options, device=DEVICES[arch], **more)
    return Request(made, arch, used.num_warps, used.num_stages)


def name_of(role: str, name: str, shape: str, arch: int) -> str:
    return f"{role} {name} {shape} sm_{arch}"


# Each storage and each placement of the recipes once on sm_90, the extremes on the others.
QUICK = (
    ("decode", "baseline:causal", "llama", 80),
    ("decode", "baseline:causal", "llama", 90),
    ("decode", "baseline:causal", "llama", 100),
    ("decode", "baseline:causal", "mla", 90),
    ("decode", "baseline:sliding", "gemma", 90),
    ("decode", "fp8:causal", "llama", 80),
    ("decode", "fp8:causal", "llama", 90),
    ("decode", "paged_int8:causal", "llama", 90),
    ("decode", "int4:causal", "llama", 90),
    ("decode", "kivi4:causal", "llama", 90),
    ("decode", "h2o_int8:causal", "mqa", 90),
    ("decode", "streaming:causal", "smollm2", 90),
    ("combine", "baseline:causal", "llama", 90),
    ("append", "int8:causal", "llama", 90),
    ("append", "int4:causal", "llama", 80),
    ("prefill", "baseline:causal", "llama", 90),
)
EVERY = tuple(
    (role, name, shape, arch) for role in ROLES for name in LAYOUTS for shape in SHAPES for arch in ARCHES
)


def check(cases: tuple[tuple[str, str, str, int], ...]) -> Iterator[tuple[str, Assembled, list[str]]]:
    """(case, what it is, what is wrong with it)."""
    budgets = json.loads(BUDGETS.read_text("utf-8")) if BUDGETS.exists() else {}
    accepts = bool(os.environ.get("KVCOMPILE_ACCEPT"))
    for case, made in zip(cases, assemble(request(*case) for case in cases), strict=True):
        name, wrong = name_of(*case), []
        if made.spills or made.stack:
            wrong.append(f"spills: {made.spills} instructions, {made.stack} bytes of stack")
        if made.shared > DEVICES[made.arch].shared:
            wrong.append(
                f"{made.shared:,} bytes of shared memory, a program has {DEVICES[made.arch].shared:,}"
            )
        if case[0] in ("decode", "prefill"):
            if max(made.loads, default=0) < 128:
                wrong.append(f"no load of 128 bits in the main loop: {made.loads}")
            if not made.products:
                wrong.append("no matrix product in the main loop")
        found = made.per_element
        if accepts and found is not None:
            budgets[name] = found
        limit = budgets.get(name)
        if found is not None and limit is None:
            wrong.append("has no budget: KVCOMPILE_ACCEPT=1 writes one")
        elif found is not None and found > limit * TOLERANCE:
            wrong.append(f"{found} instructions per element, the budget is {limit}")
        yield name, made, wrong
    if accepts:
        BUDGETS.write_text(json.dumps(dict(sorted(budgets.items())), indent=1) + "\n", "utf-8")


def test_kernels_of_shipped_recipes() -> None:
    wrong = [f"{name}: {problem}" for name, _, problems in check(QUICK) for problem in problems]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kernel_of_every_recipe(role: str, name: str) -> None:
    cases = tuple(case for case in EVERY if case[0] == role and case[1] == name)
    wrong = [f"{name}: {problem}" for name, _, problems in check(cases) for problem in problems]
    assert not wrong, "\n".join(wrong)


def test_the_figures_of_a_kernel_whose_loop_is_known() -> None:
    """A tile of 64 keys and values of 128 bf16 channels: 16 loads of 128 bits for each of 128 threads, and 32 products
    of 16 x 8 x 16 for each of 4 warps; in all, two or so instructions per element."""
    (made,) = assemble([request("decode", "baseline:causal", "llama", 90)], listing=True)
    assert elements(request("decode", "baseline:causal", "llama", 90).spec) == 64 * 256
    assert made.loads == {128: 64 * 256 * 2 // 16 // 128}
    assert made.products == 2 * (16 * 64 * 128) // (16 * 8 * 16) // 4
    assert made.per_element is not None and 1.8 < made.per_element < 2.5
    assert made.instructions == round(made.per_element * 64 * 256 / 128)
    assert len(made.main_loop) >= made.instructions and "HMMA" in "".join(made.main_loop)
    assert elements(request("combine", "baseline:causal", "llama", 90).spec) is None
    assert (
        elements(request("decode", "baseline:causal", "mla", 90).spec) == 32 * 576
    )  # values are in the keys


def test_what_does_not_assemble_is_an_error_that_names_it() -> None:
    wrong, _ = spec("decode", CacheLayout(), "llama", "no such option")
    broken = Request(wrong, 90, num_warps=3)
    with pytest.raises(
        KernelError, match=r"does not assemble(.|\n)*num_warps(.|\n)*decode for sm_90: .*no such option"
    ):
        assemble([broken])
    assert Request.from_json(broken.to_json()) == broken


def test_addresses_and_strides_are_aligned_and_sizes_are_not() -> None:
    source = generate(spec("append", cache(), "llama", "one")[0])
    types, attributes = signature(source)
    aligned = {list(types)[place] for (place,) in attributes}
    assert {name for name in types if name.endswith("_ptr")} < aligned
    assert "k_s0" in aligned and "tokens" in types and "tokens" not in aligned
