"""Facts of kernels are assembled once, kept, and made anew where what is kept is broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from kvcompile.errors import KernelError
from kvcompile.kernels.triton.predict import facts as module
from kvcompile.kernels.triton.predict.facts import assembled, facts
from kvcompile.kernels.triton.predict.recorded import Made, Shape, recorded
from kvcompile.kernels.triton.tools import assemble
from kvcompile.kernels.triton.tools.assemble import Assembled, Request
from kvcompile.kernels.triton.tools.ttgir import Pipeline
from kvcompile.layouts import CacheLayout
from tests.support.predicted import H200, fact, shape

OF: Shape = shape(CacheLayout(), (32768,))
GIVEN = replace(fact(pipeline=Pipeline(2, 2, 0)), loads={128: 16})


def requests(made: Iterable[Made]) -> tuple[Request, ...]:
    """The kernels of launches, each once."""
    return tuple(dict.fromkeys(one.request for one in made))


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What was assembled, by a compiler that gives the same for every kernel but combine, which it refuses."""
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))
    seen: list[Request] = []

    def attempted(requests: Iterable[Request]) -> list[Assembled | str]:
        asked = list(requests)
        seen.extend(asked)
        return ["no such thing" if one.spec.role == "combine" else GIVEN for one in asked]

    monkeypatch.setattr(assemble, "attempted", attempted)
    return seen


def test_they_are_kept(asked: list[Request]) -> None:
    wanted = requests(recorded(OF, H200.machine))
    told: list[tuple[str, int, int]] = []
    first = facts(wanted, lambda *progress: told.append(progress))
    assert asked == list(wanted) and told[-1] == ("assembling kernels", 2, 2)
    assert facts((*wanted, *wanted)) == first and len(asked) == 2
    decode, combine = wanted
    assert assembled(first, decode) == GIVEN
    with pytest.raises(KernelError, match="does not assemble:\nno such thing"):
        assembled(first, combine)


def test_another_kernel_compiler_or_reader_has_others(
    asked: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = requests(recorded(OF, H200.machine))[:1]
    facts(wanted)
    facts(replace(one, num_stages=one.num_stages + 1) for one in wanted)
    assert len(asked) == 2
    monkeypatch.setattr(module, "version", lambda name: "0.0")
    facts(wanted)
    assert len(asked) == 3
    monkeypatch.setattr(module, "_readers", lambda: "another text")
    facts(wanted)
    assert len(asked) == 4


def test_what_is_broken_is_made_again(asked: list[Request], tmp_path: Path) -> None:
    wanted = requests(recorded(OF, H200.machine))[:1]
    first = facts(wanted)
    (file,) = (tmp_path / "assembled").iterdir()
    for text in ("{", "{}", "[1, 2]"):
        file.write_text(text)
        assert facts(wanted) == first
    assert len(asked) == 4


def test_a_cache_that_cannot_be_written_is_an_error(
    asked: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(KernelError, match="set KVCOMPILE_CACHE_DIR"):
        facts(requests(recorded(OF, H200.machine))[:1])
