"""AOTInductor packages: the numbers of the policy's oracle and of the rewritten module, run without the model's code.

A package takes about a minute of C++ compilation, so each is made once; all but two recipes are `slow`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

import kvcompile
from kvcompile import load
from kvcompile.errors import ArtifactError, ExportError, LimitError, ModelError
from kvcompile.kernels.cpp import available as cpp_available
from kvcompile.kernels.cpp.generate import generate
from kvcompile.kernels.cpp.isa import VARIABLE, isa, multiplies_rows
from kvcompile.kernels.cpp.spec import CppSpec
from kvcompile.kernels.shared.dialect import AOTI
from kvcompile.models import load_model
from kvcompile.recipe import Recipe, shipped_recipes
from kvcompile.targets import machine, seal
from kvcompile.targets.aoti import package
from kvcompile.targets.aoti.kernels import isa_of
from kvcompile.targets.aoti.package import LEVELS, Compiled, compiled, entries, instruction_sets
from kvcompile.targets.aoti.session import Package
from kvcompile.targets.functional import functional
from kvcompile.targets.manifest import Manifest
from kvcompile.targets.source import Source, source_of
from kvcompile.targets.verify import CHUNKS, check_session, source_for
from kvcompile.verify.compare import Check
from tests.support.exports import SHIPPED, small, tiny, written
from tests.support.marks import cases

ROOT = Path(__file__).resolve().parents[3]
TOKENS = 96  # not in whole blocks of 64 slots: the last span is the whole cache
FAST = ("int8",)
MORE = (("baseline", "bfloat16"), ("int8", "bfloat16"), ("paged", "float16"), ("h2o_int8", "float16"))


@dataclass(frozen=True)
class Made:
    """An artifact, what it was made of, and the rewritten module that runs as it is."""

    folder: Path
    source: Source
    eager: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """The artifact of a recipe and a dtype, made when it is first asked for."""
    models: dict[str, Any] = {}
    known: dict[tuple[str, str], Made] = {}

    def make(recipe: str, dtype: str = "float32") -> Made:
        if (recipe, dtype) not in known:
            if dtype not in models:
                models[dtype] = tiny(getattr(torch, dtype), layers=1)
            model, sizes = models[dtype], {"max_tokens": TOKENS, "max_batch": 3}
            folder = tmp_path_factory.mktemp(recipe) / "artifact"
            source = written(model, folder, "aoti", small(recipe, **sizes))
            eager = kvcompile.optimize(model, small(recipe, **sizes, compile={"mode": "none"}))
            known[recipe, dtype] = Made(folder, source, eager)
        return known[recipe, dtype]

    return make


@pytest.fixture(scope="module")
def int8(made: Callable[..., Made]) -> Made:
    return made("int8")


@pytest.fixture
def copied(int8: Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(int8.folder, tmp_path / "artifact"))


def ids_of(batch: int, count: int) -> Tensor:
    return torch.randint(3, 61, (batch, count), generator=torch.Generator().manual_seed(batch))


def agree(got: Tensor, expected: Tensor, check: Check) -> bool:
    """Within what rounding explains of this policy: the budget that verification measured."""
    got, expected = got.double(), expected.double()
    return bool((got - expected).square().mean().sqrt() <= check.budget * expected.square().mean().sqrt())


def compare(of: Made) -> None:
    session = Package(of.folder)
    # Two ragged sequences: a prompt, a chunk, thirty steps. Raises where they disagree.
    check = check_session(session, of.source, CHUNKS)
    for batch in (1, 2, 3, 1):
        ids = ids_of(batch, TOKENS)
        session.reset()
        of.eager.reset()
        start = 0
        # One query of a prompt of two, all and the last, single steps, and up to the very last slot.
        for size, keep in ((2, 1), (15, None), (1, 1), (1, 1), (44, 1), (1, 1), (14, None), (17, 1), (1, 1)):
            part = ids[:, start : start + size]
            got, expected = session.prefill(part, keep=keep), of.eager(part).logits
            assert agree(got, expected[:, -got.shape[1] :], check), (batch, start, size)
            start += size
        assert start == TOKENS
    session.reset()
    with pytest.raises(LimitError, match=r"4 sequences, but runtime\.max_batch is 3"):
        session.prefill(ids_of(4, 2))


@pytest.mark.parametrize("recipe", cases(SHIPPED, FAST))
def test_a_package_is_the_module(made: Callable[..., Made], recipe: str) -> None:
    compare(made(recipe))


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "dtype"), MORE)
def test_a_package_in_16_bits_is_the_module(made: Callable[..., Made], recipe: str, dtype: str) -> None:
    compare(made(recipe, dtype))


def test_every_recipe_is_packaged() -> None:
    assert {*SHIPPED, "auto"} == set(shipped_recipes())


# ---- what is in it


def test_caches_are_updated_where_they_stand(int8: Made) -> None:
    session = Package(int8.folder)
    session.prefill(ids_of(2, 9))
    before = {name: (buffer.data_ptr(), buffer.clone()) for name, buffer in session.cache.buffers.items()}
    session.decode(ids_of(2, 1))
    for name, (address, was) in before.items():
        assert session.cache.buffers[name].data_ptr() == address
        changed = (session.cache.buffers[name] != was).transpose(1, 2).flatten(2).any(2)
        assert changed.nonzero().tolist() == [[0, 9], [1, 9]], "the slot of the new token, and no other"
    assert session.report()["swapped"] == 0


def test_no_cache_is_copied_in_a_step(int8: Made) -> None:
    """The C++ of a step makes no tensor with all slots of the cache, and copies none."""
    with zipfile.ZipFile(int8.folder / "model.pt2") as package:
        for entry in ("decode", "batch_decode"):
            (name,) = [n for n in package.namelist() if n.endswith(f"/{entry}.wrapper.cpp")]
            text = package.read(name).decode()
            text = text[text.index("::run_impl(") :]
            sizes = re.findall(r"int64_t int_array_\d+\[\] = \{([^}]*)\}", text)
            assert any("32L" in size for size in sizes), "the sizes are written otherwise now"
            assert not any(re.search(rf"\b{TOKENS}L, 32L", size) for size in sizes)
            assert "aoti_torch_cpu_copy_" not in text and "aoti_torch_clone" not in text


def test_weights_are_there_once(int8: Made) -> None:
    """Three graphs, and the bytes of one model; the code holds none."""
    from safetensors import safe_open

    model = int8.source.model
    own = sum(p.nbytes for p in model.parameters())
    files = Manifest.read(int8.folder).files
    with safe_open(int8.folder / "weights.safetensors", "pt") as weights:
        names = set(weights.keys())
        # Angles of every position, which the kernels turn vectors by.
        tables = sum(weights.get_tensor(name).nbytes for name in names if name.startswith("rope_"))
    assert tables <= 2 * TOKENS * 32 * 4
    assert own <= files["weights.safetensors"].bytes - tables <= own * 1.05 + 8192
    session = Package(int8.folder)
    for loader, constants in session._models.values():
        assert set(loader.get_constant_fqns()) <= names | {name.split("/")[-1] for name in names}
        assert (
            constants["decoder.lm_head.weight"].data_ptr()
            == next(c for _, c in session._models.values())["decoder.lm_head.weight"].data_ptr()
        )


def test_the_graphs_of_a_package() -> None:
    assert [entry.name for entry in entries(1)] == ["prefill", "decode"]
    assert all(entry.alone for entry in entries(1))
    names = [entry.name for entry in entries(4)]
    assert names == ["prefill", "decode", "batch_decode"]
    # PyTorch 2.11 takes all entries that begin with a name for that entry, and loads the last of them.
    assert not [(one, two) for one in names for two in names if one != two and two.startswith(one)]


def test_a_call_takes_the_graph_for_it(int8: Made) -> None:
    manifest = Manifest.read(int8.folder)
    chosen = {
        (tokens, batch): manifest.graph(tokens, batch).entry for tokens in (1, 2, 64) for batch in (1, 2)
    }
    assert chosen[1, 1] == "decode" and chosen[1, 2] == "batch_decode"
    assert {chosen[tokens, batch] for tokens in (2, 64) for batch in (1, 2)} == {"prefill"}


def test_threads_are_those_of_the_process_that_runs(int8: Made) -> None:
    with zipfile.ZipFile(int8.folder / "model.pt2") as package:
        text = "".join(package.read(n).decode() for n in package.namelist() if n.endswith(".kernel.cpp"))
    assert "#pragma omp parallel\n" in text and "num_threads(" not in text


def test_its_graphs_run_the_cpp_kernels(int8: Made) -> None:
    """Attention and linear layers, of any number of rows where these have a kernel. Their sources travel along."""
    manifest = Manifest.read(int8.folder)
    assert manifest.machine and manifest.machine["kernels"] == isa().name
    names = {
        Path(name).stem for name in manifest.files if name.startswith("kernels/") and name.endswith(".cpp")
    }
    assert {name.partition("_")[0] for name in names} == {"decode", "prefill", "linear"}
    with zipfile.ZipFile(int8.folder / "model.pt2") as package:
        for entry in ("prefill", "decode", "batch_decode"):
            (wrapper,) = [n for n in package.namelist() if n.endswith(f"/{entry}.wrapper.cpp")]
            text = package.read(wrapper).decode()
            text = text[text.index("::run_impl(") :]
            calls = re.findall(r"aoti_torch_cpu_cpp_(\w+)\(.*?\"(\w+)\"", text)
            assert {name for _, name in calls} <= names
            of_one = entry == "decode"
            several = {"linear"} if multiplies_rows(torch.float32) else set()
            assert {op for op, _ in calls} == ({"attend_many"} if entry == "prefill" else {"attend"}) | (
                {"linear", "linears"} if of_one else several
            )
            assert "proxy_executor" not in "".join(
                line for line in text.splitlines() if "call_function" in line
            )
            if of_one:
                assert "aoti_torch_cpu_mm" not in text and "aoti_torch_cpu_addmm" not in text
    for name in names:
        own = (int8.folder / "kernels" / f"{name}.cpp").read_text()
        flags, text = own.split("\n", 1)
        assert flags.startswith("// -shared") and "-ffp-contract=off" in flags
        if name.startswith("decode"):
            spec = next(line for line in text.splitlines() if line.startswith("// {"))
            assert text == generate(CppSpec.from_json(spec.removeprefix("// ")))


@pytest.mark.slow
def test_a_package_of_the_reference_has_no_kernels(tmp_path: Path) -> None:
    recipe = small("int8", max_tokens=TOKENS, max_batch=1, verify="quick", compile={"kernels": "reference"})
    kvcompile.export(tiny(layers=1), tmp_path / "artifact", "aoti", recipe=recipe)
    manifest = Manifest.read(tmp_path / "artifact")
    assert manifest.machine is not None and "kernels" not in manifest.machine
    assert set(manifest.files) == {"model.pt2", "weights.safetensors"}


@pytest.mark.parametrize("level", LEVELS)
def test_kernels_are_for_the_cpus_of_the_package(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What their instruction set needs, the manifest says that the CPU must have; /proc/cpuinfo names it otherwise."""
    try:
        own = instruction_sets(level, machine.has())
    except ExportError:
        pytest.skip(f"this CPU is below {level}")
    names = {"fma": "fma3", **{f"avx512{part}": f"avx512_{part}" for part in ("f", "bw", "dq", "vl")}}
    assert {names.get(need, need) for need in isa_of(level).needs} <= own
    if level == "native":
        monkeypatch.setenv(VARIABLE, "portable")
        assert isa_of(level).name == "portable"


