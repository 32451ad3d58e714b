"""Programs that were compiled before are the same ones, and are taken for nothing else."""

from __future__ import annotations

import json
import logging
import stat
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.standalone_compile import CacheCompiledArtifact

import kvcompile
from kvcompile.compile import executor, kept_programs
from kvcompile.compile.inductor import ShapeClass, compile_region
from kvcompile.compile.kept_programs import KeptPrograms
from kvcompile.util import cache_dir
from tests.support.marks import cases
from tests.support.models import NanoGPT, make, tiny_hf

TINY: dict[str, Any] = {"max_tokens": 64, "verify": "off"}
IDS = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The regions that were compiled; programs are kept, in a folder of the test's own."""
    found: list[str] = []

    def noted(module: Any, *args: Any, **more: Any) -> Any:
        found.append(module.code)
        return compile_region(module, *args, **more)

    monkeypatch.setattr(executor, "compile_region", noted)
    monkeypatch.setenv(cache_dir.KEEP, "on")
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    return found


def stepped(fast: Any) -> Tensor:
    """The logits of a prompt and two steps."""
    outs = [fast(IDS), fast(IDS[:, :1]), fast(IDS[:, 1:2])]
    return torch.cat([out if isinstance(out, Tensor) else out.logits for out in outs], 1)


def folders(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / kept_programs.FOLDER).iterdir())


# Tests beside have it compiled.
@pytest.mark.parametrize("recipe", cases(["baseline", "paged", "int8"], ["baseline"]))
def test_the_second_time_nothing_is_compiled(recipe: str, compiled: list[str], tmp_path: Path) -> None:
    model = tiny_hf()
    first = kvcompile.optimize(model, recipe, **TINY)
    exact = stepped(first)
    once = len(compiled)
    assert once and len(folders(tmp_path)) == 2  # a prompt and a step
    other = tiny_hf()
    with torch.no_grad():
        for weight, its in zip(other.parameters(), model.parameters(), strict=True):
            weight.copy_(its)
    second = kvcompile.optimize(other, recipe, **TINY)
    assert torch.equal(stepped(second), exact) and len(compiled) == once
    assert second.executor.compile_seconds.keys() == first.executor.compile_seconds.keys()
    with torch.no_grad():
        [*other.parameters()][-1].mul_(1.5)  # weights come in: they are not in what was compiled
    third = kvcompile.optimize(other, recipe, **TINY)
    assert not torch.equal(stepped(third), exact) and len(compiled) == once
    torch.testing.assert_close(stepped(kvcompile.optimize(other, recipe, **TINY)), _eager(other, recipe))


def _eager(model: Any, recipe: str) -> Tensor:
    return stepped(kvcompile.optimize(model, recipe, **TINY, compile={"mode": "none"}))


def test_what_is_read_can_be_saved_again(compiled: list[str], tmp_path: Path) -> None:
    exact = stepped(kvcompile.optimize(tiny_hf(), "baseline", **TINY))
    once = len(compiled)
    fast = kvcompile.optimize(tiny_hf(), "baseline", **TINY)
    assert torch.equal(stepped(fast), exact)
    fast.save(tmp_path / "m")
    assert torch.equal(stepped(kvcompile.load(tmp_path / "m")), exact) and len(compiled) == once


def _key(fast: Any, inputs: dict[str, Any] | None = None) -> str | None:
    """The name under which the programs of a step of `fast` would lie."""
    asked: list[KeptPrograms | None] = []
    of = executor.KeptPrograms.of

    class Asking:
        @staticmethod
        def of(*args: Any) -> None:
            asked.append(of(*args))

    class Enough(Exception):
        pass

    def enough(*_: Any, **__: Any) -> Any:
        raise Enough

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(executor, "KeptPrograms", Asking)
        patched.setattr(executor, "Tracer", enough)
        with pytest.raises(Enough):
            fast.prepare(1, 1)
    return None if asked[0] is None else asked[0].folder.name


@pytest.mark.usefixtures("compiled")
def test_each_class_of_shapes_has_a_name_of_its_own() -> None:
    """A prompt of which one row of logits is kept is another program than one of which all are."""
    fast = kvcompile.optimize(tiny_hf(), "baseline", **TINY)
    classes = [ShapeClass(*ones, span) for ones in product((True, False), repeat=3) for span in (0, 1, 64)]
    made = [KeptPrograms.of(fast.executor.regions, "default", shapes, {}) for shapes in classes]
    assert len({kept.folder for kept in made if kept is not None}) == len(classes)


