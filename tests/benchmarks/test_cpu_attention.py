"""`benchmarks/cpu_attention.py` calls the op as compiled code does; a case is compared with PyTorch first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvcompile.kernels.cpp.available import problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["baseline", "paged_int8"])
def test_a_case_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := problem(torch.device("cpu")):
        pytest.skip(reason)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cpu_attention

    monkeypatch.setattr(cpu_attention, "_BYTES", 1.0)
    found = cpu_attention.cases([name, "sdpa"], (3, 1, 64), 80, torch.float32)
    assert list(found) == [name, "sdpa"]
    for case in found.values():
        case.run()
    assert found[name].layers == 2 and found[name].bytes > 0
