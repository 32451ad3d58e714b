"""`targets.tensorrt.session.Engine`: what is bound where, and what is refused before anything is.

Contexts are those of `tests/support/tensorrt_fake.py`; files are loaded by the real TensorRT, as far as it comes
without a GPU.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvcompile
from kvcompile.errors import ArtifactError, LimitError
from kvcompile.targets import seal
from kvcompile.targets.manifest import FILE, Manifest
from kvcompile.targets.tensorrt import adapter
from kvcompile.targets.tensorrt.session import Engine, profile_for
from kvcompile.targets.verify import check_session, source_for
from tests.support.models import TinyLlama

pytest.importorskip("tensorrt_rtx_bindings")
pytest.importorskip("onnxruntime")
from tests.support.tensorrt_fake import Fake, Gpu

LIMITS = {"max_tokens": 48, "max_batch": 2, "prefill_chunk": 8}
# Keys are updated in place, values (codes and scales) have two places each.
RECIPE = {"name": "mixed", "cache": {"keys": {"dtype": "model"}, "values": {"dtype": "int8"}}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return TinyLlama().half().eval()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tensorrt") / "artifact"
    kvcompile.export(model(), folder, "tensorrt", recipe=RECIPE, verify="off", **LIMITS)
    yield folder


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def opened(folder: Path, **changes: Any) -> tuple[Engine, Fake]:
    fake = Fake(folder)
    arguments = {"device": "cpu", "trt": fake.trt, "gpu": fake.gpu, **changes}
    return Engine(folder, **arguments), fake


def ids(batch: int, count: int) -> torch.Tensor:
    return (torch.arange(batch * count) * 7 % 59 + 1).view(batch, count)


def test_caches_in_place_keep_their_address_and_others_swap(artifact: Path) -> None:
    engine, fake = opened(artifact)
    engine.prefill(ids(2, 5))
    addresses = []
    for _ in range(6):
        engine.decode(ids(2, 1))
        addresses.append({name: buffer.data_ptr() for name, buffer in engine.cache.buffers.items()})
    prefill, decode = fake.engines[0].contexts
    assert (prefill.profile.name, decode.profile.name) == ("prefill", "decode")
    in_place = [a.input for a in fake.engines[0].graph.aliases if a.in_place]
    swapped = [a.input for a in fake.engines[0].graph.aliases if not a.in_place]
    assert in_place == ["cache_0_keys_data", "cache_1_keys_data"] and len(swapped) == 4
    for name in in_place:
        assert len({step[name] for step in addresses}) == 1
        assert decode.told[name] == 1, "an address that stays is told once"
        assert prefill.addresses[name] == decode.addresses[name] == addresses[0][name]
    for name in swapped:
        assert len({step[name] for step in addresses}) == 2
        assert all(a[name] != b[name] for a, b in itertools.pairwise(addresses))
    assert engine.report()["swapped"] == sum(engine.cache.buffers[name].nbytes for name in swapped)


def test_generate_gives_the_tokens_of_the_model(artifact: Path) -> None:
    engine, _ = opened(artifact)
    eager = kvcompile.optimize(
        model(), recipe={**RECIPE, "compile": {"mode": "none"}}, verify="off", **LIMITS
    )
    prompt = ids(2, 11)  # more than one chunk
    want = prompt
    with torch.no_grad():
        logits = _last(eager(prompt))
        for _ in range(12):
            token = logits.argmax(-1)
            want = torch.cat([want, token], 1)
            logits = _last(eager(token))
    got = engine.generate(prompt, max_new_tokens=12)
    assert torch.equal(got, want)
    assert torch.equal(engine.generate(prompt, max_new_tokens=12), want), "again, from an empty cache"


def _last(output: Any) -> torch.Tensor:
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return logits[:, -1:]


def test_shapes_outside_the_profiles_are_told_with_both(artifact: Path) -> None:
    graph = Manifest.read(artifact).graphs[0]

    def inputs(batch: int, tokens: int) -> dict[str, torch.Tensor]:
        sizes = {"batch": batch, "tokens": tokens, "kept": 1, "slots": 8}
        return {
            t.name: torch.empty([sizes[s] if isinstance(s, str) else s for s in t.shape], device="meta")
            for t in graph.inputs
        }

    assert profile_for(graph, inputs(2, 1)).name == "decode"
    assert profile_for(graph, inputs(2, 2)).name == "prefill"
    with pytest.raises(LimitError) as caught:
        profile_for(graph, inputs(2, 9))
    assert "input_ids: [2, 9] is outside [1, 1] to [2, 8] of the profile prefill" in str(caught.value)
    with pytest.raises(LimitError, match=r"outside \[1, 1\] to \[2, 8\]"):
        profile_for(graph, inputs(3, 2))


def test_what_tensorrt_refuses_is_an_error_and_the_cache_stays(artifact: Path) -> None:
    engine, fake = opened(artifact)
    engine.prefill(ids(1, 4))
    fake.engines[0].contexts[0].execute_async_v3 = lambda stream: False
    engine._errors.append("out of memory")
    with pytest.raises(ArtifactError, match="TensorRT refused the call: out of memory"):
        engine.prefill(ids(1, 4))
    assert engine.cache.columns == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"version": "1.6.0.9"}, "an engine runs on the version that built it only; export again"),
        ({"capability": "SM90"}, "this GPU is SM90; TensorRT for RTX does not run on it"),
        ({"capability": "SM100"}, "export with the enterprise `tensorrt`, or target='onnx'"),
        ({"capability": None}, "needs an NVIDIA GPU and its driver, and PyTorch finds none"),
    ],
)
def test_another_tensorrt_or_gpu(artifact: Path, changes: dict[str, Any], message: str) -> None:
    fake = Fake(artifact, version=changes.get("version"))
    gpu = Gpu(changes.get("capability", "SM89"))
    with pytest.raises(ArtifactError) as caught:
        Engine(artifact, device="cpu", trt=fake.trt, gpu=gpu)
    assert message in str(caught.value)
    assert fake.engines == [], "nothing was loaded"


def test_an_engine_for_one_gpu_says_how_to_get_another(copy: Path) -> None:
    edit(copy, lambda data: data["engine"].update(compute_capabilities=["SM86"]))
    with pytest.raises(ArtifactError) as caught:
        opened(copy)
    assert (
        "the engine is for SM86, and this GPU is SM89; export again with compute_capabilities=['SM89']"
        in str(caught.value)
    )


def test_an_engine_of_the_other_kind_of_tensorrt(copy: Path) -> None:
    edit(copy, lambda data: data["engine"].update(rtx=False))
    with pytest.raises(
        ArtifactError, match="is TensorRT for RTX, and the engine is of the enterprise TensorRT"
    ):
        opened(copy)


def test_a_damaged_engine_is_found_by_its_manifest(copy: Path) -> None:
    file = copy / "step.engine"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match="it is truncated or another file"):
        opened(copy)
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="sha256"):
        opened(copy)


def test_a_truncated_engine_is_refused_by_tensorrt_itself(copy: Path) -> None:
    """What `deserialize` says where nothing was compared: the real runtime, which looks before it needs a GPU."""
    file = copy / "step.engine"
    file.write_bytes(file.read_bytes()[:5000])
    edit(copy, lambda data: data["files"]["step.engine"].update(bytes=5000))
    trt = adapter.load(("tensorrt_rtx_bindings",))
    with pytest.raises(ArtifactError) as caught:
        Engine(copy, device="cpu", trt=trt, gpu=Gpu(), check=False)
    assert "step.engine: tensorrt_rtx_bindings" in str(caught.value) and "Serialization" in str(caught.value)


def test_without_a_gpu_a_whole_engine_says_so(artifact: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ArtifactError, match="needs an NVIDIA GPU"):
        Engine(artifact)
    trt = adapter.load(("tensorrt_rtx_bindings",))
    with pytest.raises(ArtifactError, match="CUDA driver"):
        Engine(artifact, device="cpu", trt=trt, gpu=Gpu())


@pytest.mark.parametrize(
    "edited, message",
    [
        (lambda graph: graph["outputs"].pop(), "inputs and outputs differ: cache_1_values_scale_out"),
        (lambda graph: graph["profiles"].pop(), "it has 2 profiles, and the manifest tells of 1"),
        (lambda graph: graph["aliases"][0].update(in_place=False), "is one with cache_0_keys_data"),
        (lambda graph: graph["aliases"][1].update(in_place=True), "is apart from every input"),
    ],
)
def test_an_engine_that_is_not_the_manifests(copy: Path, edited: Any, message: str) -> None:
    fake = Fake(copy)  # of the engine as it was built
    edit(copy, lambda data: edited(data["graphs"][0]))
    with pytest.raises(ArtifactError) as caught:
        Engine(copy, device="cpu", trt=fake.trt, gpu=fake.gpu)
    assert "step.engine: not the engine of this manifest" in str(caught.value) and message in str(
        caught.value
    )


def test_without_tensorrt_it_says_which_one_and_why_not(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in adapter.PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ArtifactError) as caught:
        Engine(artifact, device="cpu", gpu=Gpu())
    text = str(caught.value)
    assert "was built by TensorRT for RTX 1.7.1" in text and "kvcompile[tensorrt]" in text
    assert all(f"  - {name}: " in text for name in adapter.PACKAGES)


@pytest.mark.gpu
def test_a_real_engine_gives_the_numbers_of_the_model(artifact: Path) -> None:
    trt = adapter.load()
    if f"SM{''.join(map(str, torch.cuda.get_device_capability()))}" not in trt.targets:
        pytest.skip("TensorRT for RTX does not run on this GPU")
    engine = Engine(artifact)
    check_session(engine, source_for(engine.manifest, model().cuda()))


def edit(folder: Path, change: Any) -> None:
    data = json.loads((folder / FILE).read_text())
    change(data)
    (folder / FILE).write_text(json.dumps(seal.sealed(data)))
