"""Quality over ranks: the figures of one process, and rank 0 alone writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import kvcompile
from tests.quality.models import SCORED, SINKS, TEXT, byte_tokenizer, sure_llama
from tests.support.processes import spawn

RECIPES = [SINKS, "int8"]


def measured(out: Path | None, **parallel: Any) -> Any:
    more: dict[str, Any] = {**SCORED, "out": out, "plot": False, "compile": "none"}
    return kvcompile.quality(sure_llama(), byte_tokenizer(), RECIPES, TEXT, parallel=parallel or None, **more)


def _same(rank: int, ranks: int, folder: Path, alone: Any) -> None:
    report = measured(folder, tensor=ranks, timeout=60, start=120)
    torch.distributed.barrier()
    for one, other in zip(alone.rows, report.rows, strict=True):
        assert one.recipe == other.recipe
        assert abs(one.perplexity.perplexity / other.perplexity.perplexity - 1) < 1e-4
        assert 2 * other.memory.measured == one.memory.measured
    assert any(
        "over 2 ranks (tensor: 2): bytes in the buffers are those of rank 0" in note for note in report.notes
    )
    assert len((folder / "results.jsonl").read_text().splitlines()) == len(report.rows)
    again = measured(folder, tensor=ranks, timeout=60, start=120)  # what is finished is found on both
    assert again.rows == report.rows or rank


def test_ranks_measure_what_one_process_does(tmp_path: Path) -> None:
    spawn(2, _same, tmp_path, measured(None))