def test_it_is_verified_where_there_is_no_compiler(int8: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is that of the machine that compiled it."""
    monkeypatch.setattr(cpp_available, "_no_compiler", lambda: "there is no C++ compiler")
    source = source_for(Manifest.read(int8.folder), int8.source.model)
    assert source.plan.digest() == int8.source.plan.digest()
    assert {decision.kernels for decision in source.plan.decisions} == {"cpp"}
    assert cpp_available.problem(torch.device("cpu")) == "there is no C++ compiler"


def test_one_process_runs_packages_that_hold_kernels_of_one_name(int8: Made, tmp_path: Path) -> None:
    """Each has its own: what one defines, the other does not see."""
    other = Path(shutil.copytree(int8.folder, tmp_path / "other"))
    first, second = Package(int8.folder), Package(other)
    ids = ids_of(1, 9)
    assert torch.equal(first.prefill(ids), second.prefill(ids))
    assert torch.equal(first.decode(ids[:, :1]), second.decode(ids[:, :1]))


def test_models_whose_graphs_read_alike_have_code_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The text of a graph says nothing of the sizes of its weights. The code is written, and not compiled."""
    options = package._options
    written_only = {"aot_inductor.package_cpp_only": True}
    monkeypatch.setattr(package, "_options", lambda *given: options(*given) | written_only)
    texts = []
    for size in (96, 160):
        source = source_of(
            tiny(layers=1, intermediate_size=size), small("int8", max_batch=1), lambda *_: None, {}, "aoti"
        )
        function = functional(source.front, source.plan, AOTI, in_place=True)
        compiled(function, entries(1)[1], "default", "native", tmp_path / str(size))
        (code,) = (tmp_path / str(size)).rglob("*.kernel.cpp")
        texts.append(code.read_text())
    assert texts[0] != texts[1]


# ---- without the model's code

BARE = """
import sys

import torch  # whose CUDA build imports triton itself, since 2.14

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "onnx", "onnxruntime", "triton") or name.startswith(
            ("kvcompile.passes", "kvcompile.pipeline", "kvcompile.compile")
        ):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
from kvcompile import load

session = load(sys.argv[1])
print(*session.generate(torch.tensor([[5, 17, 3, 9]]), max_new_tokens=12)[0, 4:].tolist())
"""

TORCH_ALONE = """
import json, sys, torch
from torch._inductor.package import load_package

folder = sys.argv[1]
manifest = json.load(open(folder + "/manifest.json"))
data = open(folder + "/weights.safetensors", "rb").read()
end = 8 + int.from_bytes(data[:8], "little")
weights = {}
for name, of in json.loads(data[8:end]).items():
    if name != "__metadata__":
        start, stop = of["data_offsets"]
        dtype = {"F32": torch.float32, "I64": torch.int64}[of["dtype"]]
        weights[name] = torch.frombuffer(bytearray(data[end + start : end + stop]), dtype=dtype).view(of["shape"])
models = {}
for graph in manifest["graphs"]:
    model = load_package(folder + "/model.pt2", graph["entry"])
    own = {n: weights.get(graph["entry"] + "/" + n, weights[n]) for n in model.get_constant_fqns()}
    model.load_constants(own, check_full_update=True, user_managed=True)
    models[graph["entry"]] = model
caches = [
    torch.zeros([1 if size == "batch" else size for size in c["shape"]], dtype=getattr(torch, c["dtype"]))
    for c in manifest["caches"]
]
ids, seen, tokens = torch.tensor([[5, 17, 3, 9]]), 0, []
for _ in range(12):
    count = ids.shape[1]
    given = [ids, seen + torch.arange(count)[None], torch.tensor([seen]), torch.tensor([count - 1]), torch.arange(64)]
    logits = models["prefill" if count > 1 else "decode"]([*given, *caches])[0]
    seen += count
    ids = logits[:, -1:].argmax(-1)
    tokens.append(int(ids))
assert not any(name.startswith(("kvcompile", "transformers")) for name in sys.modules)
print(*tokens)
"""


@pytest.fixture(scope="module")
def generated(int8: Made) -> list[int]:
    """Twelve tokens after a prompt, of the rewritten module."""
    int8.eager.reset()
    ids = torch.tensor([[5, 17, 3, 9]])
    tokens: list[int] = []
    for _ in range(12):
        ids = int8.eager(ids).logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens


@pytest.mark.parametrize("program", [BARE, TORCH_ALONE], ids=["kvcompile.runtime", "torch"])
def test_runs_without_the_model_s_code(int8: Made, generated: list[int], program: str) -> None:
    assert 2 not in generated, "the text ends early; take another prompt"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(int8.folder)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [int(word) for word in done.stdout.split()] == generated


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/cpp, compiled."""
    program = tmp_path_factory.mktemp("cpp") / "run_artifact"
    libraries = library_paths()
    command = ["g++", "-std=c++20", "-w", str(ROOT / "examples/cpp/run_artifact.cpp"), "-o", str(program)]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{path}" for path in libraries] + [f"-Wl,-rpath,{path}" for path in libraries]
    done = subprocess.run([*command, "-ltorch_cpu", "-ltorch", "-lc10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return program


@pytest.mark.parametrize("recipe", cases((*FAST, "kivi2", "long_context"), FAST))
def test_the_cpp_sample_generates_the_same(made: Callable[..., Made], sample: Path, recipe: str) -> None:
    of = made(recipe)
    prompt = ids_of(1, 40)
    wanted = Package(of.folder).generate(prompt, max_new_tokens=30)[0, 40:].tolist()
    words = [str(sample), str(of.folder), "30", *map(str, prompt[0].tolist())]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == wanted
    over = subprocess.run([*words[:2], "90", *words[3:]], capture_output=True, text=True)
    assert over.returncode == 1 and "limits.max_tokens" in over.stderr
    none = subprocess.run([*words[:2], "0", *words[3:]], capture_output=True, text=True, timeout=60)
    assert none.returncode == 1 and "1 new token or more" in none.stderr
    odd = subprocess.run([*words[:3], "5", "-1"], capture_output=True, text=True, timeout=60)
    assert odd.returncode == 1 and "expected token ids from 0 to 60" in odd.stderr


# ---- what is refused


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    data = json.loads((folder / "manifest.json").read_text())
    change(data)
    (folder / "manifest.json").write_text(json.dumps(seal.sealed(data)))
    return folder


def test_another_torch(copied: Path) -> None:
    edited(copied, lambda data: data["versions"].update(torch="2.1.0"))
    with pytest.raises(ArtifactError) as caught:
        load(copied)
    assert "PyTorch 2.1.0" in str(caught.value) and f"this is {torch.__version__}" in str(caught.value)


def test_another_build_of_the_same_torch(copied: Path) -> None:
    own = torch.__version__.split("+")[0]
    assert (
        load(edited(copied, lambda data: data["versions"].update(torch=f"{own}+cu130"))).name == "AOTInductor"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_package_for_a_gpu(copied: Path) -> None:
    edited(copied, lambda data: data["machine"].update(device="cuda", compute_capability=[9, 0]))
    with pytest.raises(ArtifactError, match="compiled for an NVIDIA GPU, and there is none here"):
        load(copied)


def test_another_cpu(copied: Path) -> None:
    edited(copied, lambda data: data["machine"]["cpu"].append("avx1024_f"))
    with pytest.raises(ArtifactError, match=r"a CPU with avx1024_f, which this one lacks.*x86-64-v3"):
        load(copied)
    edited(copied, lambda data: data["machine"].update(machine="riscv64"))
    with pytest.raises(ArtifactError, match="compiled for linux on riscv64, and this is"):
        load(copied)


@pytest.mark.parametrize(
    ("own", "wanted", "message"),
    [((9, 0), [9, 0], None), ((8, 9), [8, 6], None), ((8, 6), [8, 9], "8.9"), ((9, 0), [8, 9], "8.9")],
)
def test_compute_capabilities(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, int], wanted: list[int], message: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: own)
    problem = machine.problem(
        machine.needs(torch.device("cpu"), []) | {"device": "cuda", "compute_capability": wanted}
    )
    assert problem is None if message is None else message in (problem or "")


@pytest.mark.parametrize("name", ["model.pt2", "weights.safetensors"])
def test_truncated(copied: Path, name: str) -> None:
    whole = (copied / name).read_bytes()
    (copied / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError, match=rf"{name}: expected {len(whole):,} bytes"):
        load(copied, check=False)


def test_damaged(copied: Path) -> None:
    data = bytearray((copied / "model.pt2").read_bytes())
    data[-4000:] = bytes(4000)  # where an archive says what is in it
    (copied / "model.pt2").write_bytes(data)
    with pytest.raises(ArtifactError, match="its sha256 is not that of the manifest"):
        load(copied)
    with pytest.raises(ArtifactError, match=r"PyTorch cannot load 'prefill'.*export again"):
        load(copied, check=False)


def test_weights_of_another_model(copied: Path) -> None:
    from safetensors.torch import save_file

    save_file({"decoder.lm_head.weight": torch.zeros(3)}, copied / "weights.safetensors")
    size = (copied / "weights.safetensors").stat().st_size
    edited(copied, lambda data: data["files"]["weights.safetensors"].update(bytes=size))
    with pytest.raises(ArtifactError, match=r"weights.safetensors has no 'decoder.+'"):
        load(copied, check=False)


def test_an_artifact_of_another_target(copied: Path) -> None:
    edited(copied, lambda data: data.update(target="onnx"))
    with pytest.raises(ArtifactError, match="an artifact for onnx, and AOTInductor runs those for aoti"):
        Package(copied)


@pytest.fixture
def nowhere(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out"
    assert list(tmp_path.iterdir()) == [], "something was left"


def test_no_compiler(nowhere: Path) -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ExportError) as caught:
        kvcompile.export(tiny(layers=1), nowhere, "aoti", verify="off")
    assert "needs a C++ compiler" in str(caught.value) and "install g++" in str(caught.value)


def test_a_full_disk_does_not_end_the_process(tmp_path: Path) -> None:
    (tmp_path / "code.so").write_bytes(bytes(1 << 16))
    made = Compiled(entries(1)[0], (str(tmp_path / "code.so"),), {}, {})
    with pytest.raises(OSError, match="No space left"):
        package.package(Path("/dev/full"), (made,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": 1}, "'gpu' is not one of target aoti; it has: cpu"),
        ({"cpu": "i386"}, "cpu: expected one of native"),
    ],
)
def test_options(nowhere: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        kvcompile.export(tiny(layers=1), nowhere, "aoti", verify="off", options=options)


def test_levels_of_cpus() -> None:
    own = {*(f"avx512_{part}" for part in ("f", "bw", "cd", "dq")), "avx", "avx2", "bmi", "bmi2"}
    own |= {"f16c", "fma3", "lzcnt", "popcnt"}
    assert set(LEVELS) == {"native", "x86-64-v3", "x86-64-v4"}
    assert instruction_sets("native", own) == own
    assert "avx2" in instruction_sets("x86-64-v3", own) and "avx512_f" not in instruction_sets(
        "x86-64-v3", own
    )
    with pytest.raises(ExportError, match="x86-64-v4 needs avx512_vl, which this CPU lacks"):
        instruction_sets("x86-64-v4", own)


@pytest.mark.slow
def test_code_for_every_cpu_with_avx2(made: Callable[..., Made], tmp_path: Path) -> None:
    """No instruction of AVX-512 is in it: they have registers of their own."""
    of = made("int8")
    recipe = small("int8", max_tokens=TOKENS, max_batch=1)
    written(of.source.model, tmp_path / "out", "aoti", recipe, cpu="x86-64-v3")
    manifest = Manifest.read(tmp_path / "out")
    assert manifest.machine is not None and not any("avx512" in name for name in manifest.machine["cpu"])
    with zipfile.ZipFile(tmp_path / "out" / "model.pt2") as package:
        libraries = [name for name in package.namelist() if name.endswith(".so")]
        assert len(libraries) == 2
        for name in libraries:
            package.extract(name, tmp_path)
            code = subprocess.run(
                ["objdump", "-d", str(tmp_path / name)], capture_output=True, text=True, check=True
            ).stdout
            assert "%ymm" in code and "%zmm" not in code
    session = Package(tmp_path / "out")
    ids = ids_of(1, 20)
    check = check_session(Package(of.folder), of.source, CHUNKS)
    of.eager.reset()
    assert agree(session.prefill(ids, keep=None), of.eager(ids).logits, check)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_smollm2_writes_the_same_text(tmp_path: Path) -> None:
    """As the compiled module; the code is a fortieth of the weights, which stay in their file."""
    try:
        loaded = load_model("smollm2", "float32")
    except ModelError as error:
        pytest.skip(str(error))
    recipe = Recipe.load("int8", verify="off", max_tokens=512, max_batch=1)
    kvcompile.export(loaded.model, tmp_path / "out", "aoti", recipe=recipe, tokenizer=loaded.tokenizer)
    files = Manifest.read(tmp_path / "out").files
    assert files["model.pt2"].bytes * 30 < files["weights.safetensors"].bytes
    prompt = "The capital of France is Paris, and the capital of Italy is"
    session = load(tmp_path / "out")
    text = session.generate(prompt, max_new_tokens=40)
    fast = kvcompile.optimize(loaded.model, recipe)
    given = loaded.tokenizer(prompt, return_tensors="pt")
    out = fast.generate(**given, max_new_tokens=40, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert len(text.split()) > 5 and text == loaded.tokenizer.decode(out, skip_special_tokens=True)
