"""Every release of Triton that a supported torch brings: what kernels ask of it, pipelines, and a race that 3.5 had.

`-m slow` asks the release that is installed, and the others where they stand (`tests/support/tritons.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton import attend
from kvcompile.kernels.triton.attend import work_list
from kvcompile.kernels.triton.device import Device, acting_as
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.kernels.triton.tools.assemble import Request, assemble
from kvcompile.kernels.triton.tools.ttgir import overtaken
from kvcompile.layouts import CacheLayout, fp8, int8, uint
from tests.kernels.triton.attend.test_assemble import BUDGETS, SPILLS, name_of, pipeline_of, request, worse
from tests.support.tritons import RELEASES, folder_of

# Of `tl`, what all releases have (the slow test asks them); `tl.range` with `num_stages` among it.
KNOWN = {
    *(
        "abs",
        "arange",
        "atomic_add",
        "broadcast_to",
        "cast",
        "cdiv",
        "ceil",
        "constexpr",
        "cumsum",
        "debug_barrier",
        "div_rn",
    ),
    *(
        "dot",
        "erf",
        "exp",
        "exp2",
        "floor",
        "full",
        "gather",
        "inline_asm_elementwise",
        "join",
        "load",
        "log",
        "log2",
        "math",
    ),
    *(
        "max",
        "max_contiguous",
        "maximum",
        "min",
        "minimum",
        "multiple_of",
        "num_programs",
        "permute",
        "pointer_type",
    ),
    *(
        "program_id",
        "range",
        "reduce",
        "reshape",
        "rsqrt",
        "split",
        "sqrt_rn",
        "static_range",
        "store",
        "sum",
        "trans",
        "where",
    ),
    *("zeros", "zeros_like", "int8", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8e5", "float8e4nv", "bfloat16", "float16", "float32"),
}
CASES = (
    ("decode", "baseline:causal", "llama", 90),
    ("decode", "int8:causal", "llama", 90),
    ("decode", "int4:causal", "llama", 90),
    ("decode", "int4:causal", "phi3", 90),
    ("decode", "paged:causal", "llama", 90),
    ("decode", "paged_int8:causal", "llama", 90),
    ("decode", "kivi4:causal", "llama", 90),
    ("decode", "kivi4_pages:causal", "llama", 90),
    ("decode", "kivi2:causal", "llama", 90),
    ("decode", "kivi2:causal", "smollm2", 90),
    ("decode", "kivi2:causal", "mqa", 90),
    ("decode", "h2o_int8:causal", "llama", 90),
    ("prefill", "baseline:causal", "llama", 80),
    ("prefill", "baseline:causal", "llama", 90),
    ("prefill", "baseline:causal", "llama", 100),
    ("prefill", "int4:causal", "llama", 100),
    ("prefill", "paged:causal", "llama", 90),
    ("prefill", "paged_int8:causal", "llama", 90),
    ("prefill", "kivi4:causal", "llama", 90),
    ("prefill", "kivi4_rows:causal", "llama", 90),
)
# Prompts whose products have so many tiles that descriptors were lost (`tools/descriptors.py`).
PIECES = {
    "int8 beside int4": CacheLayout(int8(), uint(4, 32)),
    "fp8 beside int2": CacheLayout(fp8(), uint(2, 32)),
    "int4 beside int3": CacheLayout(uint(4, 32), uint(3, 32)),
}
# Instructions of a main loop over those of the budgets: of rows that each have an address, the oldest prints more.
MORE = {"3.6.0": 1.3, "3.7.0": 1.3, "3.7.1": 1.3, "3.8.0": 1.1}
# Instructions outside of the main loop that spill, where they are more than with the newest: of tiles in both forms.
OUTSIDE = {("3.6.0", "prefill kivi4:causal llama sm_90"): 72}

# The loop of triton PR 8139: a copy is read in a branch, which is scheduled behind the copy of the next turn.
RACE = """
import json, sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def looked_up(places_ptr, out_ptr, turns, stored):
    for i in tl.range(0, turns, num_stages=2):
        place = tl.load(places_ptr + i + tl.arange(0, 1))
        if stored:
            tl.store(out_ptr + place, i + 1)

