"""Inductor sees through the ops of generated kernels: one launch each, grids of symbols, and no copy of a cache.

Without a GPU the program is printed and not run (see `tests/support/inductor_text.py`). What only a GPU can show: that
it runs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import pytest

from kvcompile.compile.inductor import _patches
from tests.support.quick_assembling import BEFORE, forks


def printed(*arguments: str) -> Any:
    """What a module of these tests prints in a process where Triton compiles."""
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = forks.run([sys.executable, *BEFORE, *arguments], input="", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def programs() -> list[dict[str, str]]:
    """Graph and code of a prompt of a batch, and of a decode step of one sequence."""
    found: list[dict[str, str]] = printed("tests.support.inductor_text")
    assert len(found) == 2
    return found


@pytest.mark.slow  # quick of all kernels below
def test_the_op_is_its_kernels(programs: list[dict[str, str]]) -> None:
    """`kvcompile::cached_attention` goes through the op that it calls, down to launches."""
    for program in programs:
        assert "cached_attention" not in program["graph"] and "kvcompile_test" not in program["graph"]
        assert (
            len(re.findall(r"= torch.ops.higher_order.triton_kernel_wrapper_mutation\(", program["graph"]))
            == 2
        )


@pytest.mark.slow  # quick of all kernels below
def test_grids_and_strides_are_symbols_where_shapes_are(programs: list[dict[str, str]]) -> None:
    prompt, step = (re.findall(r"grid = \[\((.*?)\)\]", program["graph"]) for program in programs)
    assert all(re.fullmatch(r"sym_size_int\w*, 2, sym_size_int\w*", grid) for grid in prompt)
    assert step == ["1, 2, 1"] * 2
    assert {program["fixed"] for program in programs} == {"[]"}


@pytest.mark.slow  # quick of all kernels below
def test_caches_are_written_where_they_stand(programs: list[dict[str, str]]) -> None:
    """The third and fourth input are the cache: the kernels get them as they are, and nothing of their size is made."""
    for program in programs:
        call = program["code"][program["code"].index("def call(") :].partition("runner =")[0]
        launches = re.findall(r"append_kernel_0\.run\((.*)\)", call)
        assert [re.search(r"arg4_1, (\w+), 3200", launch)[1] for launch in launches] == ["arg2_1", "arg3_1"]  # type: ignore[index]
        made = re.findall(r"empty_strided\w*\(\((.*?)\)", call)
        assert made and not any("100" in size or "3200" in size for size in made)
        assert "copy_(" not in call and ".clone(" not in call


def test_nothing_runs_while_it_is_compiled() -> None:
    """A kernel that writes at made-up positions writes anywhere."""
    assert _patches("default")["triton.autotune_at_compile_time"] is False
    assert _patches("max-autotune")["triton.autotune_at_compile_time"] is False


STEP = ["append", "decode_attention"]  # of a batch; of one sequence, combine as well
# What a prompt and a decode step launch.
LAUNCHES = {
    "model": (["append", "prefill_attention"], STEP),
    "int8": (["append", "prefill_attention"], STEP),
    # Whether older tokens are read as codes or as rows of numbers is an expression of sizes: one of two ends at once.
    "int8 of 16 bits": (["append", "decoded_rows", *["prefill_attention"] * 3], STEP),
    "int4 in pages": (["append", "prefill_attention"], STEP),
    "KIVI": (["append", "group", "prefill_attention", "append"], ["append", "group", *STEP[1:], "combine"]),
    # The same of all slots (`host/over_rows.py`).
    "KIVI of 16 bits": (
        ["append", "group", "decoded_rows", *["prefill_attention"] * 2, "append"],
        ["append", "group", *STEP[1:], "combine"],
    ),
    "streaming": (["append", "prefill_attention", "append"], STEP),
    "H2O": (["append", "prefill_attention", "columns", "columns", "append"], STEP),
}
_SLOW = ["model", "int8", "int4 in pages", "KIVI", "streaming"]


def of_one(name: str) -> list[str]:
    """Those of a step of one sequence, whose parts a launch of their own joins, which knows no scores."""
    batch = LAUNCHES[name][1]
    joined = batch if "combine" in batch else [*batch, "combine"]
    return [*joined, "score"] if name == "H2O" else joined


@pytest.mark.parametrize(
    "name",
    [
        "H2O",
        "int8 of 16 bits",
        "KIVI of 16 bits",
        *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW),
    ],
)
def test_kernels_of_a_layout_are_launched_and_nothing_else_is_done_to_a_cache(name: str) -> None:
    """RoPE, rounding and append are one launch; what stands around is a linear layer, and no cache is copied."""
    prompt, batch, one = printed("tests.support.inductor_attention", name)[name]
    for program, wanted in (
        (prompt, LAUNCHES[name][0]),
        (batch, LAUNCHES[name][1]),
        (one, of_one(name)),
    ):
        assert program["fixed"] == []
        call = program["code"][program["code"].index("def call(") :].partition("runner =")[0]
        launches = re.findall(r"(\w+?)_\d+\.run\((.*)\)", call)
        assert [kernel for kernel, _ in launches] == wanted
        # The op is gone through the op that it calls, down to launches; where shapes are symbols, grids are.
        assert "cached_attention" not in program["graph"]
        if name == "int8 of 16 bits" and program is prompt:
            # As many rows as slots before the new tokens, at most: both sides of two heads of 64 channels.
            made = re.findall(r"empty_strided\w*\(\((s\d+, 2, max\(1, .*?), 64\), ", call)
            assert len(made) == 2 and made[0] == made[1] and "max(0, s64 + ((-1)*s93))" in made[0]
        mutates = r"= torch.ops.higher_order.triton_kernel_wrapper_mutation\("
        assert len(re.findall(mutates, program["graph"])) == len(wanted)
        grids = re.findall(r"grid = \[\((.*?)\)\]", program["graph"])
        assert len(grids) == len(wanted)
        assert all(re.search("[a-z]", grid) for grid in grids) == (program is not one)
        # After a prompt, which tokens stay is sorted by PyTorch: it writes what the slots hold.
        state = 2 if name == "H2O" and program is prompt else 0
        cache = {f"arg{2 + index}_1" for index in range(program["buffers"] - state)}
        given = {argument for _, arguments in launches for argument in arguments.split(", ")}
        assert cache <= given, "a kernel was given something else than the cache itself"
        if program is not prompt:
            assert "copy_(" not in call and ".clone(" not in call
            made = re.findall(r"empty_strided\w*\(\((.*?)\)", call)
            assert not any("1088" in size or "70," in size for size in made)
