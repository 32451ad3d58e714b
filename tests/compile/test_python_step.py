"""Steps of modules that run as Python, compiled: the numbers of the Python, once for equal modules, and never again."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.compile import executor
from kvcompile.compile.python_step import Step
from kvcompile.errors import CompileError, ExportError
from kvcompile.kernels.ops.opaque import OpaqueModule
from tests.passes.recurrent.test_state import Decay, Hybrid, Notes, hybrid
from tests.support import budget
from tests.support.marks import cases

LIMITS: dict[str, Any] = {"max_tokens": 96, "max_batch": 4, "verify": "off"}


class Deep(Hybrid):
    """Three mixers of one kind."""

    def __init__(self) -> None:
        super().__init__(Decay())
        self.more = nn.ModuleList(Decay() for _ in range(2))

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        x = self.wte(input_ids)
        for mixer in (self.mixer, *self.more):
            x = x + mixer(x, Notes() if use_cache else None)
        return self.head(self.block(x))


def deep(dtype: torch.dtype = torch.float32) -> Deep:
    torch.manual_seed(0)
    return Deep().eval().to(dtype)


def tokens(batch: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 61, (batch, count), generator=torch.Generator().manual_seed(seed))


def programs(fast: Any, one_sequence: bool = True) -> list[Step]:
    classes = [s for s in fast.executor.programs if s.tokens_is_one and s.batch_is_one == one_sequence]
    return [each for each in fast.executor.programs[classes[0]] if isinstance(each, Step)]


def states(fast: Any) -> list[Tensor]:
    return [fast.cache.buffers[name] for names in fast.program.states for name in names]


def compilations() -> tuple[int, ...]:
    return (
        counters["aot_autograd"]["total"],
        counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_hit"],
        sum(counters["frames"].values()),
    )


@pytest.fixture
def pythons(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the modules whose Python ran."""
    ran: list[str] = []
    original = OpaqueModule.call_with

    def noting(self: OpaqueModule, leaves: Any) -> list[Tensor]:
        ran.append(self.path)
        return original(self, leaves)

    monkeypatch.setattr(OpaqueModule, "call_with", noting)
    return ran


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    model = deep()
    return {
        "compiled": kvcompile.optimize(model, **LIMITS),
        "eager": kvcompile.optimize(model, compile={"mode": "none"}, **LIMITS),
    }


def within_budget(found: Tensor, model: nn.Module, ids: Tensor) -> None:
    """The logits of the last tokens against the model itself, in float32 and in float64."""
    with torch.no_grad():
        own, true = (of(ids)[:, -found.shape[1] :] for of in (model, copy.deepcopy(model).double()))
    budget.within(found, own, true, torch.float32)


def truth(dtype: torch.dtype, ids: Tensor) -> list[Tensor]:
    """Logits, and the state of each mixer after the last token, which is its last result; in float64."""
    model = deep(dtype).double()
    found: dict[nn.Module, Tensor] = {}
    for mixer in (model.mixer, *model.more):
        mixer.register_forward_hook(lambda own, given, result: found.update({own: result[:, -1]}))
    with torch.no_grad():
        return [model(ids), *[found[mixer] for mixer in (model.mixer, *model.more)]]


@pytest.mark.few(2)
@pytest.mark.parametrize("batch", cases((1, 2, 3), (1, 2)))
def test_fifty_steps_compile_nothing_and_give_what_python_gives(
    modules: dict[str, Any], pythons: list[str], batch: int
) -> None:
    ids = tokens(batch, 56, seed=batch)
    found: dict[str, list[Tensor]] = {}
    for name, fast in modules.items():
        fast.reset()
        fast(ids[:, :4])
        outs = [fast(ids[:, 4:5])]
        pythons.clear()
        before = compilations()
        outs += [fast(ids[:, at : at + 1]) for at in range(5, 56)]
        if name == "compiled":
            assert pythons == [] and compilations() == before
        else:
            assert len(pythons) == 51 * 3
        found[name] = [torch.cat(outs, dim=1), *[state.clone() for state in states(fast)]]
    exact = truth(torch.float32, ids)
    exact[0] = exact[0][:, 4:]
    assert len(found["compiled"]) == 4
    for ours, torchs, true in zip(found["compiled"], found["eager"], exact, strict=True):
        budget.within(ours, torchs, true, torch.float32)