types = {"places_ptr": "*i32", "out_ptr": "*i32", "turns": "i32", "stored": "i32"}
target, options = GPUTarget("cuda", 90, 32), {"num_warps": 1}
made = triton.compile(ASTSource(looked_up, types, {}, {}), target=target, options=options)
lacking = [name for name in json.loads(sys.argv[1]) if not hasattr(tl, name)]
print(json.dumps({"release": triton.__version__, "ttgir": made.asm["ttgir"], "lacking": lacking}))
"""
# What 3.5.0 makes of it, in short: one buffer, filled again before it is read.
RACING = """
    %place = ttg.local_alloc : () -> !ttg.memdesc<1x1xi32, #shared, #smem, mutable>
    %own = ttg.memdesc_index %place[%c0] : !ttg.memdesc<1x1xi32, #shared> -> !ttg.memdesc<1xi32, #shared>
    %first = ttg.async_copy_global_to_local %ptr, %own mask %m : tensor<1x!tt.ptr<i32>, #b> -> <1xi32, #s>
    %3:2 = scf.for %i = %c0 to %n step %c1 iter_args(%a = %b, %t = %first) -> (i32, !ttg.async.token)  : i32 {
      %next = ttg.async_copy_global_to_local %ptr, %own mask %m : tensor<1x!tt.ptr<i32>, #b> -> <1xi32, #s>
      %done = ttg.async_wait %t {num = 1 : i32}
      %mine = ttg.memdesc_index %place[%i] : !ttg.memdesc<1x1xi32, #shared> -> !ttg.memdesc<1xi32, #shared>
      %x = ttg.local_load %mine token %done : !ttg.memdesc<1xi32, #shared> -> tensor<1xi32, #b>
      scf.yield %i, %next : i32, !ttg.async.token
    }
"""


def test_a_buffer_that_is_filled_before_it_is_read_is_found() -> None:
    assert overtaken(RACING) == ("%place",)
    assert overtaken(RACING.replace("<1x1xi32", "<2x1xi32")) == ()
    lines = RACING.splitlines()
    copy = next(at for at, line in enumerate(lines) if "%next =" in line)
    later = [*lines[:copy], *lines[copy + 1 : -2], lines[copy], *lines[-2:]]
    assert overtaken("\n".join(later)) == ()
    # A product that goes on reads until it is waited for, here in the next turn; or at once.
    product = "\n".join(later).replace(
        "%x = ttg.local_load", "%x = ttng.warp_group_dot %q, %mine {isAsync = true} //"
    )
    assert overtaken(product) == ("%place",)
    waited = product.replace(
        "      scf.yield", "      %w = ttng.warp_group_dot_wait %x {pendings = 0 : i32}\n      scf.yield"
    )
    assert overtaken(waited) == ("%place",)
    early = product.replace(
        "      %next", "      %w = ttng.warp_group_dot_wait %x {pendings = 0 : i32}\n      %next"
    )
    assert overtaken(early) == ()
    peeled = """    %early = ttg.local_load %own token %first : !ttg.memdesc<1xi32, #shared> -> tensor<1xi32, #b>
    %second = ttg.async_copy_global_to_local %ptr, %own mask %m : tensor<1x!tt.ptr<i32>, #b> -> <1xi32, #s>"""
    loop = next(at for at, line in enumerate(lines) if "scf.for" in line)
    assert overtaken("\n".join([*later[:loop], *peeled.splitlines(), *later[loop:]])) == ()
    assert overtaken("\n".join([*later[:loop], peeled.splitlines()[1], *later[loop:]])) == ("%place",)
    carried = "\n".join(later).replace("scf.yield %i", "scf.yield %mine")
    assert overtaken(carried) == ("%place",)


