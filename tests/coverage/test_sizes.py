"""Coverage tests every size on both sides: all names of sizes are known, and one side alone is noticed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import tests.coverage.check as harness
from tests.coverage.__main__ import DOCS
from tests.coverage.check import Row, check_type
from tests.coverage.configs import PARTS, SIZES, Sizes, all_types, tiny_config, tiny_model
from tests.coverage.original import original, text
from tests.coverage.settings import Setting, settings
from tests.coverage.sizes import (
    ABOVE,
    BELOW,
    LONGEST,
    PIECES,
    SEEN,
    TABLES,
    TEXT,
    Tried,
    lengths,
    one_sided,
    told,
)
from tests.support.marks import cases

# Names that sound like a size of what a token sees, of pieces or of a table.
_SOUNDS = re.compile(
    r"window|chunk|top_?k|extent|floor|budget|bucket|distance|block_size|span|positions?|context|ctx|local_(?!experts)|_len(gth)?$"
)
# What sounds like one and is none, and why.
NO_SIZES = {
    "audio_chunk_size": "samples of audio",
    "centroid_intermediate_top_k": "centroids of words",
    "chroma_length": "frames of a melody",
    "chunk_size_feed_forward": "splits the MLP, whose tokens do not meet",
    "chunk_size_lm_head": "splits the head, whose tokens do not meet",
    "image_seq_length": "tokens of an image",
    "index_block_size": "what index_topk_blocks counts",
    "index_local_blocks": "blocks that are always chosen",
    "local_num_chunks_after": "reformer has no attention that sees the present",
    "local_num_chunks_before": "reformer",
    "local_attn_chunk_length": "reformer",
    "clamp_len": "xlnet is refused whatever it is",
    "lsh_attn_chunk_length": "reformer",
    "lsh_num_chunks_after": "reformer",
    "lsh_num_chunks_before": "reformer",
    "mask_feature_length": "of audio in training",
    "mask_time_length": "of audio in training",
    "max_inference_chunksize": "xlstm has no attention",
    "max_window_layers": "layers",
    "mem_len": "xlnet is refused whatever it is",
    "moe_topk": "experts",
    "num_buckets": "prophetnet is refused whatever they are",
    "relative_max_distance": "prophetnet is refused whatever it is",
    "position_bias_max_distance": "cpmant is refused whatever it is",
    "position_bias_num_buckets": "cpmant is refused whatever they are",
    "prefix_dense_sliding_window_pattern": "layers",
    "prompt_length": "tokens of a prompt of the model's own",
    "sliding_window_pattern": "layers",
    "_sliding_window_pattern": "layers",
    "topk_group": "experts",
}
# Types whose config has a size of what a token sees that changes nothing, and why.
WITHOUT_EFFECT = {
    ("minimax_m3_vl_text", "index_topk_blocks"): "by default it has no indexer; `MORE` has one",
    ("modernbert-decoder", "local_attention"): "sliding_window is made of it where that is not given",
    ("moshi", "sliding_window"): "its code does not read it",
    ("qwen2_moe", "sliding_window"): "it is off by default",
}


def test_names_of_sizes_are_known() -> None:
    """A size that a later release calls otherwise must be given a place, or it is tested on one side only."""
    known = {*SEEN, *PIECES, *TABLES, *NO_SIZES}
    named = {
        name for model_type in all_types() for name in _numbers(_defaults(model_type)) if _SOUNDS.search(name)
    }
    assert named <= known, f"no side of {named - known} is tested; see tests/coverage/sizes.py"
    assert {*NO_SIZES} <= named, f"no config has { ({*NO_SIZES} - named) }"


def test_the_table_has_both_sides() -> None:
    rows = [Row(**row) for row in json.loads((DOCS / "coverage.json").read_text())["rows"]]
    without = set()
    for row in (row for row in rows if row.outcome == "verified"):
        assert row.tested, f"{row.type} was tested before both sides were; run python -m tests.coverage"
        assert not one_sided(row.tested), f"{row.type}: {one_sided(row.tested)}"
        sizes = Sizes(SIZES)
        tiny_config(row.type, sizes)
        tested = {name for setting in row.tested if not setting["name"] for name in setting["sizes"]}
        without |= {(row.type, name) for name in sizes.used & {*SEEN} if name not in tested}
        if {"sliding", "chunked"} & {mask.split("(")[0] for mask in row.masks}:
            assert tested & {*SEEN}, f"{row.type} has {row.masks}, and no size of it is known"
    assert without == {*WITHOUT_EFFECT}


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("llama", set()),
        ("mistral", {"sliding_window"}),
        ("llama4_text", {"attention_chunk_size", "floor_scale"}),
        ("deepseek_v32", {"index_topk"}),
        ("inkling_text", {"rel_extent", "sliding_window_size"}),
        ("ministral3", {"llama_4_scaling"}),
        ("minimax", {"block_size"}),
        ("qwen2", {"sliding_window"}),
    ],
)
def test_sizes_with_an_effect(model_type: str, names: set[str]) -> None:
    """Each is below the text in one configuration and above it in the next, but for those of pieces."""
    found = settings(model_type)
    assert {name for setting in found for name in setting.sizes} == names
    for name in names:
        sizes = [setting.sizes[name] for setting in found if name in setting.sizes]
        assert sizes == ([BELOW] if name in PIECES else [BELOW, ABOVE])


def tried(**sizes: int) -> Tried:
    return Tried(name="", sizes=sizes, texts=lengths(sizes.values()), end=None, limit=None)


def test_both_sides_are_enough() -> None:
    assert not one_sided([tried()])
    assert not one_sided([tried(sliding_window=BELOW), tried(sliding_window=ABOVE)])
    assert not one_sided([tried(chunk_size=BELOW)])
    ended: Tried = {**tried(), "texts": [TEXT, 79, 80], "end": 80, "limit": 80}
    assert not one_sided([ended])
    assert told([ended]) == "positions end at 80"
    assert told([tried(index_topk=8), tried(index_topk=64)]) == "index_topk 8, 64"


def _without(setting: Tried, *texts: int) -> Tried:
    return {**setting, "texts": [n for n in setting["texts"] if n not in texts]}


BOTH = [tried(index_topk=BELOW), tried(index_topk=ABOVE)]
ONE_SIDED: dict[str, tuple[list[Tried], str]] = {
    "below": (BOTH[:1], "index_topk was 8 with texts of 27 tokens"),
    "above": (BOTH[1:], "index_topk was 64 with texts of 27 tokens"),
    "no shorter text": ([_without(BOTH[0], 7), BOTH[1]], "index_topk was 8, and texts ended at 8, 9, 27"),
    "no text as long": ([BOTH[0], _without(BOTH[1], 64)], "index_topk was 64, and texts ended at 27, 63, 65"),
    "no longer text": ([BOTH[0], _without(BOTH[1], 65)], "index_topk was 64, and texts ended at 27, 63, 64"),
    "pieces": ([_without(tried(chunk_size=8), 9)], "chunk_size was 8, and texts ended at 7, 8, 27"),
    "the end": (
        [{**tried(), "texts": [27, 79], "end": 80}],
        "texts may have 80 tokens, and ended at 27, 79 only",
    ),
    "the limit": ([{**tried(), "limit": 50}], "texts may have 50 tokens, and ended at 27, 79, 80, 81 only"),
}


@pytest.mark.parametrize("case", ONE_SIDED)
def test_one_side_is_noticed(case: str) -> None:
    made, problem = ONE_SIDED[case]
    assert [found for found in one_sided(made) if problem in found]


@pytest.mark.few(2)
@pytest.mark.parametrize("side", [0, 1])
def test_a_type_that_is_tested_on_one_side_is_noticed(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "settings", lambda *args: [settings(*args)[side]])
    row = check_type("mistral", ("baseline",))
    assert row.outcome == "verified"
    assert one_sided(row.tested) == [
        f"sliding_window was {(BELOW, ABOVE)[side]} with texts of 27 tokens: one side only"
    ]


def test_both_sides_of_a_type() -> None:
    row = check_type("mistral", ("baseline",))
    assert row.outcome == "verified" and not one_sided(row.tested)
    assert [setting["sizes"] for setting in row.tested] == [
        {"sliding_window": BELOW},
        {"sliding_window": ABOVE},
    ]
    assert [setting["texts"] for setting in row.tested] == [
        [7, 8, 9, 27, 79, 80, 81],
        [27, 63, 64, 65, 79, 80, 81],
    ]


class Toy(nn.Module):
    """logits [B, S, 61] of each token alone, by what `values` makes of its position and the number of tokens."""

    def __init__(self, values: Callable[[Tensor, int], Tensor]):
        super().__init__()
        self.values = values

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutput:
        positions = torch.arange(input_ids.shape[1])
        found = input_ids + self.values(positions, len(positions))
        return CausalLMOutput(logits=nn.functional.one_hot(found % 61, 61).float())


def table(positions: Tensor, count: int) -> Tensor:
    return torch.arange(50)[positions]


def turns(positions: Tensor, count: int) -> Tensor:
    return positions * (1 if count <= 33 else 2)


@pytest.mark.parametrize(
    ("values", "end", "fails"),
    [(lambda p, n: p, None, False), (table, 50, True), (turns, 33, False), (lambda p, n: n - p, 7, False)],
)
def test_where_the_original_ends(
    values: Callable[[Tensor, int], Tensor], end: int | None, fails: bool
) -> None:
    found = original(Toy(values), text(), lengths([BELOW]))
    assert (found.end, found.fails) == (end, fails)
    longest = end or LONGEST
    assert max(found.logits) == longest and ({longest - 1, longest} <= {*found.logits} or end == 7)


@pytest.mark.parametrize("model_type", cases(("gpt2", "roberta", "phi3"), ("gpt2", "roberta")))
def test_an_end_that_is_overlooked_is_noticed(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that are weights (gpt2), counted positions (roberta), rotary tables that turn (phi3 with longrope)."""
    import kvcompile.pipeline
    from kvcompile.passes.detect.detect import detect

    row = check_type(model_type, ("baseline",))
    assert row.outcome == "verified"
    end = row.tested[-1]["end"]
    assert end == row.tested[-1]["limit"] and end is not None and {end - 1, end} <= {*row.tested[-1]["texts"]}
    monkeypatch.setattr(
        kvcompile.pipeline, "detect", lambda *args, **kwargs: replace(detect(*args, **kwargs), limit=None)
    )
    row = check_type(model_type, ("baseline",))
    assert row.outcome == "wrong" and f"{end + 1} tokens may be asked for" in row.reason


def test_a_table_that_is_no_weight_may_be_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPT makes as many slopes as it is told to, so what comes after the end is known; other logits are noticed."""
    assert settings("gpt2")[0].longer() is None
    row = check_type("mpt", ("baseline",))
    assert (row.outcome, row.tested[0]["end"], row.tested[0]["limit"]) == ("verified", 80, None)

    def other(self: Setting) -> nn.Module:
        return tiny_model("mpt", sizes=Sizes(SIZES | {"max_seq_len": 160, "n_heads": 3}))

    monkeypatch.setattr(Setting, "longer", other)
    row = check_type("mpt", ("baseline",))
    assert row.outcome == "wrong" and "beyond the 80 tokens" in row.reason


def _defaults(model_type: str) -> Mapping[str, Any]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        found: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
    except Exception:  # a type that cannot be built from its defaults
        return {}
    return found


def _numbers(config: Mapping[str, Any]) -> Iterator[str]:
    """Names of integers, also of the parts that carry the decoder."""
    for name, value in config.items():
        if isinstance(value, dict) and name in PARTS:
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name
