"""Inductor launches the role linear for one token, and nothing else in its place; more tokens run the BLAS as ever.

Without a GPU the program is printed and not run (`tests/support/inductor_linear.py`).
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys

from tests.support.quick_assembling import BEFORE, forks


def test_a_step_launches_one_kernel_for_each_vector() -> None:
    """Queries, keys and values are one launch, the output is one, a gate and what it opens one, what follows one."""
    done = forks.run(
        [sys.executable, *BEFORE, "tests.support.inductor_linear"],
        input="",
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    step, batch, prompt = json.loads(done.stdout.splitlines()[-1])
    call = step["code"][step["code"].index("def call(") :].partition("runner =")[0]
    launches = re.findall(r"(linear_\d+)\.run\((.*)\)", call)
    weights = [re.findall(r"\barg(\d+)_1\b", given) for _, given in launches]
    # Of the output, its residual is an argument as well; of the others, the norm's weight.
    assert weights == [["4", "0"], ["5", "6", "8"], ["7"], ["1", "2", "3", "9"]]
    assert "extern_kernels" not in call and not step["fixed"]
    assert not re.search("silu|rsqrt|mean", step["graph"])
    # What is told of arguments is what the tests of machine code assume: of all addresses and strides, that they are
    # multiples of 16.
    for told in re.findall(r"'signature': (\{.*?\}).*'configs': \[(\{.*?\})\]", step["code"]):
        names = list(ast.literal_eval(told[0]))
        aligned = {names[place] for (place,) in ast.literal_eval(told[1])}
        assert {name for name in names if not name.startswith("n_")} <= aligned, told
    grids = re.findall(r"grid = \[\((.*?)\)\]", step["graph"])
    assert all(grid.endswith(", 1, 1") and int(grid.split(",")[0]) > 1 for grid in grids) and len(grids) == 4
    for program in (batch, prompt):
        assert (
            not re.search(r"linear_\d+\.run", program["code"])
            and program["code"].count("extern_kernels.") >= 7
        )
        assert not program["fixed"]
