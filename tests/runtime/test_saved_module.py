"""`fast.save(folder)` and `kvcompile.load(folder)`: the same module in another process, without the model's Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import ArtifactError, ExportError, InputError, KVCompileError, ModelError
from kvcompile.runtime.saved_module import values
from kvcompile.runtime.saved_module.graphs import Unwritable, graph_of_json, graph_to_json
from kvcompile.runtime.saved_module.tensors import packed
from kvcompile.targets import folder, seal
from tests.passes.capture.test_opaque import routed
from tests.support.models import NanoGPT, TinyConfig, TinyLlama, make, tiny_hf

pytestmark = pytest.mark.optimized  # other processes find the kernels that they have
EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off", "max_tokens": 64, "max_batch": 2}
GROUPED = {"keys": {"bits": 4, "group": 8}, "values": {"bits": 4, "group": 8}}
RECIPES: dict[str, dict[str, Any]] = {
    "baseline": {},
    "paged_int8": {},
    "streaming": {},
    "h2o_int8": {},
    "fp8": {},
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: tiny_hf("llama"),
    "gemma3": lambda: tiny_hf("gemma3", layers=2, layer_types=["sliding_attention", "full_attention"]),
    "tied": lambda: tiny_hf("llama", tie_word_embeddings=True),
    "plain": lambda: make(NanoGPT),
}


def ids(count: int = 20, batch: int = 1) -> Tensor:
    return torch.randint(3, 60, (batch, count), generator=torch.Generator().manual_seed(count))


def logits(module: Any, *parts: Tensor) -> Tensor:
    module.reset()
    found = [module(part) for part in parts]
    return torch.cat([one if isinstance(one, Tensor) else one.logits for one in found], 1)


def same(a: Any, b: Any) -> None:
    parts = (ids(), ids(1), ids(3))
    assert torch.equal(logits(a, *parts), logits(b, *parts))
    assert torch.equal(
        a.generate(ids(9, 2), max_new_tokens=7, do_sample=False),
        b.generate(ids(9, 2), max_new_tokens=7, do_sample=False),
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str, tmp_path: Path) -> None:
    fast = kvcompile.optimize(tiny_hf("llama"), recipe, **{**EAGER, **RECIPES[recipe]})
    fast.save(tmp_path / "m")
    back = kvcompile.load(tmp_path / "m")
    assert back.plan == fast.plan and back.plan.digest() == fast.plan.digest() and back.recipe == fast.recipe
    same(back, fast)


@pytest.mark.few(2)
@pytest.mark.parametrize("model", MODELS)
def test_models(model: str, tmp_path: Path) -> None:
    fast = kvcompile.optimize(MODELS[model](), "int8", **EAGER)
    fast(ids())  # what the cache holds stays with it
    fast.save(tmp_path / "m")
    back = kvcompile.load(tmp_path / "m")
    assert type(back) is type(fast) and back.cache.columns == 0 and fast.cache.columns == 20
    same(back, fast)
    own, other = dict(fast.named_parameters()), dict(back.named_parameters())
    assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    assert back.weights_digest() == fast.weights_digest()
    back.save(tmp_path / "again")  # and once more, from what was loaded
    same(kvcompile.load(tmp_path / "again"), fast)


def test_what_users_ask_of_a_model_of_transformers(tmp_path: Path) -> None:
    fast = kvcompile.optimize(tiny_hf("llama"), **EAGER)
    fast.generation_config.temperature = 0.7
    fast.save(tmp_path / "m")
    back = kvcompile.load(tmp_path / "m")
    assert back.config.to_dict() == fast.config.to_dict() and type(back.config) is type(fast.config)
    assert back.generation_config.temperature == 0.7
    assert back.num_parameters() == fast.num_parameters() and back.dtype == fast.dtype
    assert str(kvcompile.explain(back)) == str(kvcompile.explain(fast))
    assert type(back(ids())) is type(fast(ids())) and back.report["checks"] is not None
    for call in (
        lambda: back.save_pretrained(tmp_path / "p"),
        lambda: back.model(ids()),
        lambda: kvcompile.optimize(back.model),
        lambda: kvcompile.export(back, tmp_path / "a", "onnx"),
    ):
        with pytest.raises(ModelError, match="not the original's Python; load the original to"):
            call()


def test_saved_texts_go_from_one_to_the_other(tmp_path: Path) -> None:
    fast = kvcompile.optimize(tiny_hf("llama"), "int8", **EAGER)
    fast.save(tmp_path / "m")
    fast(ids())
    fast.handle.save(tmp_path / "text")
    back = kvcompile.load(tmp_path / "m")
    back.handle.load(tmp_path / "text")
    assert torch.equal(back(ids(2)).logits, fast(ids(2)).logits)
    with torch.no_grad():
        back.model.get_parameter("lm_head.weight").mul_(2)  # its own weights, which are then others
    with pytest.raises(InputError, match="other weights"):
        back.handle.load(tmp_path / "text")


SCRIPT = """
import sys, torch, kvcompile
torch.set_num_threads(int(sys.argv[3]))  # with others, products of matrices are summed in another order
fast = kvcompile.load(sys.argv[1])
given = torch.load(sys.argv[2])
def flat(out): return out if isinstance(out, torch.Tensor) else out.logits
found = [flat(fast(part)) for part in given["parts"]]
for one, other in zip(found, given["logits"], strict=True):
    assert torch.equal(one, other), (one - other).abs().max()