def test_equal_modules_share_one_program_and_have_their_own_weights(modules: dict[str, Any]) -> None:
    fast = modules["compiled"]
    fast.reset()
    fast(tokens(1, 2))
    fast(tokens(1, 1))
    steps = programs(fast)
    assert len(steps) == 3 and len({id(step.compiled) for step in steps}) == 1
    assert len({step.weights[0].data_ptr() for step in steps}) == 3


def test_first_tokens_run_as_python(modules: dict[str, Any], pythons: list[str]) -> None:
    ids = tokens(1, 5)
    outs = {}
    for name, fast in modules.items():
        fast.reset()
        fast(ids[:, :2])
        fast(ids[:, 2:3])  # compiled by now, and the state of another text stands there
        fast.reset()
        outs[name] = []
        for at in range(5):
            pythons.clear()
            outs[name].append(fast(ids[:, at : at + 1]))
            assert bool(pythons) == (name == "eager" or at == 0), at
    ours, torchs = (torch.cat(found, dim=1) for found in outs.values())
    budget.within(ours, torchs, truth(torch.float32, ids)[0], torch.float32)


def test_mode_none_compiles_nothing(modules: dict[str, Any]) -> None:
    before = compilations()
    fast = modules["eager"]
    fast.reset()
    fast(tokens(1, 3))
    fast(tokens(1, 1))
    assert compilations() == before and not fast.executor.programs


def test_steps_are_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_DUMP", str(tmp_path))
    kvcompile.optimize(deep(), **LIMITS)
    (folder,) = tmp_path.iterdir()
    one, many = sorted(folder.glob("python_step_*.py"))
    paths = ("mixer", "more.0", "more.1")
    assert one.read_text().startswith("\n".join(f"# {path}, one sequence" for path in paths) + "\nclass")
    assert many.read_text().startswith("\n".join(f"# {path}, several" for path in paths) + "\nclass")


def test_a_module_with_python_in_it_is_not_saved(modules: dict[str, Any], tmp_path: Any) -> None:
    with pytest.raises(ExportError, match=r"runs Python cannot be saved \(mixer, more\.0, more\.1\)"):
        modules["compiled"].save(tmp_path / "module")


def test_weights_that_change_in_place_are_computed_with(pythons: list[str]) -> None:
    model = hybrid(Decay())
    fast = kvcompile.optimize(model, **LIMITS)
    ids = tokens(1, 8)
    for _ in range(2):
        fast.reset()
        fast(ids[:, :6])
        fast(ids[:, 6:7])
        pythons.clear()
        found = fast(ids[:, 7:])
        assert pythons == []
        within_budget(found, model, ids)
        with torch.no_grad():
            model.mixer.proj.weight.mul_(0.5)


def test_half_precision_has_the_roundings_of_python() -> None:
    """From the first token on, so that no program of a prompt is compiled."""
    ids = tokens(1, 20)
    outs = []
    for mode in ("default", "none"):
        fast = kvcompile.optimize(deep(torch.bfloat16), compile={"mode": mode}, **LIMITS)
        with torch.inference_mode():  # whatever mode the caller is in
            outs.append(torch.cat([fast(ids[:, at : at + 1]) for at in range(20)], dim=1))
        assert mode == "none" or programs(fast)
    budget.within(*outs, truth(torch.bfloat16, ids)[0], torch.bfloat16)


@pytest.mark.parametrize("fails", [False, True], ids=["wrong", "fails"])
def test_what_inductor_gets_wrong_stays_in_python_and_is_told(
    monkeypatch: pytest.MonkeyPatch, pythons: list[str], fails: bool
) -> None:
    original = executor.compile_region

    def broken(module: Any, args: Any, tracer: Any, mode: str) -> Any:
        if type(module).__name__ != "PythonStep":
            return original(module, args, tracer, mode)
        if fails:
            raise CompileError("no compiler today")
        return lambda *values: [result * 1.001 for result in module(*values)]

    monkeypatch.setattr(executor, "compile_region", broken)
    model = hybrid(Decay())
    fast = kvcompile.optimize(model, **LIMITS)
    assert "its steps of one token are compiled" in str(kvcompile.explain(fast))
    ids = tokens(1, 8)
    fast(ids[:, :7])
    why = "no compiler today" if fails else "result 0 is off by"
    with pytest.warns(UserWarning, match=rf"mixer stays in Python \(decode, one sequence\): .*{why}"):
        found = fast(ids[:, 7:])
    assert pythons[-1] == "mixer" and not programs(fast)
    within_budget(found, model, ids)
    said = " ".join(str(kvcompile.explain(fast)).split())
    assert "mixer stays in Python" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(ids[:, 7:])
