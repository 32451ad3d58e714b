"""What all tests of `kvcompile.quality` share: a model that is captured once, and a list of what was run."""

from __future__ import annotations

from typing import Any

import pytest

from kvcompile.pipeline import Front, understand
from kvcompile.report.quality import bench
from kvcompile.report.quality import run as running
from tests.quality.models import byte_tokenizer, sure_llama


@pytest.fixture(scope="module")
def model() -> Any:
    return sure_llama()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def front(model: Any) -> Front:
    return understand(model)


@pytest.fixture(autouse=True)
def _captured_once(front: Front, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "understand", lambda given: front if given is model else understand(given))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of the jobs that are really run."""
    titles: list[str] = []
    plain = bench.Bench.measure

    def measure(self: Any, job: Any, tell: Any) -> Any:
        titles.append(job.title)
        return plain(self, job, tell)

    monkeypatch.setattr(bench.Bench, "measure", measure)
    return titles
