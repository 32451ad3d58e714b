"""Every shipped recipe as ONNX on ONNX Runtime: a ragged prompt, a chunk and 30 decode steps against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import kvcompile
from kvcompile.errors import ArtifactError, ExportError, VerificationError
from kvcompile.recipe import Recipe
from kvcompile.targets.onnx.session import Session
from kvcompile.targets.source import Source
from kvcompile.targets.verify import CHUNKS, check_session
from tests.support.exports import SHIPPED, small, tiny, written
from tests.support.marks import cases

# What is in place in prefill and decode: nothing but writing reads the old values.
EVERY_STEP = {"baseline", "int8", "fp8", "int4", "nf4", "mxfp4", "paged", "paged_int8", "chat"}


# A ring with sinks; slots in order, scores, groups of tokens with bits, and windows are in the tests below.
QUICK = ("streaming_int8",)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Source]]:
    """The artifact of a recipe and what it was made of, written when it is first asked for."""

    @cache
    def made(recipe: str) -> tuple[Path, Source]:
        folder = tmp_path_factory.mktemp(recipe) / "out"
        return folder, written(tiny(layers=1), folder, "onnx", small(recipe))

    return made


@pytest.mark.parametrize("recipe", cases(SHIPPED, QUICK))
def test_shipped_recipes(recipe: str, shipped: Callable[[str], tuple[Path, Source]]) -> None:
    folder, source = shipped(recipe)
    for name in ("prefill", "decode"):
        onnx.checker.check_model(str(folder / f"{name}.onnx"), full_check=True)
    session = Session(folder, threads=1)
    check = check_session(session, source)
    assert check.tokens >= min(400, source.plan.limits.max_tokens or 400)  # all that such a cache holds
    in_place = {g.phase: [a.in_place for a in g.aliases] for g in session.manifest.graphs}
    assert all(in_place["prefill"]) == (recipe in EVERY_STEP)
    # Slots are never copied in a decode step. Scores change all over; first tokens kept in full are a few rows.
    kept = [a.in_place for a in session.manifest.graphs[1].aliases if a.input.endswith(("_data", "_scale"))]
    assert kept
    assert all(kept)


@pytest.mark.parametrize("recipe", cases(SHIPPED, ("h2o",)))
def test_shipped_recipes_in_half_precision(recipe: str, tmp_path: Path) -> None:
    one = small(recipe, max_batch=1)  # sequence; of several, TensorRT's graph of it is
    source = written(tiny(torch.float16, layers=1), tmp_path / "out", "onnx", one)
    session = Session(tmp_path / "out", threads=1)
    assert session.dtype == torch.float16
    check_session(session, source)


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "gemma2": ({"layers": 1}, "baseline"),  # softcap, a sliding window in a ring
    "gemma3": ({}, "int8"),
    "gpt_oss": ({"layers": 1}, "baseline"),  # sink logits, experts
    "bloom": ({"n_head": 4, "layers": 1}, "int8"),  # ALiBi
    "gpt2": ({"n_embd": 128, "n_head": 4, "layers": 1}, "h2o"),  # learned positions
    "gpt_neox": ({"layers": 1}, "kivi2"),
    "mistral": ({"layers": 1}, "chat"),  # a window behind pages
    "mixtral": ({"layers": 1}, "paged"),
}


@pytest.mark.slow  # quick are a softcap with groups of tokens, and a ring with sinks
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_attention(kind: str, tmp_path: Path) -> None:
    changes, recipe = KINDS[kind]
    source = written(tiny(kind=kind, **changes), tmp_path / "out", "onnx", small(recipe, max_tokens=256))
    check_session(Session(tmp_path / "out", threads=1), source)


@pytest.mark.slow  # its parts are quick where they are rounded
def test_rounded_values_of_many_forms(tmp_path: Path) -> None:
    """What no shipped recipe has: Hadamard, 3 bits, e5m2 without scales, keys before RoPE, first tokens in full."""
    recipe = Recipe.load(
        {
            "cache": {
                "keys": {"dtype": "int3", "group": 32, "rotate": "hadamard"},
                "values": {"dtype": "fp8_e5m2", "scale": "none"},
            },
            "layers": [
                {
                    "where": {"index": [1]},
                    "cache": {
                        "keys": {"dtype": "int8", "rope": "before"},
                        "values": {"dtype": "int4", "group": 32, "sinks": 2},
                    },
                }
            ],
            "runtime": {"max_tokens": 128, "max_batch": 3},
            "verify": "off",
        }
    )
    source = written(tiny(), tmp_path / "out", "onnx", recipe)
    check_session(Session(tmp_path / "out", threads=1), source)


@pytest.mark.parametrize(
    ("group", "tokens", "opset"),
    [
        (32, 40, 23),
        *(pytest.param(*sizes, 24, marks=pytest.mark.slow) for sizes in ((64, 256), (128, 256), (128, 512))),
    ],
)
def test_groups_of_tokens_of_any_size(group: int, tokens: int, opset: int, tmp_path: Path) -> None:
    """Also where one group holds all that was there when the graph was traced, or the cache has two groups; and in the
    opset for older parsers. Its scores have a softcap."""
    part = {"dtype": "int4", "axis": "channel", "group": group, "residual": group}
    recipe = Recipe.load(
        {"cache": {"keys": part}, "runtime": {"max_tokens": tokens, "max_batch": 3}, "verify": "off"}
    )
    model = tiny.__wrapped__(kind="gemma2", layers=1, layer_types=["full_attention"])
    source = written(model, tmp_path / "out", "onnx", recipe, opset=opset)
    for name in ("prefill", "decode"):
        onnx.checker.check_model(str(tmp_path / "out" / f"{name}.onnx"), full_check=True)
        own = onnx.load(tmp_path / "out" / f"{name}.onnx", load_external_data=False)
        assert {o.domain: o.version for o in own.opset_import}[""] == opset
    session = Session(tmp_path / "out", threads=1)
    most = tokens - 33
    for chunks in ((most, *(1 for _ in range(30))), (3, 1, 1, most - 5, 30)):
        assert check_session(session, source, chunks).tokens in (tokens - 3, tokens)


@pytest.mark.slow  # quick are h2o of one sequence, groups of tokens in that opset, and the manifest of int8
def test_a_cache_of_one_sequence_is_checked_with_one_in_the_opset_for_older_parsers(tmp_path: Path) -> None:
    """The newer opset is that of all other tests here, but for groups of tokens."""
    recipe = small("int8", max_batch=1, verify="thorough", compile={"mode": "none"})
    model = tiny(layers=1)
    manifest = kvcompile.export(model, tmp_path / "out", "onnx", recipe=recipe, options={"opset": 23})
    assert manifest.checks and manifest.limits.max_batch == 1
    decode = onnx.load(tmp_path / "out" / "decode.onnx", load_external_data=False)
    assert {o.domain: o.version for o in decode.opset_import}[""] == 23
    for name in ("prefill", "decode"):
        onnx.checker.check_model(str(tmp_path / "out" / f"{name}.onnx"), full_check=True)
    assert all(alias.in_place for graph in manifest.graphs for alias in graph.aliases)  # slots in order
    assert kvcompile.optimize(model, recipe).report["checks"][-1].name == "compiled program"


def test_a_cache_of_two_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"runtime\.max_tokens: expected more than 2"):
        kvcompile.export(tiny(layers=1), tmp_path / "out", "onnx", recipe=small("baseline", max_tokens=2))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # quick are TensorRT's bfloat16 of such a graph, and what is left where it cannot run
def test_bfloat16_is_written_and_left_for_others_to_run(tmp_path: Path) -> None:
    """ONNX Runtime has no products of bfloat16 on CPUs; the graph is valid, typed and says so."""
    recipe = small("baseline", verify="quick")
    manifest = kvcompile.export(tiny(torch.bfloat16, layers=1), tmp_path / "out", "onnx", recipe=recipe)
    assert manifest.checks == () and manifest.graphs[0].outputs[0].dtype == "bfloat16"
    onnx.checker.check_model(str(tmp_path / "out" / "decode.onnx"), full_check=True)
    with pytest.raises(ArtifactError, match="cannot load it"):
        Session(tmp_path / "out")


class TestFailsWhenBroken:
    """What the checks above are worth: the same comparison of sessions that do something else."""

    @pytest.fixture
    def artifact(self, shipped: Callable[[str], tuple[Path, Source]]) -> Any:
        return shipped("streaming_int8")

    def test_positions_off_by_one(self, artifact: Any) -> None:
        session = Session(artifact[0], threads=1)
        run = session._run

        def later(graph: Any, inputs: Any, outputs: Any) -> None:
            run(
                graph,
                inputs | {"positions": inputs["positions"] + (inputs["seq_lens"] > 20).long()[:, None]},
                outputs,
            )

        session._run = later  # type: ignore[method-assign]
        with pytest.raises(VerificationError, match="ONNX Runtime"):
            check_session(session, artifact[1], CHUNKS)

    def test_a_place_that_is_not_swapped(self, artifact: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        session = Session(artifact[0], threads=1)
        graphs = tuple(
            g.model_copy(
                update={"aliases": tuple(a.model_copy(update={"in_place": True}) for a in g.aliases)}
            )
            for g in session.manifest.graphs
        )
        session.manifest = session.manifest.model_copy(update={"graphs": graphs})
        # One address for both, though the old slots are read by what comes after: whether that is wrong is up to the
        # order of nodes; a value that is never taken over certainly is.
        monkeypatch.setattr(session, "_run", _forgetting(session))
        with pytest.raises(VerificationError):
            check_session(session, artifact[1], CHUNKS)


def _forgetting(session: Session) -> Any:
    run = session._run

    def forget(graph: Any, inputs: Any, outputs: Any) -> None:
        run(graph, inputs, {n: t if n == "logits" else torch.empty_like(t) for n, t in outputs.items()})

    return forget
