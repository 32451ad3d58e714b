"""Artifacts as folders: written whole or not at all, and refused when they are not what they were."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvcompile
import kvcompile.targets.onnx.write
from kvcompile import pipeline
from kvcompile.errors import (
    ArtifactError,
    ExportError,
    InputError,
    LimitError,
    ModelError,
    RecipeError,
    VerificationError,
)
from kvcompile.runtime.load import load
from kvcompile.targets import folder, seal
from kvcompile.targets.check import checked
from kvcompile.targets.manifest import Manifest
from kvcompile.targets.onnx.session import Session
from kvcompile.targets.onnx.weights import WeightFile
from kvcompile.targets.source import Source, source_of
from kvcompile.targets.verify import check_session, source_for, verify_artifact
from tests.passes.capture.test_opaque import routed
from tests.support.exports import small, tiny
from tests.support.marks import cases
from tests.support.models import TinyConfig, TinyLlama, make

# The same plan as that of the artifact which tests read, and other files: they name their recipe.
RENAMED = small("int8", name="renamed")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny(layers=1)


@pytest.fixture(scope="module")
def made(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good artifact, which tests only read."""
    out = tmp_path_factory.mktemp("made") / "artifact"
    kvcompile.export(model, out, "onnx", recipe=small("int8", verify="quick"))
    return out


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def listed(path: Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*"))


class TestManifest:
    def test_says_all(self, made: Path, model: nn.Module) -> None:
        manifest = Manifest.read(made)
        assert manifest == Manifest.model_validate_json(manifest.to_json())
        assert manifest.target == "onnx" and manifest.model.dtype == "float32"
        assert manifest.recipe.name == "int8" and manifest.limits.max_tokens == 96
        assert {g.phase for g in manifest.graphs} == {"prefill", "decode"}
        assert set(manifest.files) == {"prefill.onnx", "decode.onnx", "weights.bin"}
        assert {"kvcompile", "torch", "onnx"} <= manifest.versions.keys()
        assert manifest.model.eos_token_ids == (2,)
        for graph in manifest.graphs:
            caches = {cache.name: cache for cache in manifest.caches}
            given = {t.name: t for t in graph.inputs if t.role == "cache"}
            assert given.keys() == caches.keys()
            assert all((t.shape, t.dtype) == (caches[n].shape, caches[n].dtype) for n, t in given.items())
            assert [a.input for a in graph.aliases] == list(given)
            assert all(a.in_place for a in graph.aliases)  # slots in order

    def test_was_run_before_it_had_its_name(self, made: Path) -> None:
        (check,) = Manifest.read(made).checks
        assert check.session == "ONNX Runtime" and 0 < check.error < check.budget

    def test_weights_are_there_once(self, made: Path, model: nn.Module) -> None:
        held = sum(p.numel() * 4 for p in model.parameters())
        assert (made / "weights.bin").stat().st_size < held * 1.05

    def test_the_graphs_say_where_they_come_from(self, made: Path) -> None:
        import onnx

        said = {
            p.key: p.value for p in onnx.load(made / "decode.onnx", load_external_data=False).metadata_props
        }
        assert said["kvcompile.plan_digest"] == Manifest.read(made).plan.digest
        assert said["kvcompile.recipe"] == "int8" and said["kvcompile.phase"] == "decode"


class TestWriting:
    def test_an_optimized_module_brings_its_recipe(self, model: nn.Module, tmp_path: Path) -> None:
        fast = kvcompile.optimize(model, small("int8", max_tokens=64))  # compiled where it is called
        manifest = kvcompile.export(fast, tmp_path / "a", "onnx", max_tokens=96)
        assert manifest.recipe.name == "int8" and manifest.limits.max_tokens == 96

    @pytest.mark.parametrize("target", ("engine", "", None))
    def test_unknown_target(self, model: nn.Module, tmp_path: Path, target: Any) -> None:
        with pytest.raises(ExportError, match="expected one of onnx, tensorrt, aoti"):
            kvcompile.export(model, tmp_path / "a", target)
        assert listed(tmp_path) == []

    def test_unknown_option(self, model: nn.Module, tmp_path: Path) -> None:
        with pytest.raises(ExportError, match="'opsets' is not one of target onnx"):
            kvcompile.export(model, tmp_path / "a", "onnx", recipe=small("int8"), options={"opsets": 3})
        with pytest.raises(ExportError, match="opset: expected one of 23, 24, got 17"):
            kvcompile.export(model, tmp_path / "a", "onnx", recipe=small("int8"), options={"opset": 17})
        assert listed(tmp_path) == []

    def test_a_wrong_recipe_writes_nothing(self, model: nn.Module, tmp_path: Path) -> None:
        with pytest.raises(RecipeError):
            kvcompile.export(model, tmp_path / "a", "onnx", recipe="int9")
        assert listed(tmp_path) == []

    def test_a_model_of_inference_mode(self, tmp_path: Path) -> None:
        """Its weights are tensors that PyTorch does not trace."""
        with torch.inference_mode():
            plain = make(TinyLlama, TinyConfig(num_layers=1))
        manifest = kvcompile.export(plain, tmp_path / "a", "onnx", recipe=small("int8", verify="quick"))
        assert len(manifest.checks) == 1 and next(plain.parameters()).is_inference()
        (outcome,) = verify_artifact(tmp_path / "a", plain)
        assert outcome.check is not None

    def test_weights_that_are_not_finite_are_named(self, tmp_path: Path) -> None:
        plain = make(TinyLlama, TinyConfig(num_layers=1))
        with torch.no_grad():
            plain.lm_head.weight[3, 3] = float("nan")
        with pytest.raises(ModelError, match=r"lm_head\.weight has 1 values that are NaN"):
            kvcompile.export(plain, tmp_path / "a", "onnx", recipe=small("baseline", verify="quick"))

    def test_ends_are_those_of_the_module_that_was_given(self, model: nn.Module) -> None:
        """Also in torch's own wrapper."""
        fast: Any = kvcompile.optimize(model, small("int8"))
        fast.generation_config = deepcopy(fast.generation_config)
        fast.generation_config.eos_token_id = 9
        for given in (fast, torch.compile(fast)):
            source = source_of(given, None, lambda *_: None, {}, "onnx", verified=False)
            assert source.generation.eos_token_id == 9 and source.recipe.name == "int8"

    def test_what_is_no_artifact_is_left_alone(self, model: nn.Module, tmp_path: Path) -> None:
        file, other = tmp_path / "file", tmp_path / "other"
        file.write_text("mine")
        other.mkdir()
        (other / "thesis.tex").write_text("mine")
        with pytest.raises(ExportError, match="expected a folder, and it is a file"):
            kvcompile.export(model, file, "onnx")
        with pytest.raises(ExportError, match="something that is no artifact"):
            kvcompile.export(model, other, "onnx")
        (other / "manifest.json").write_text('{"name": "a web app"}')
        with pytest.raises(ExportError, match="not of kvcompile"):
            kvcompile.export(model, other, "onnx")
        assert file.read_text() == "mine" and (other / "thesis.tex").read_text() == "mine"

    @pytest.mark.parametrize("where", cases(("weights", "graph", "manifest"), ("weights", "manifest")))
    def test_a_full_disk(
        self, model: nn.Module, made: Path, copy: Path, where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is left but what was there."""

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        place = {
            "weights": "kvcompile.targets.onnx.weights.WeightFile._append",
            "graph": "onnx_ir.save",
            "manifest": "pathlib.Path.write_text",
        }[where]
        before = listed(copy.parent)
        with monkeypatch.context() as patched:
            patched.setattr(place, full)
            out = copy.parent / "new" if where == "weights" else copy
            with pytest.raises(ExportError, match="No space left on device"):
                kvcompile.export(model, out, "onnx", recipe=RENAMED)
        assert listed(copy.parent) == before
        folder.check(copy, Manifest.read(copy))

    def test_what_does_not_run_is_not_written(
        self, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        move = WeightFile.move

        def emptied(self: WeightFile, graph: Any) -> None:
            move(self, graph)
            node = next(node for node in graph.graph if node.op_type == "MatMul")
            node.op_type = "NoSuchOperator"

        monkeypatch.setattr(WeightFile, "move", emptied)
        # By its name: `kvcompile.export` is the function, too.
        monkeypatch.setattr(sys.modules["kvcompile.targets.onnx.write"], "checked", lambda path: None)
        with pytest.raises(ExportError, match="what was written does not run"):
            kvcompile.export(model, tmp_path / "a", "onnx", recipe=small("int8", verify="quick"))
        assert listed(tmp_path) == []

    def test_what_cannot_run_in_a_dtype_is_left_for_others(self, model: nn.Module, copy: Path) -> None:
        """ONNX Runtime has no products of bfloat16 on CPUs."""
        source = source_for(Manifest.read(copy), model)
        source = replace(source, recipe=small("int8", verify="quick"))
        (copy / "decode.onnx").write_bytes(b"")
        with pytest.raises(ExportError, match="what was written does not run"):
            checked(source, copy, lambda *_: None)
        of_bfloat16 = replace(source, plan=replace(source.plan, dtype="bfloat16"))
        assert checked(of_bfloat16, copy, lambda *_: None) == ()

    def test_files_beside_an_artifact_are_left_alone(self, model: nn.Module, copy: Path) -> None:
        (copy / "notes").mkdir()
        (copy / "notes" / "mine.txt").write_text("mine")
        before = listed(copy)
        with pytest.raises(ExportError, match=r"holds 'notes/mine.txt', which is not of the artifact there"):
            kvcompile.export(model, copy, "onnx", recipe=small("baseline"))
        (copy / "manifest.json").write_text('{"format": "kvcompile"')
        with pytest.raises(ExportError, match="is not of kvcompile, or damaged"):
            kvcompile.export(model, copy, "onnx", recipe=small("baseline"))
        assert listed(copy) == before

    def test_a_link_leads_to_the_artifact(self, copy: Path) -> None:
        """A folder in the place of the link would leave what it leads to as it was, and be on another disk."""
        for name, to in (("link", copy), ("dangling", copy.parent / "new")):
            (copy.parent / name).symlink_to(to)
            with folder.writing(copy.parent / name) as made:
                (made / "manifest.json").write_text("new")
            assert (copy.parent / name).is_symlink() and (to / "manifest.json").read_text() == "new"

    def test_a_link_beside_an_artifact_is_left_alone(self, copy: Path) -> None:
        (copy / "mine").symlink_to(copy.parent)
        with (
            pytest.raises(ExportError, match="holds 'mine', which is not of the artifact"),
            folder.writing(copy),
        ):
            pass
        assert (copy / "mine").is_symlink()

    @pytest.mark.parametrize("fails", (1, 2))
    def test_a_rename_that_fails(self, copy: Path, monkeypatch: pytest.MonkeyPatch, fails: int) -> None:
        """The old artifact is where it was; where not even that can be, it is not removed."""
        rename, count = Path.rename, 0

        def failing(self: Path, target: Path) -> Path:
            nonlocal count
            count += 1
            if 1 < count <= 1 + fails:
                raise KeyboardInterrupt
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", failing)
        with pytest.raises(KeyboardInterrupt), folder.writing(copy) as made:
            (made / "manifest.json").write_text("new")
        (left,) = copy.parent.rglob("manifest.json")
        folder.check(left.parent, Manifest.read(left.parent))
        assert (left.parent == copy) == (fails == 1)

    def test_an_interruption_after_the_new_one_has_its_name(
        self, copy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rename = Path.rename

        def interrupted(self: Path, target: Path) -> Path:
            moved = rename(self, target)
            if target == copy:
                raise KeyboardInterrupt
            return moved

        monkeypatch.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt), folder.writing(copy) as made:
            (made / "manifest.json").write_text("new")
        assert (copy / "manifest.json").read_text() == "new" and listed(copy.parent) == [
            "copy",
            "copy/manifest.json",
        ]

    def test_folders_that_were_made_for_it_go_again(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        with pytest.raises(KeyboardInterrupt), folder.writing(tmp_path / "a/b/c/d"):
            raise KeyboardInterrupt
        assert listed(tmp_path) == ["a"]

    def test_what_cannot_be_written_to_is_told_before_the_work(
        self, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvcompile.targets.source.source_of", None)  # not called
        (tmp_path / "file").write_text("mine")
        (tmp_path / "loop").symlink_to("loop")
        for path, reason in (
            (tmp_path / "file/a/b", "file is a file"),
            (tmp_path / "loop", "loop|symbolic links"),
            (tmp_path / ("n" * 300), "too long"),
            ("nul\0", "expected the path of a folder"),
            (None, "expected the path of a folder"),
        ):
            with pytest.raises(ExportError, match=reason):
                kvcompile.export(model, path, "onnx")
        monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
        with pytest.raises(ExportError, match=r"/a cannot be written: .*, where a new folder is made"):
            kvcompile.export(model, tmp_path / "a", "onnx")
        assert listed(tmp_path) == ["file", "loop"]

    def test_a_disk_that_is_full_elsewhere_is_named(self, tmp_path: Path) -> None:
        elsewhere = OSError(errno.ENOSPC, "No space left on device", "/scratch/x.cpp")
        told = pytest.raises(ExportError, match=r"/a cannot be written: /scratch/x\.cpp: No space left")
        with told, folder.writing(tmp_path / "a"):
            raise elsewhere

    def test_a_tokenizer_on_a_full_disk(self, tmp_path: Path) -> None:
        class Rust:
            def save_pretrained(self, folder: Path) -> None:
                raise Exception("No space left on device (os error 28)")

        with pytest.raises(ExportError, match="tokenizer: Rust cannot be saved: No space left"):
            Source.write_tokenizer(Rust(), tmp_path)

    def test_others_may_read_what_was_written(self, tmp_path: Path) -> None:
        mask = os.umask(0o027)
        try:
            with folder.writing(tmp_path / "a") as made:
                (made / "code").mkdir(mode=0o700)
                (made / "code/x").touch(mode=0o600)
        finally:
            os.umask(mask)
        rights = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/code", "a/code/x")]
        assert rights == [0o750, 0o750, 0o640]

    def test_an_artifact_is_replaced(self, model: nn.Module, copy: Path) -> None:
        before = Manifest.read(copy).files
        kvcompile.export(model, copy, "onnx", recipe=RENAMED)
        assert Manifest.read(copy).recipe.name == "renamed"
        assert Manifest.read(copy).files["decode.onnx"] != before["decode.onnx"]
        folder.check(copy, Manifest.read(copy))
        assert [p.name for p in copy.parent.iterdir()] == ["copy"]

    def test_modules_that_run_as_python(self, tmp_path: Path) -> None:
        with pytest.raises(ExportError, match=r"experts.0 and 1 more run as Python"):
            kvcompile.export(routed(), tmp_path / "a", "onnx", recipe=small("baseline"))
        assert listed(tmp_path) == []

    def test_a_plain_module_that_counts_positions_itself(self, tmp_path: Path) -> None:
        plain = make(TinyLlama, TinyConfig(num_layers=1))
        manifest = kvcompile.export(plain, tmp_path / "a", "onnx", recipe=small("int8", verify="quick"))
        assert not manifest.ragged and len(manifest.checks) == 1
        session = Session(tmp_path / "a", threads=1)
        with pytest.raises(InputError, match="cannot start at different places"):
            session.prefill(torch.ones(2, 3, dtype=torch.int64), torch.tensor([[0, 1, 1], [1, 1, 1]]))


class TestDamage:
    def change(self, path: Path, **fields: Any) -> None:
        data = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(seal.sealed(data | fields)))

    def test_no_artifact(self, tmp_path: Path) -> None:
        with pytest.raises(ArtifactError, match=r"with a manifest.json, and there is none"):
            load(tmp_path / "nothing")

    def test_another_format(self, copy: Path) -> None:
        self.change(copy, format_version=99)
        with pytest.raises(ArtifactError, match="format version 99, and this kvcompile reads 1"):
            load(copy)
        (copy / "manifest.json").write_text("{")
        with pytest.raises(ArtifactError, match="cannot be read"):
            load(copy)
        (copy / "manifest.json").write_text("[" * 100_000)
        with pytest.raises(ArtifactError, match="cannot be read"):
            load(copy)

    def test_a_manifest_that_means_nothing(self, copy: Path) -> None:
        good = (copy / "manifest.json").read_text()
        data = json.loads(good)
        graph, rest = data["graphs"][0], data["graphs"][1:]
        first = data["caches"][0]
        enormous, negative = (first | {"shape": ["batch", size, size]} for size in (2**30, -1))
        odd = graph | {"inputs": [graph["inputs"][0] | {"dtype": "int65"}, *graph["inputs"][1:]]}
        for fields, message in (
            ({"format_version": 9, "versions": []}, "format version 9"),
            ({"graphs": []}, "graphs: there is none"),
            ({"graphs": [graph | {"file": "../prefill.onnx"}, *rest]}, "'../prefill.onnx' is not among"),
            ({"files": {"../x": {"bytes": 1, "sha256": ""}}}, "'../x' is not in this folder"),
            ({"files": {"/etc/hostname": {"bytes": 1, "sha256": ""}}}, "is not in this folder"),
            ({"tokenizer": "../tokenizer"}, "is not in this folder"),
            ({"graphs": [odd, *rest]}, "no dtype 'int65'"),
            ({"caches": data["caches"][1:]}, "caches: not those that prefill takes"),
            ({"limits": data["limits"] | {"max_tokens": 2**62}}, "limits.max_tokens is 4611686018427387904"),
            ({"limits": data["limits"] | {"max_batch": -1}}, "limits.max_batch is -1"),
            ({"slots": -8}, "slots is -8"),
            ({"caches": [enormous, *data["caches"][1:]]}, "has room nowhere"),
            ({"caches": [negative, *data["caches"][1:]]}, r"caches.0.shape.1.* is -1"),
            ({"model": data["model"] | {"vocab_size": 0}}, "model.vocab_size is 0"),
            ({"graphs": [graph | {"inputs": []}, *rest]}, "graphs.0.inputs"),
            ({"graphs": [graph | {"inputs": graph["inputs"][::-1]}, *rest]}, "is no input_ids"),
        ):
            (copy / "manifest.json").write_text(good)
            self.change(copy, **fields)
            with pytest.raises(ArtifactError, match=message):
                load(copy)
        (copy / "manifest.json").write_text("[]")
        with pytest.raises(ArtifactError, match="no manifest of kvcompile"):
            load(copy)

    def test_a_number_that_still_is_one(self, copy: Path) -> None:
        """7 slots are less than a text of 96 tokens has: the graphs would read the first 7, and say nothing."""
        good = (copy / "manifest.json").read_text()
        assert json.loads(good)["slots"] == 96
        data = json.loads(good)
        for wrong in (
            {**data, "slots": 7},
            {**data, "model": {**data["model"], "eos_token_ids": [3]}},
            seal.unsealed(data),
            {**data, seal.KEY: "0" * 64},
        ):
            (copy / "manifest.json").write_text(json.dumps(wrong))
            with pytest.raises(ArtifactError, match="edited by hand: its sha256 is not that of what it says"):
                load(copy)
        (copy / "manifest.json").write_text(json.dumps(dict(sorted(data.items()))))  # only written otherwise
        assert Manifest.read(copy) == Manifest.model_validate(data)

    def test_options_that_it_does_not_take(self, made: Path) -> None:
        for options, message in (
            (
                {"weights": None},
                "an artifact for onnx, is not opened with weights=: it takes providers, threads, check",
            ),
            ({"providers": "CPUExecutionProvider"}, "providers: expected a list of names"),
            ({"threads": "2"}, "threads: expected a whole number of at least 1, or None, got '2'"),
            ({"threads": 0}, "threads: expected a whole number"),
        ):
            with pytest.raises(ArtifactError, match=message):
                load(made, **options)

    @pytest.mark.parametrize("path", (None, 3, "~nobody-of-that-name/a"))
    def test_no_path(self, path: Any) -> None:
        with pytest.raises(ArtifactError, match="expected the path of a folder"):
            load(path)

    def test_a_folder_at_home(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(made.parent))
        assert load("~/artifact").path == Session("~/artifact").path == made

    def test_edited(self, copy: Path) -> None:
        self.change(copy, graphs=3)
        with pytest.raises(ArtifactError, match="damaged or edited by hand: graphs"):
            load(copy)

    def test_a_missing_file(self, copy: Path) -> None:
        (copy / "weights.bin").unlink()
        with pytest.raises(ArtifactError, match=r"weights.bin is missing"):
            load(copy)

    def test_a_truncated_file(self, copy: Path) -> None:
        data = (copy / "weights.bin").read_bytes()
        (copy / "weights.bin").write_bytes(data[:-100])
        with pytest.raises(ArtifactError, match="truncated"):
            load(copy, check=False)

    def test_a_flipped_bit(self, copy: Path) -> None:
        data = bytearray((copy / "weights.bin").read_bytes())
        data[len(data) // 2] ^= 1
        (copy / "weights.bin").write_bytes(data)
        with pytest.raises(ArtifactError, match="sha256"):
            load(copy)

    def test_a_graph_that_is_none(self, copy: Path) -> None:
        size = (copy / "decode.onnx").stat().st_size
        (copy / "decode.onnx").write_bytes(b"\7" * size)
        with pytest.raises(ArtifactError, match="ONNX Runtime cannot load it"):
            load(copy, check=False)

    def test_another_target(self, copy: Path) -> None:
        self.change(copy, target="aoti")
        with pytest.raises(ArtifactError, match="an artifact for aoti"):
            Session(copy)

    def test_another_provider(self, made: Path) -> None:
        with pytest.raises(ArtifactError, match=r"no QNNExecutionProvider; it has .*CPUExecutionProvider"):
            Session(made, providers=["QNNExecutionProvider"])

    def test_without_onnx_runtime(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
        with pytest.raises(ArtifactError, match="pip install onnxruntime"):
            Session(made)


class TestVerify:
    def test_the_model_that_it_was_made_of(self, made: Path, model: nn.Module) -> None:
        (outcome,) = verify_artifact(made, model)
        assert outcome.check is not None and outcome.check.tokens == 96  # the artifact's limit

    def test_another_model(self, made: Path) -> None:
        with pytest.raises(ArtifactError, match="of another model"):
            source_for(Manifest.read(made), tiny())

    def test_another_dtype(self, made: Path) -> None:
        with pytest.raises(ArtifactError, match="in float32, and the model in float16"):
            source_for(Manifest.read(made), tiny(torch.float16, layers=1))

    def test_another_plan(self, made: Path, model: nn.Module) -> None:
        manifest = Manifest.read(made)
        other = manifest.model_copy(update={"plan": manifest.plan.model_copy(update={"digest": "0" * 16})})
        with pytest.raises(ArtifactError, match="was made of plan 0000000000000000"):
            source_for(other, model)

    def test_another_wording(self, made: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reasons and source lines that are told otherwise leave an artifact what it is."""
        plan_for = pipeline.plan_for

        def reworded(front: Any, recipe: Any) -> Any:
            plan = plan_for(front, recipe)
            decisions = (
                replace(of, because=("the user says so",), source="other.py:1", kernels_because="it is quick")
                for of in plan.decisions
            )
            return replace(plan, decisions=tuple(decisions), notes=("noted",), step_because="asked for")

        monkeypatch.setattr(sys.modules["kvcompile.targets.source"], "plan_for", reworded)
        assert source_for(Manifest.read(made), model).plan.notes == ("noted",)
        (outcome,) = verify_artifact(made, model, chunks=(9, 1))
        assert outcome.check is not None

    def test_other_weights(self, made: Path) -> None:
        """The same shapes, other numbers; where the manifest does not tell, running does."""
        other = deepcopy(tiny(layers=1))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.01)
        with pytest.raises(ArtifactError, match="not this checkpoint: the artifact was made of"):
            verify_artifact(made, other)
        manifest = Manifest.read(made)
        untold = manifest.model_copy(update={"model": manifest.model.model_copy(update={"weights": None})})
        with pytest.raises(VerificationError, match="logits differ"):
            check_session(Session(made, threads=1), source_for(untold, other), (9, 1))

    def test_a_session_on_another_device(self, made: Path, model: nn.Module) -> None:
        source = source_for(Manifest.read(made), model)
        session = Session(made, threads=1)
        prefill = session.prefill

        class Elsewhere:
            """Nothing can be computed with it until it is where the oracle is."""

            def __init__(self, tensor: torch.Tensor):
                self.tensor = tensor

            def to(self, device: torch.device) -> torch.Tensor:
                assert device == torch.device("cpu")
                return self.tensor

        session.prefill = lambda *args, **options: Elsewhere(prefill(*args, **options))  # type: ignore[assignment]
        assert check_session(session, source, (9, 1)).tokens == 10


class TestSession:
    @pytest.fixture
    def session(self, made: Path) -> Session:
        return Session(made, threads=1)

    def ids(self, batch: int, tokens: int) -> torch.Tensor:
        return torch.randint(3, 61, (batch, tokens), generator=torch.Generator().manual_seed(tokens))

    def test_generates_what_the_module_does(self, session: Session, model: nn.Module) -> None:
        fast = kvcompile.optimize(model, small("int8"), compile={"mode": "none"})
        ids = self.ids(2, 9)
        wanted = fast.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=2)
        assert torch.equal(session.generate(ids, max_new_tokens=20), wanted)

    def test_ends(self, session: Session) -> None:
        ids = self.ids(1, 9)
        free = session.generate(ids, max_new_tokens=12, eos_token_id=())
        assert free.shape == (1, 21)
        end = int(free[0, 12])
        ended = session.generate(ids, max_new_tokens=12, eos_token_id=end)
        assert ended.shape[1] <= 13 and int(ended[0, -1]) == end

    def test_sampling_is_seeded(self, session: Session) -> None:
        def drawn(seed: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed)
            options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 30, "eos_token_id": ()}
            return session.generate(self.ids(1, 5), max_new_tokens=16, generator=generator, **options)

        assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))

    @pytest.mark.parametrize(
        ("bad", "message"),
        (
            (torch.zeros(2, 3), "torch.int64"),
            (torch.zeros(3, dtype=torch.int64), "expected an int64 tensor"),
            (torch.zeros(2, 1, dtype=torch.int64, device="meta"), "got one without"),
            (torch.nested.nested_tensor([torch.zeros(1, dtype=torch.int64)] * 2), "got a nested one"),
            (torch.full((2, 1), 61), "expected ids from 0 to 60"),
            (torch.full((2, 1), -1), "expected ids from 0 to 60"),
            (torch.zeros(3, 1, dtype=torch.int64), "keeps its size until reset"),
        ),
    )
    def test_bad_input_changes_nothing(self, session: Session, bad: torch.Tensor, message: str) -> None:
        ids = self.ids(2, 12)
        session.prefill(ids[:, :11])
        before = {name: x.clone() for name, x in session.cache.buffers.items()}
        with pytest.raises(InputError, match=message):
            session.prefill(bad)
        assert all(torch.equal(x, before[name]) for name, x in session.cache.buffers.items())
        after = session.decode(ids[:, 11:])
        session.reset()
        session.prefill(ids[:, :11])
        assert torch.equal(session.decode(ids[:, 11:]), after)

    @pytest.mark.parametrize(
        ("mask", "options", "message"),
        (
            (torch.tensor([[1] * 8 + [0], [1] * 9]), {}, "must stand on the left"),
            (torch.tensor([[0] * 9, [1] * 9]), {}, "row 0 is all padding"),
            (torch.ones(2, 3), {}, r"expected \[2, 9\]"),
            (torch.zeros(0, 9), {}, r"expected \[2, 9\]"),
            (None, {"do_sample": True, "temperature": float("nan")}, "temperature"),
            (None, {"eos_token_id": "end"}, "eos_token_id: expected a token id"),
            (None, {"eos_token_id": [2, 1.5]}, "eos_token_id: expected a token id"),
            (None, {"do_sample": True, "temperature": float("inf")}, "temperature"),
        ),
    )
    def test_what_generate_refuses_changes_nothing(
        self, session: Session, mask: torch.Tensor | None, options: dict[str, Any], message: str
    ) -> None:
        session.prefill(self.ids(2, 9))
        for _ in range(2):  # from a cache with tokens in it, and from one of another batch
            before = session.cache.columns, session.cache.seq_lens.tolist()
            with pytest.raises(InputError, match=message):
                session.generate(self.ids(2, 9), mask, max_new_tokens=4, **options)
            assert (session.cache.columns, session.cache.seq_lens.tolist()) == before
            session.reset()
            session.prefill(self.ids(1, 5))

    def test_no_temperature_is_too_low(self, session: Session) -> None:
        greedy = session.generate(self.ids(1, 9), max_new_tokens=8)
        for temperature in (1e-6, 1e-39, 1e-300):
            drawn = session.generate(
                self.ids(1, 9), max_new_tokens=8, do_sample=True, temperature=temperature
            )
            assert torch.equal(drawn, greedy)

    def test_no_memory_for_a_larger_batch(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        wanted = session.prefill(self.ids(2, 9))
        session.reset()

        def full(*args: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
            patched.setattr(torch, "zeros", full)
            session.prefill(self.ids(3, 9))
        assert torch.equal(session.prefill(self.ids(2, 9)), wanted)

    @pytest.mark.parametrize("keep", (-1, 1.5, "all", True))
    def test_a_count_that_is_none(self, session: Session, keep: Any) -> None:
        session.prefill(self.ids(2, 9))
        with pytest.raises(InputError, match="keep: expected a count of last tokens"):
            session.prefill(self.ids(2, 2), keep=keep)
        assert session.cache.columns == 9

    def test_a_call_that_did_not_end(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        """The graph has written, and nobody has noted it."""
        ids = self.ids(2, 12)
        wanted = session.prefill(ids)
        run = session._run

        def ending(*args: Any) -> None:
            run(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(session, "_run", ending)
            session.decode(ids[:, :1])
        with pytest.raises(InputError, match="the text in this cache is lost"):
            session.decode(ids[:, :1])
        session.reset()
        assert torch.equal(session.prefill(ids), wanted)

    def test_limits(self, session: Session) -> None:
        with pytest.raises(LimitError, match=r"runtime.max_batch is 4"):
            session.prefill(self.ids(5, 2))
        with pytest.raises(LimitError, match="max_tokens"):
            session.prefill(self.ids(1, 257))
        with pytest.raises(LimitError, match="max_tokens"):
            session.generate(self.ids(1, 200), max_new_tokens=100)
        with pytest.raises(InputError, match="prefill takes more"):
            session.decode(self.ids(1, 2))

    def test_caches_stay_where_they_are(self, session: Session) -> None:
        session.prefill(self.ids(2, 9))
        places = {name: x.data_ptr() for name, x in session.cache.buffers.items()}
        for token in range(3, 9):
            session.decode(torch.full((2, 1), token))
        assert {name: x.data_ptr() for name, x in session.cache.buffers.items()} == places
        assert session.report()["swapped"] == 0

    def test_a_text_needs_a_tokenizer(self, session: Session) -> None:
        with pytest.raises(InputError, match="has no tokenizer"):
            session.generate("hello", max_new_tokens=2)
        with pytest.raises(InputError, match="a prompt that is a text"):
            session.generate(self.ids(1, 2), max_new_tokens=2, streamer=print)