def _wider(model: Any) -> Any:
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(67, model.config.hidden_size))
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "another dtype": lambda: tiny_hf().bfloat16(),
    "another vocabulary": lambda: _wider(tiny_hf()),
    "another number in its graph": lambda: tiny_hf(rms_norm_eps=0.25),
    "another number of layers": lambda: tiny_hf(layers=3),
    "another activation": lambda: tiny_hf(hidden_act="gelu"),
}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("model", MODELS)
def test_of_another_model_they_have_another_name(model: str) -> None:
    one = kvcompile.optimize(tiny_hf(), "baseline", **TINY)
    other = kvcompile.optimize(MODELS[model](), "baseline", **TINY)
    assert _key(one) and _key(one) == _key(kvcompile.optimize(tiny_hf(), "baseline", **TINY)) != _key(other)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "other",
    ["recipe", "code", "threads", "passes", "mode", "inductor", "compiler", "instruction set", "torch"],
)
def test_under_other_circumstances_too(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(NanoGPT)
    fast = kvcompile.optimize(model, "baseline", **TINY)
    before, threads = _key(fast), torch.get_num_threads()
    try:
        match other:
            case "recipe":
                fast = kvcompile.optimize(model, "int8", **TINY)
            case "mode":
                fast = kvcompile.optimize(model, "baseline", **TINY, compile={"mode": "max-autotune"})
            case "code":
                monkeypatch.setattr(kept_programs, "code_digest", lambda: "another")
            case "threads":
                torch.set_num_threads(threads + 1)
            case "passes":
                monkeypatch.setenv("KVCOMPILE_DISABLE", "gemv")
            case "inductor":
                with torch._inductor.config.patch({"cpp.simdlen": 256}):
                    assert before and before != _key(fast)
                return
            case "compiler":
                monkeypatch.setattr(kept_programs, "version", lambda: "g++ 99")
            case "torch":
                monkeypatch.setattr(torch, "__version__", "9.9")
            case _:
                monkeypatch.setenv("KVCOMPILE_CPU_ISA", "portable")
        assert before and before != _key(fast)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "calls.json").write_text("{}"),
        pytest.param(lambda folder: (folder / "calls.json").write_text("{"), marks=pytest.mark.slow),
        pytest.param(lambda folder: (folder / "0.bin").write_bytes(b"no program"), marks=pytest.mark.slow),
        lambda folder: (folder / "0.bin").unlink(),
        lambda folder: _fewer(folder / "calls.json"),
    ],
)
def test_a_damaged_folder_is_made_anew(
    damage: Callable[[Path], object], compiled: list[str], tmp_path: Path
) -> None:
    exact = stepped(kvcompile.optimize(tiny_hf(), "baseline", **TINY))
    once = len(compiled)
    for folder in folders(tmp_path):
        damage(folder)
    assert torch.equal(stepped(kvcompile.optimize(tiny_hf(), "baseline", **TINY)), exact)
    assert len(compiled) == 2 * once
    assert torch.equal(stepped(kvcompile.optimize(tiny_hf(), "baseline", **TINY)), exact)
    assert len(compiled) == 2 * once


def _fewer(path: Path) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "files": data["files"][:-1]}))


@pytest.mark.parametrize("reason", ["off", "not ours alone"])
def test_none_are_kept(
    reason: str, compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "cache" / kept_programs.FOLDER
    if reason == "off":
        monkeypatch.setenv(cache_dir.KEEP, "off")
    else:
        folder.mkdir(parents=True)
        folder.chmod(folder.stat().st_mode | stat.S_IWOTH)
    fast = kvcompile.optimize(tiny_hf(), "baseline", **TINY)
    assert _key(fast) is None
    assert reason == "not ours alone" or not folder.exists()


def test_a_full_disk_keeps_nothing_and_harms_nothing(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_programs, "tempfile", SimpleNamespace(mkdtemp=full))
    fast = kvcompile.optimize(tiny_hf(), "baseline", **TINY)
    assert stepped(fast).shape[1] == 11 and compiled and folders(tmp_path) == []


def test_what_cannot_be_saved_is_not_kept_and_warns_nobody(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any, **_: Any) -> None:
        raise RuntimeError("there is no artifact to save")

    monkeypatch.setattr(CacheCompiledArtifact, "save", refuse)
    assert stepped(kvcompile.optimize(tiny_hf(), "baseline", **TINY)).shape[1] == 11 and compiled
    assert folders(tmp_path) == [] and not any(record.levelno >= logging.WARNING for record in caplog.records)