assert not fast.executor.compile_seconds, fast.executor.compile_seconds
fast.save("again")
assert kvcompile.load("again").executor.programs.keys() == fast.executor.programs.keys()
assert "tests" not in sys.modules and "tests.support.models" not in sys.modules
"""


@dataclass(frozen=True)
class Compiled:
    """A module that was saved with its compiled code, and the logits that it gave for some chunks in order."""

    folder: Path
    parts: list[Tensor]
    logits: list[Tensor]

    def copy(self, to: Path) -> Path:
        shutil.copytree(self.folder, to)
        return to


def compiled_of(model: nn.Module, folder: Path) -> Compiled:
    fast = kvcompile.optimize(model, "int8", **{**EAGER, "compile": {}})
    parts, wanted = [ids(), ids(1), ids(5), ids(1)], []
    for part in parts:
        out = fast(part)
        wanted.append(out if isinstance(out, Tensor) else out.logits)
    fast.save(folder)
    return Compiled(folder, parts, wanted)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compiled_of(tiny_hf("llama", layers=1), tmp_path_factory.mktemp("compiled") / "m")


def another_process_has_it(compiled: Compiled, tmp_path: Path) -> None:
    torch.save({"parts": compiled.parts, "logits": compiled.logits}, tmp_path / "given.pt")
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", SCRIPT, str(compiled.folder), str(tmp_path / "given.pt")]
    command.append(str(torch.get_num_threads()))
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "compiled code is not used" not in done.stderr
    libraries = {path.name for path in (compiled.folder / "code/libraries").rglob("*.so")}
    # And none were made.
    assert libraries and {path.name for path in (tmp_path / "cache").rglob("*.so")} == libraries


def test_another_process_has_the_compiled_code(compiled: Compiled, tmp_path: Path) -> None:
    another_process_has_it(compiled, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "plain"])
def test_another_process_has_the_code_of_any_model(model: str, tmp_path: Path) -> None:
    another_process_has_it(compiled_of(MODELS[model](), tmp_path / "m"), tmp_path)


def test_threads_of_compiled_code(
    compiled: Compiled, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = compiled.copy(tmp_path / "m")
    kvcompile.load(folder)
    assert "threads" not in caplog.text
    edited(folder, lambda record: record.update(threads=64))
    back = kvcompile.load(folder)
    assert "compiled for 64 threads" in caplog.text and back.executor.programs
    back.save(tmp_path / "again")
    assert json.loads((tmp_path / "again/manifest.json").read_text())["threads"] == 64


def test_code_of_another_machine_is_made_anew(compiled: Compiled, tmp_path: Path) -> None:
    folder = compiled.copy(tmp_path / "m")
    here = json.loads((folder / "manifest.json").read_text())["versions"]
    edited(folder, lambda record: record["versions"].update(torch="1.0"))
    with pytest.warns(UserWarning, match=r"compiled code is not used, .*compiled by torch 1\.0, and this is"):
        back = kvcompile.load(folder)
    assert not back.executor.programs
    torch.testing.assert_close(logits(back, *compiled.parts), torch.cat(compiled.logits, 1))
    assert back.executor.compile_seconds  # of the graph that was saved
    edited(folder, lambda record: record.update(versions=here))
    edited(folder, lambda record: record["machine"].update(cpu=["avx9000"]))
    with pytest.warns(UserWarning, match="avx9000"):
        kvcompile.load(folder)


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads((folder / "manifest.json").read_text())
    change(record)
    (folder / "manifest.json").write_text(json.dumps(seal.sealed(record)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "m"
    kvcompile.optimize(make(TinyLlama), **EAGER).save(folder, weights=False)
    return folder


def test_weights_by_reference(saved: Path, tmp_path: Path) -> None:
    model = make(TinyLlama)
    fast = kvcompile.optimize(model, **EAGER)
    assert not (saved / "weights.safetensors").exists()
    with pytest.raises(ArtifactError, match="saved without its weights: pass weights="):
        kvcompile.load(saved)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (tmp_path / "sharded").mkdir()
    names = sorted(state)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: state[name] for name in part}, tmp_path / f"sharded/{number}.safetensors")
    save_file(state, tmp_path / "one.safetensors")
    for given in (model, fast, state, tmp_path / "sharded", str(tmp_path / "one.safetensors")):
        same(kvcompile.load(saved, weights=given), fast)
    shared = kvcompile.load(saved, weights=model)
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in shared.parameters()} <= pointers


def test_other_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    other = make(TinyLlama)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    with pytest.raises(
        ArtifactError, match="are not those that it was saved with: they are of another checkpoint"
    ):
        kvcompile.load(saved, weights=other)
    with pytest.raises(ArtifactError, match="those that were given do not: they are of another"):
        kvcompile.load(saved, weights=make(NanoGPT))
    with pytest.raises(ArtifactError, match="expected a module, a mapping of tensors"):
        kvcompile.load(saved, weights=7)
    with pytest.raises(ArtifactError, match="holds no safetensors file"):
        kvcompile.load(saved, weights=tmp_path)
    state = make(TinyLlama).state_dict()
    for given, message in (
        ({name: tensor.numpy() for name, tensor in state.items()}, "expected a tensor of torch, got ndarray"),
        ({name: tensor.to("meta") for name, tensor in state.items()}, "got one without numbers"),
        (make(TinyLlama).to("meta"), "got one without numbers"),
        ({name: tensor.bfloat16() for name, tensor in state.items()}, r"or not in float32; optimize"),
        ({name: tensor[:1] for name, tensor in state.items()}, r"weights that were given is \[1"),
    ):
        with pytest.raises(ArtifactError, match=message):
            kvcompile.load(saved, weights=given)


def test_other_weights_beside_those_inside_are_refused(tmp_path: Path) -> None:
    model = make(NanoGPT)
    fast = kvcompile.optimize(model, **EAGER)
    fast.save(tmp_path / "m")
    turned = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in model.state_dict().items()}
    same(kvcompile.load(tmp_path / "m", weights=turned), fast)  # however they lie in memory
    with torch.no_grad():
        model.wpe.weight[0, 0] += 1
    with pytest.raises(ArtifactError, match="are not those that it was saved with"):
        kvcompile.load(tmp_path / "m", weights=model)


def test_damage_is_told(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    kvcompile.optimize(make(NanoGPT), **EAGER).save(whole)

    def broken(change: Callable[[Path], object], **options: Any) -> str:
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "m")
        change(tmp_path / "m")
        with pytest.raises(ArtifactError) as caught:
            kvcompile.load(tmp_path / "m", **options)
        return str(caught.value)

    assert "is missing" in broken(lambda m: (m / "graph.json").unlink())
    assert "sha256" in broken(lambda m: flipped(m / "weights.safetensors"))
    assert "truncated" in broken(lambda m: (m / "constants.safetensors").write_bytes(b""))
    assert "is not in this folder" in broken(
        lambda m: edited(m, lambda r: r["files"].update({"../x": {"bytes": 1, "sha256": ""}}))
    )
    assert "optimize the model again" in broken(
        lambda m: edited(m, lambda r: r["versions"].update(kvcompile="0.0.1"))
    )
    with pytest.raises(
        ArtifactError, match="a saved module, is not opened with threads=: it takes weights, check"
    ):
        kvcompile.load(whole, threads=2)
    record = json.loads((whole / "manifest.json").read_text())
    record["plan"]["limits"]["max_tokens"] *= 2
    assert "its sha256 is not" in broken(lambda m: (m / "manifest.json").write_text(json.dumps(record)))
    assert "format version" in broken(lambda m: edited(m, lambda r: r.update(format_version=2)))
    assert "kind is" in broken(lambda m: edited(m, lambda r: r.update(kind="other")))
    for name, value in (
        ("plan", {"is": "os:system"}),
        ("plan", {"is": "kvcompile.plan:Plan"}),
        ("program", {}),
        ("outputs", {"spec": "[]"}),
    ):
        assert "damaged or edited by hand" in broken(
            lambda m, n=name, v=value: edited(m, lambda r: r.update({n: v}))
        )
    for text in ("", "[]", "{}", '{"regions": 3}', "[" * 10_000):
        assert "damaged or edited by hand" in broken(lambda m, t=text: rewritten(m / "graph.json", t))


def rewritten(path: Path, text: str) -> None:
    path.write_text(text)
    info = {"bytes": len(text), "sha256": folder.sha256(path)}
    edited(path.parent, lambda record: record["files"].update({path.name: info}))


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = kvcompile.optimize(make(NanoGPT), **EAGER)
    fast.save(tmp_path / "m")

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("kvcompile.util.whole_file.save_file", full)
        with pytest.raises(ExportError, match="No space left on device"):
            fast.save(tmp_path / "m")
    same(kvcompile.load(tmp_path / "m"), fast)
    fast.save(tmp_path / "m")  # in its place
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match="expected a folder"):
        fast.save(tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/x").write_text("mine")
    with pytest.raises(ExportError, match="holds something that is no artifact"):
        fast.save(tmp_path / "mine")
    with pytest.raises(KVCompileError, match=r"fast\.save\(folder\) writes it, kvcompile\.load"):
        torch.save(fast, tmp_path / "p")


def test_a_module_that_runs_python_is_refused(tmp_path: Path) -> None:
    fast = kvcompile.optimize(routed(), **EAGER)
    with pytest.raises(ExportError, match=r"runs Python cannot be saved \(experts\.0, experts\.1\)"):
        fast.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.slow  # docs/artifacts.md is run, too
def test_load_opens_artifacts(tmp_path: Path) -> None:
    model = make(NanoGPT, TinyConfig(num_layers=1))
    kvcompile.export(model, tmp_path / "a", "onnx", max_tokens=64, verify="off")
    session = kvcompile.load(tmp_path / "a")
    assert session.generate(ids(5), max_new_tokens=3).shape == (1, 8)


def test_load_says_what_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected the folder of an artifact"):
        kvcompile.load(tmp_path)


def test_tensors_share_memory_as_they_did() -> None:
    whole = torch.arange(24.0).view(4, 6)
    tensors = {
        "row": whole[1],
        "whole": whole,
        "turned": whole.T,
        "expanded": torch.arange(3.0)[:, None].expand(3, 5),
        "apart": torch.ones(2, 3),
        "part": torch.arange(10)[2:8:2],
        "empty": torch.ones(0, 4),
        "scalar": torch.tensor(2.0),
    }
    views, bases = packed(tensors)
    assert {view.base for view in views.values()} == bases.keys() and "whole" in bases
    assert (
        bases.keys().isdisjoint({"row", "turned"})
        and sum(base.numel() for base in bases.values()) == 24 + 3 + 6 + 5 + 1
    )
    for name, tensor in tensors.items():
        back = views[name].of(bases[name if name in bases else views[name].base].clone())
        assert torch.equal(back, tensor) and back.stride() == tensor.stride(), name
    for wrong in ({"offset": 30}, {"shape": (7, 6)}, {"stride": (-1, 1)}):
        from dataclasses import replace

        with pytest.raises(ValueError, match="is not within"):
            replace(views["whole"], **wrong).of(whole)  # type: ignore[arg-type]


def test_values_and_graphs_come_back() -> None:
    for value in (None, True, 3, -0.0, float("-inf"), "x", (1, (2.5, "a")), torch.int8, torch.device("cpu")):
        assert values.of_json(json.loads(json.dumps(values.to_json(value)))) == value
    with pytest.raises(TypeError):
        values.to_json(object())
    for data in ({"is": "json:JSONDecoder"}, {"is": "kvcompile.plan:os"}, {"float": 1}, {"x": 1}):
        with pytest.raises((ValueError, AttributeError)):
            values.of_json(data)

    def computed(x: Tensor) -> Tensor:
        size = x.shape[0] * 2 // 3
        part = x[:, 1:3].to(torch.float64, memory_format=torch.contiguous_format).clamp(min=float("-inf"))
        return torch.cat([part, torch.full((x.shape[0], size), 2.0, dtype=torch.float64)], 1)

    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(computed, tracing_mode="symbolic")(torch.randn(5, 4))
    back = graph_of_json(json.loads(json.dumps(graph_to_json(graph))), "Back")
    assert torch.equal(back(torch.ones(7, 4)), computed(torch.ones(7, 4)))
    with pytest.raises(Unwritable, match="print"):
        broken = torch.fx.Graph()
        broken.output(broken.call_function(print))
        graph_to_json(torch.fx.GraphModule(nn.Module(), broken))
    for name in ("os.system", "aten.add", "builtins.eval", "aten.add.Nope"):
        with pytest.raises((ValueError, AttributeError)):
            graph_of_json([["call_function", "x", name, [], {}]], "Wrong")
