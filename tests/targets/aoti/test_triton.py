"""AOTInductor sees through the generated kernels: its C++ launches each, with the caches as they stand.

Without a GPU the C++ is printed and neither compiled nor run (`tests/support/aoti_sm90.py`). What only a GPU can show
is in `tests/gpu/test_aoti.py`: that AOTInductor gets the kernels' machine code, and that a package of it runs.
"""

from __future__ import annotations

import re

import pytest
from torch._inductor import codecache

from tests.kernels.triton.host.test_in_inductor import printed

STEP = ["append", "decode_attention", "combine"]
# Of one sequence, linear layers: those of queries, keys and values are one, a gate and what it opens are one. The layer
# behind has rows of 56 numbers, which begin at no multiple of 16, and so is the BLAS'.
BEFORE, AFTER = ["linear"], ["linear"] * 3
# What a prompt, a step of one sequence and a step of several launch. Of several, the last program of a head joins its
# parts, but where a layout leaves it no registers (`kernels/triton/attend/work_list.py`).
LAUNCHES = {
    "int8": (["append", "prefill_attention"], STEP, STEP[:2]),
    "paged": (["append", "prefill_attention"], STEP, STEP[:2]),
    "kivi2": (["append", "group", "prefill_attention", "append"], *[["append", "group", *STEP[1:]]] * 2),
    "h2o_int8": (
        ["append", "prefill_attention", "columns", "columns", "append"],
        [*STEP, "score"],
        [*STEP[:2], "score"],
    ),
}


@pytest.mark.skipif(
    not hasattr(codecache, "CpuTritonKernelCache"),
    reason="PyTorch 2.11 prints C++ that launches Triton's kernels on a GPU only: tests/gpu/test_aoti.py has it",
)
@pytest.mark.slow  # quick as compiled modules: tests/kernels/triton/host/test_in_inductor.py
@pytest.mark.parametrize("recipe", LAUNCHES)
def test_the_program_launches_kernels_on_the_caches_themselves(recipe: str) -> None:
    found = printed("tests.support.aoti_sm90", recipe)[recipe]
    assert list(found) == ["prefill", "decode", "batch_decode"]
    for (entry, program), wanted in zip(found.items(), LAUNCHES[recipe], strict=True):
        run = program["code"][program["code"].index("::run_impl(") :]
        launches = re.findall(r"^ *call_(\w+?)_\d+\((.*)\);", run, re.MULTILINE)
        one = entry == "decode"
        assert [name for name, _ in launches] == (BEFORE + wanted + AFTER if one else wanted), entry
        assert not one or run.count("_mm_out(") == 1
        given = {word for _, arguments in launches for word in re.findall(r"\barg\d+_1\b", arguments)}
        # After a prompt, which tokens stay is sorted by PyTorch: it writes what the slots hold.
        sorted_after = 2 if recipe == "h2o_int8" and entry == "prefill" else 0
        caches = set(program["caches"][: len(program["caches"]) - sorted_after])
        assert caches and caches <= given, f"{entry}: a kernel was given something else than the cache itself"
        assert "kvcompile::" not in run, "an op of kvcompile is called, which is not there when it runs"
        if entry != "prefill":
            sizes = re.findall(r"int64_t int_array_\d+\[\] = \{([^}]*)\}", run)
            assert not any("1088L" in size for size in sizes), "something of the cache's size is made"
