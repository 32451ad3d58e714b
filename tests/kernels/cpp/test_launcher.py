"""The launcher speaks PyTorch's stable C ABI by its own declarations, and keeps nothing of what a call hands over."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from kvcompile.kernels.cpp.host import compiler, ops, source

HEADERS = Path(torch.__file__).parent / "include"
CALLS, MOST = 20_000, 1 << 20  # calls, and bytes that a process may grow by: a text that stays has 64
ROWS = 300  # of bfloat16, more than kernels of few rows take: PyTorch's own linear layer is called


def _agree(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """The compiler reads PyTorch's declarations, and then these."""
    (folder / "stable_abi.h").write_text(text)
    source = folder / "both.cpp"
    source.write_text('#include <torch/csrc/stable/c/shim.h>\n#include "stable_abi.h"\n')
    command = [compiler.compiler(), "-std=c++20", "-fsyntax-only", "-w", f"-I{HEADERS}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    "changed",
    [
        ("", ""),
        ("AtenTensorHandle tensor, int64_t* dims", "AtenTensorHandle tensor, int32_t* dims"),
        ("int32_t aoti_torch_dtype_float32", "int64_t aoti_torch_dtype_float32"),
        ("using StableIValue = uint64_t", "using StableIValue = void*"),
    ],
    ids=["as it is", "an argument", "a result", "a type"],
)
def test_the_declarations_are_pytorchs(changed: tuple[str, str], tmp_path: Path) -> None:
    text = (compiler.INCLUDE / "stable_abi.h").read_text("utf-8")
    assert changed[0] in text
    done = _agree(tmp_path, text.replace(*changed) if changed[0] else text)
    assert (done.returncode == 0) == (changed[0] == ""), done.stderr
    assert changed[0] == "" or "conflicting declaration" in done.stderr


def _resident() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


@pytest.mark.parametrize("rows", [1, ROWS])
def test_calls_leave_nothing_behind(rows: int) -> None:
    """Texts, lists, tensors that may be none, results: of each call, all is given back."""
    ops.ready()
    x, weight, bias = (torch.ones(size, dtype=torch.bfloat16) for size in ((rows, 8), (8, 8), (8,)))
    spec = f"linear_few {source.MODELS[torch.bfloat16]}"
    alone, count = source.linear_spec(torch.bfloat16), CALLS // rows

    def called() -> Tensor:
        for _ in range(count):
            ops.cpp_linear(x, weight, bias, spec)
            ops.cpp_linears(x[:1], [weight, weight], [bias, bias], alone)
        return ops.cpp_linear(x, weight, None, spec)

    assert torch.equal(called(), x @ weight)
    before = _resident()
    called()
    assert _resident() - before < MOST


@pytest.mark.parametrize(
    ("rows", "said"), [(1, "for each channel"), (16, "for each channel"), (ROWS, "PyTorch refuses")]
)
def test_a_weight_of_other_channels_is_refused(rows: int, said: str) -> None:
    """Whoever multiplies: the kernel would read what is not there."""
    ops.ready()
    x, weight = torch.ones(rows, 8, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
    spec = f"linear_few {source.MODELS[torch.bfloat16]}"
    with pytest.raises(RuntimeError, match=said):
        ops.cpp_linear(x, weight, None, spec)
    with pytest.raises(RuntimeError, match="for each channel"):
        ops.cpp_linears(x[:1], [weight, weight], [], source.linear_spec(torch.bfloat16))
