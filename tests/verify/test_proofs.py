"""A proof is kept for the very model, plan and code that it is of, and is believed for no other."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import kvcompile
from kvcompile import api
from kvcompile.errors import VerificationError
from kvcompile.util import cache_dir
from kvcompile.verify import proofs
from tests.support.models import NanoGPT, make, tiny_hf


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The modes of each verification that ran; proofs are kept, in a folder of the test's own."""
    found: list[str] = []
    verify = api.verify

    def noted(model: nn.Module, front: Any, plan: Any, mode: Any) -> Any:
        found.append(mode)
        return verify(model, front, plan, mode)

    monkeypatch.setattr(api, "verify", noted)
    monkeypatch.setenv(cache_dir.KEEP, "on")
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    return found


def optimized(model: nn.Module, recipe: object = "int8", **more: Any) -> Any:
    return kvcompile.optimize(model, recipe, **{"compile": {"mode": "none"}, "max_tokens": 64, **more})


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / proofs.FOLDER).glob("*.json"))


@pytest.mark.parametrize("make_model", [tiny_hf, lambda: make(NanoGPT)], ids=["transformers", "by hand"])
def test_the_second_time_nothing_is_compared(
    make_model: Callable[[], nn.Module], compared: list[str], tmp_path: Path
) -> None:
    model = make_model()
    first = optimized(model)
    assert compared == ["quick"] and first.report["proved"] is None and len(kept(tmp_path)) == 1
    other = make_model()
    other.load_state_dict(model.state_dict())
    second = optimized(other)
    assert compared == ["quick"] and second.report["checks"] == first.report["checks"]
    assert second.report["proved"] == json.loads(kept(tmp_path)[0].read_text())["made"]
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(_logits(first(ids)), _logits(second(ids)), rtol=0, atol=0)


def _logits(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.logits


def _weight(model: nn.Module) -> None:
    with torch.no_grad():
        [*model.parameters()][-1].view(-1)[3] += 1


OTHERS: dict[str, tuple[Callable[[nn.Module], object], dict[str, Any]]] = {
    "a weight": (_weight, {}),
    "half precision": (lambda model: model.bfloat16(), {}),
    "an attribute that the graph does not have": (lambda model: setattr(model, "note", 1), {}),
    "another recipe": (lambda model: None, {"recipe": "baseline"}),
    "a limit": (lambda model: None, {"max_tokens": 65}),
    "thorough": (lambda model: None, {"verify": "thorough"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_another_is_compared_again(name: str, compared: list[str]) -> None:
    change, options = OTHERS[name]
    model = make(NanoGPT)
    optimized(model)
    change(model)
    fast = optimized(model, **options)
    assert compared == ["quick", options.get("verify", "quick")] and fast.report["proved"] is None


SCALE = 1.0


class Scaled(NanoGPT):
    """Its source says nothing of what it computes: it looks at a global."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * SCALE


@pytest.mark.parametrize("setting", ["code", "passes", "precision", "a global", "a dispatch mode"])
def test_so_is_the_same_under_other_circumstances(
    setting: str, compared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(Scaled if setting == "a global" else NanoGPT)
    optimized(model)
    match setting:
        case "code":
            monkeypatch.setattr(proofs, "code_digest", lambda: "another")
        case "passes":
            monkeypatch.setenv("KVCOMPILE_DISABLE", "rope_on_append")
        case "precision":
            monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        case "a global":
            monkeypatch.setitem(globals(), "SCALE", 2.0)
        case _:
            with _Passing():
                optimized(model)
            assert compared == ["quick", "quick"]
            return
    optimized(model)
    assert compared == ["quick", "quick"]


class _Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_failed_is_not_kept(
    compared: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(*_: Any) -> Any:
        raise VerificationError("it differs", 0, 1.0)

    model = make(NanoGPT)
    with monkeypatch.context() as patched, pytest.raises(VerificationError):
        patched.setattr(api, "verify", failing)
        optimized(model)
    assert kept(tmp_path) == []
    optimized(model)
    assert compared == ["quick"]


def _failed(data: dict[str, Any]) -> None:
    data["checks"][0]["error"] = 2 * data["checks"][0]["budget"]


def _not_finite(data: dict[str, Any]) -> None:
    data["checks"][0]["error"] = data["checks"][0]["budget"] = float("inf")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: _edit(path, _failed),
        lambda path: _edit(path, _not_finite),
        lambda path: _edit(path, lambda data: data.update(format=2)),
        lambda path: _edit(path, lambda data: data.update(checks=[])),
        lambda path: _edit(path, lambda data: data.pop("made")),
    ],
)
def test_a_file_that_says_something_else_is_not_believed(
    damage: Callable[[Path], object], compared: list[str], tmp_path: Path
) -> None:
    model = make(NanoGPT)
    optimized(model)
    damage(kept(tmp_path)[0])
    assert optimized(model).report["proved"] is None and compared == ["quick", "quick"]
    assert optimized(model).report["proved"] is not None and compared == ["quick", "quick"]


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "helper", iter([1])),
        lambda model: model.register_forward_hook(lambda *_: None),
    ],
)
@pytest.mark.filterwarnings("ignore:forward hooks")
def test_what_cannot_be_told_is_compared_each_time(
    change: Callable[[nn.Module], object], compared: list[str], tmp_path: Path
) -> None:
    model = make(NanoGPT)
    change(model)
    optimized(model)
    optimized(model)
    assert compared == ["quick", "quick"] and kept(tmp_path) == []


def test_a_folder_that_others_can_write_to_has_no_proofs(compared: list[str], tmp_path: Path) -> None:
    model = make(NanoGPT)
    optimized(model)
    folder = tmp_path / "cache" / proofs.FOLDER
    folder.chmod(folder.stat().st_mode | stat.S_IWOTH)
    assert optimized(model).report["proved"] is None and compared == ["quick", "quick"]


def test_none_is_kept_where_that_is_switched_off(
    compared: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cache_dir.KEEP, "off")
    model = make(NanoGPT)
    optimized(model)
    optimized(model)
    assert compared == ["quick", "quick"] and not (tmp_path / "cache" / proofs.FOLDER).exists()
