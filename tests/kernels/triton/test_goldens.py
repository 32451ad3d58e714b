"""The text of generated kernels, byte for byte: tests/goldens/<name>.py. What changes them shows in a review.

After a change that is meant: KVCOMPILE_ACCEPT=1 pytest tests/kernels/triton/test_goldens.py, and look at the diff.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcompile.kernels.triton.append import append
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.host.launches import for_hardware
from kvcompile.kernels.triton.host.linear import form
from kvcompile.kernels.triton.linear.norm import NormForm
from kvcompile.kernels.triton.render import header
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import CacheLayout
from tests.support.kernel_specs import H200, HALF, SHAPES, cache, spec

FOLDER = Path(__file__).parents[2] / "goldens"
INT8 = {"dtype": "int8"}
INT4 = {"dtype": "int4", "group": 32}
KIVI = {
    "keys": {"dtype": "int4", "axis": "channel", "group": 32, "residual": 128},
    "values": {"dtype": "int4", "group": 32, "residual": 128},
}
H2O = {"kind": "h2o", "sinks": 4, "heavy": 508, "recent": 512}
SINK_WINDOW = {"kind": "sink_window", "sinks": 4, "window": 1020}
QUEST = {"kind": "top_pages", "page_size": 16, "pages": 64, "dense_layers": 0}
PAGES_OF_64 = {"placement": {"kind": "paged", "page_size": 64}}


def launched(
    role: str, layout: CacheLayout, shape: str = "llama", tokens: int = 1
) -> Callable[[], tuple[KernelSpec, None]]:
    """The first kernel of that role that a site launches, when it is asked for: a launch generates its kernels."""

    def first() -> tuple[KernelSpec, None]:
        found = SHAPES[shape].kernels(layout, H200, tokens)
        return next(launch.spec for launch in found if launch.spec.role == role), None

    return first


def linear(columns: int, rows: tuple[int, ...], layers: int, **how: Any) -> tuple[KernelSpec, None]:
    """The kernel of linear layers of one token, as an H200 has it."""
    own, _ = form(columns, rows, layers, torch.bfloat16, H200, **how)
    return for_hardware(own), None


def several(own: KernelSpec) -> tuple[KernelSpec, None]:
    """An append of one token of many sequences, whose programs take several heads."""
    return replace(own, block_n=append.heads(own.head_dim, own.v_head_dim)), None


GOLDENS: dict[str, tuple[KernelSpec, Any] | Callable[[], tuple[KernelSpec, None]]] = {
    "linear_qkv_bias": linear(3584, (3584, 512, 512), 3, biased=True),
    "linear_gate_silu_normed": linear(4096, (14336,), 2, activation="silu", norm=NormForm(1e-5)),
    "linear_qkv_bias_layer_normed": linear(
        3072,
        (3072, 256, 256),
        3,
        biased=True,
        norm=NormForm(1e-5, layer=True, words=frozenset({"shift"})),
    ),
    "linear_gate_gelu_normed_from_one": linear(
        2304, (9216,), 2, activation="gelu_tanh", norm=NormForm(1e-6, words=frozenset({"wide", "one"}))
    ),
    "linear_router_normed_kept": linear(4096, (64,), 1, norm=NormForm(1e-5), kept=True),
    "linear_gelu": linear(2560, (10240,), 1, biased=True, activation="gelu"),
    "linear_part_added_twice": linear(4096, (4096,), 1, added=2, factor=0.22),
    "linear_added": linear(4096, (4096,), 1, added=1),
    "linear_in_turns": linear(53248, (16384,), 1),
    "decode_bf16": spec("decode", cache()),
    "decode_int8_pages_of_64": launched("decode", cache(keys=INT8, values=INT8, **PAGES_OF_64)),
    "decode_fp8_softcap_pages_of_16": spec(
        "decode",
        cache(
            keys={"dtype": "fp8_e4m3"},
            values={"dtype": "fp8_e4m3"},
            placement={"kind": "paged", "page_size": 16},
        ),
        "gemma",
    ),
    "decode_int4": spec("decode", cache(keys=INT4, values=INT4)),
    "decode_int4_pages_of_16": spec(
        "decode", cache(keys=INT4, values=INT4, placement={"kind": "paged", "page_size": 16})
    ),
    "decode_kivi4": spec("decode", cache(**KIVI)),
    "decode_streaming_in_cache": launched("decode", cache(retention=SINK_WINDOW | {"positions": "in_cache"})),
    "decode_h2o": spec("decode", cache(retention=H2O), "smollm2", "logits"),
    "decode_h2o_scored": launched("decode", cache(retention=H2O)),
    "decode_streaming_alibi": spec("decode", cache(retention=SINK_WINDOW), "alibi"),
    "decode_latent": spec("decode", cache(), "mla"),
    "decode_quest": launched("decode", cache(selection=QUEST)),
    "decode_quest_pages_of_64": launched(
        "decode",
        cache(keys=INT8, values=INT8, selection=QUEST | {"page_size": 64, "pages": 16}, **PAGES_OF_64),
    ),
    "page_bounds_quest": launched("page_bounds", cache(selection=QUEST)),
    "combine": spec("combine", cache()),
    "combine_listed": launched("combine", cache(**KIVI)),
    "combine_latent": launched("combine", cache(), "mla"),
    "combine_lse_sinks_hadamard": spec(
        "combine", cache(values=INT8 | {"rotate": "hadamard"}), "sinks", "lse"
    ),
    "prefill_bf16": spec("prefill", cache()),
    "prefill_int8_older": launched("prefill", cache(keys=INT8, values=INT8), tokens=64),
    "decoded_rows_int4": launched("decoded_rows", cache(keys=INT4, values=INT4), tokens=128),
    "prefill_older_rows": launched("prefill", cache(keys=INT8, values=INT8), tokens=128),
    "prefill_continued": spec("prefill", cache(), "sinks", "continued", "new"),
    "prefill_streaming_int8": spec(
        "prefill", cache(keys=INT8, values=INT8, retention=SINK_WINDOW), "llama", "new"
    ),
    "prefill_kivi4": spec("prefill", cache(**KIVI)),
    "prefill_h2o_int8": launched("prefill", cache(keys=INT8, values=INT8, retention=H2O), tokens=64),
    "append_int8_rope": spec(
        "append", cache(keys=INT8, values=INT8), "llama", "one", "rope", "q_out", rotary=HALF
    ),
    "append_int8_rope_many_heads": several(
        spec("append", cache(keys=INT8, values=INT8), "llama", "one", "rope", "q_out", rotary=HALF)[0]
    ),
    "append_int4_pages_of_16": spec(
        "append", cache(keys=INT4, values=INT4, placement={"kind": "paged", "page_size": 16})
    ),
    "append_int8_pages_of_64": launched("append", cache(keys=INT8, values=INT8, **PAGES_OF_64)),
    "append_h2o": launched("append", cache(retention=H2O), "smollm2"),
    "append_h2o_layer_int8_pages_of_64": launched(
        "append", cache(keys=INT8, values=INT8, retention=H2O | {"granularity": "layer"}, **PAGES_OF_64)
    ),
    "append_streaming_in_cache": launched("append", cache(retention=SINK_WINDOW | {"positions": "in_cache"})),
    "group_kivi4": launched("group", cache(**KIVI)),
    "group_kivi4_pages_of_64_many": launched("group", cache(**KIVI, **PAGES_OF_64), tokens=64),
    "columns_h2o": launched("columns", cache(retention=H2O), tokens=64),
    "score_h2o_layer_int8": launched(
        "score", cache(keys=INT8, values=INT8, retention=H2O | {"granularity": "layer"})
    ),
}


@lru_cache
def golden(name: str) -> KernelSpec:
    made = GOLDENS[name]
    return (made() if callable(made) else made)[0]


@pytest.mark.parametrize("name", GOLDENS)
def test_the_text_is_as_accepted(name: str) -> None:
    asked = golden(name)
    text = f"{header(asked, versions=False)}\n{generate(asked).text}"
    path = FOLDER / f"{name}.py"
    if os.environ.get("KVCOMPILE_ACCEPT"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    accepted = path.read_text("utf-8") if path.exists() else ""
    diff = "".join(
        difflib.unified_diff(
            accepted.splitlines(keepends=True), text.splitlines(keepends=True), f"goldens/{name}.py", "now"
        )
    )
    if diff:
        pytest.fail(f"{name} has changed; KVCOMPILE_ACCEPT=1 accepts it:\n{diff[:20000]}", pytrace=False)


def test_there_are_no_others() -> None:
    stale = {path for path in FOLDER.glob("*.py") if path.stem not in GOLDENS}
    if os.environ.get("KVCOMPILE_ACCEPT"):
        for path in stale:
            path.unlink()
    assert not {path.name for path in stale if path.exists()}


@pytest.mark.parametrize("name", GOLDENS)
def test_the_text_is_tidy(name: str) -> None:
    """One function, no line that only steers a template, no blank ends, nothing beyond a screen's width twice."""
    text = generate(golden(name)).text
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert functions[-1].name == generate(golden(name)).name
    lines = text.splitlines()
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert not [line for line in lines if line != line.rstrip() or "{%" in line or "{{" in line]
    assert max(map(len, lines)) <= 220
    assert "\n\n\n\n" not in text


# Blocks that a loop loads of keys and values, and what is made of them.
TILES = re.compile(r"[kv]\d+|[kv]_(words|bytes|scale|minimum)\w*")


@pytest.mark.parametrize("name", [name for name in GOLDENS if name.startswith(("decode_", "prefill"))])
def test_branches_of_loops_that_are_pipelined_read_no_tile(name: str) -> None:
    """Some releases of Triton copy a tile over one that a branch of the turn before still reads (triton PR 8139).

    What a branch may do is to scale sums down, and to read what stands in full, of which it loads all itself;
    `ttgir.overtaken` looks at the machine's form of all kernels besides.
    """
    loops = [node for node in ast.walk(ast.parse(generate(golden(name)).text)) if isinstance(node, ast.For)]
    assert loops
    for branch in (inner for loop in loops for inner in ast.walk(loop) if isinstance(inner, ast.If)):
        names = [node for node in ast.walk(branch) if isinstance(node, ast.Name)]
        own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        read = {node.id for node in names} - own
        assert not {name for name in read if TILES.fullmatch(name)}, ast.unparse(branch)