def test_kernels_use_what_every_release_has() -> None:
    folder = Path(attend.__file__).parents[1]
    texts = [path.read_text("utf-8") for kind in ("*.py", "*.jinja") for path in folder.rglob(kind)]
    used = {name for text in texts for name in re.findall(r"\btl\.([a-z]\w*)", text)}
    assert len(used) > 30
    assert not used - KNOWN


def _asked(release: str | None) -> dict[str, str | list[str]]:
    """What a release says of the loop of the race, and of names that it has not."""
    path = [str(folder_of(release))] if release else []
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(path)}
    # Triton reads the text of a kernel from its file.
    with tempfile.TemporaryDirectory() as folder:
        path_of = Path(folder) / "race.py"
        path_of.write_text(RACE)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", path_of, json.dumps(sorted(KNOWN))],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
    found: dict[str, str | list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_release_that_is_installed_does_not_race() -> None:
    found = _asked(None)
    assert isinstance(found["ttgir"], str) and "async_copy" in found["ttgir"]
    assert overtaken(found["ttgir"]) == () and found["lacking"] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_that_torch_brings(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing races or spills in a main loop; pipelines are as deep as those of the release that is installed."""
    folder = folder_of(release)
    if folder is None:
        pytest.skip(f"Triton {release} is not in build/tritons: python -m tests.support.tritons")
    found = _asked(release)
    assert found["release"] == release and found["lacking"] == []
    assert isinstance(found["ttgir"], str) and overtaken(found["ttgir"]) == ()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    budgets = json.loads(BUDGETS.read_text("utf-8"))
    cases: dict[str, Request] = {name_of(*case): request(*case) for case in CASES}
    wrong = []
    for name, made in zip(cases, assemble(cases.values()), strict=True):
        joined = ("",) if work_list.JOINED in cases[name].spec.options else ()
        if made.handovers != joined:
            wrong.append(f"{name}: programs hand over by {made.handovers}")
        if made.lost:
            wrong.append(f"{name}: products read other tiles than theirs: {made.lost}")
        if made.overtaken:
            wrong.append(f"{name}: buffers are filled before they are read: {made.overtaken}")
        if made.loop_spills or made.spills > OUTSIDE.get((release, name), SPILLS):
            wrong.append(f"{name}: {made.spills} spills, {made.loop_spills} in the main loop")
        if made.per_element is not None and made.per_element > budgets[name] * MORE[release]:
            wrong.append(
                f"{name}: {made.per_element} instructions per element, the budget is {budgets[name]}"
            )
        if (one := pipeline_of(made)) is not None:
            ideal = {"buffers": 2, "wait": 1, "sync_loads": 0, "barriers": one["barriers"], "byte_loads": 0}
            wrong += [f"{name}: {problem}" for problem in worse(one, ideal)]
    for name, made in zip(PIECES, assemble(map(_prompt, PIECES.values())), strict=True):
        wrong += [f"{name}: products read other tiles than theirs: {made.lost}"] if made.lost else []
    assert not wrong, "\n".join(wrong)


def _prompt(layout: CacheLayout) -> Request:
    """A prompt's kernel on an H200, in the tile that it has there."""
    with acting_as(Device("NVIDIA H200", 90, 132)):
        site = SiteSpec(layout, 128**-0.5, kernels="triton")
        made = kernels_of(site, (8, 2), (128, 128), torch.bfloat16, torch.device("cpu"), False)
        own = made.config("prefill")
        return Request(made.spec("prefill"), 90, own.num_warps, own.num_stages)


def test_tiles_of_many_pieces_are_small() -> None:
    """Of 64 slots, Triton 3.6 to 3.7.1 make kernels of them that fail on an H200; of other layouts they do not."""
    assert {name: _prompt(layout).spec.block_n for name, layout in PIECES.items()} == dict.fromkeys(
        PIECES, 32
    )
    assert _prompt(CacheLayout(int8(), int8())).spec.block_n == 64
