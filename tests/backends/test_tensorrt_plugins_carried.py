"""Plugins of sites that carry an expression of their scores: its tables are inputs, of the sizes that were said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvcompile.backends.tensorrt_plugins import ptx, qdp, wrapper
from kvcompile.backends.tensorrt_plugins.description import Plugin, plugin_of
from kvcompile.backends.tensorrt_plugins.launched import launched
from kvcompile.errors import KernelError
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import attention as reference
from kvcompile.specs import ScoreSpec
from tests.backends.test_tensorrt_plugins import attended, stub, tensors
from tests.support import carried_scores as scores
from tests.support.budget import within
from tests.support.carried_scores import Carried
from tests.support.kernel_specs import DEVICES
from tests.support.tensorrt_plugins import (
    LAYOUTS,
    LIMIT,
    Desc,
    Frontend,
    Number,
    plugins,
    run,
    shape,
    tensorrt,
)
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CARRIED: dict[str, Callable[[], Carried]] = {
    "no table": scores.dilated,
    "integers by head": lambda: scores.windows(4),
    "weights by bucket and head": lambda: scores.buckets(4),
}


def tables(plugin: Plugin) -> dict[str, list[str]]:
    return {t.name: [str(size) for size in t.shape] for t in plugin.inputs if t.name.startswith("leaf")}


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize(("layout", "tokens"), [("contiguous", 1), ("contiguous", 9), ("paged int8", 1)])
def test_a_chain_of_plugins_is_the_op(name: str, layout: str, tokens: int, tmp_path: Path) -> None:
    """As without an expression; the tables are smaller than the room of a sequence, and not square."""
    carried = CARRIED[name]()
    past = torch.tensor([17, 4])
    own = tensors(layout, 2, tokens, past)
    first, *rest = plugins(layout, tokens == 1, "float32", carried=carried)
    written = [t.aliases for t in first.outputs if t.aliases]
    given = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    given |= {f"leaf{number}": leaf for number, leaf in enumerate(carried.leaves)}
    given |= dict(zip(written, own["buffers"], strict=True))
    outs = run(first, given, tmp_path)
    given = {**given, **{part: outs[f"{part}_kept"] for part in written}, "q": outs["q_out"]}
    for plugin in rest:
        given |= run(plugin, given, tmp_path)

    buffers, site = [buffer.clone() for buffer in own["buffers"]], first.spec.site
    args = own["q"], own["k"], own["v"], buffers, own["positions"], past, [own["cos"], own["sin"]], LIMIT
    leaves = list(carried.leaves)
    want = reference.cached_attention(AttendInputs(*args, site, leaves=leaves, page_table=own["page_table"]))
    within(given["out"], want, attended(own, buffers, site, past, carried), torch.float32)


def test_tables_are_inputs_of_their_own_sizes() -> None:
    append, decode, combine = plugins("contiguous", one=True, carried=scores.buckets(4))
    assert tables(decode) == {"leaf0": ["8", "4"]} and tables(append) == tables(combine) == {}
    assert dict(decode.constants)["leaf0_n0"] == 8 and dict(decode.constants)["leaf0_n1"] == 4
    larger = replace(scores.buckets(4), leaves=(torch.zeros(16, 4),))
    other = plugins("contiguous", one=True, carried=larger)[1]
    assert other.name != decode.name and other.spec == decode.spec


def test_a_network_with_another_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trt, frontend = tensorrt(), Frontend()
    monkeypatch.setitem(sys.modules, f"{trt.__name__}.plugin", frontend)  # type: ignore[arg-type]
    decode = plugins("contiguous", one=True, carried=scores.buckets(4))[1]
    definition = qdp.register(decode, stub(decode), trt)

    def descs(rows: int) -> list[Desc]:
        shapes = [
            (rows, 4) if t.name == "leaf0" else tuple(3 if not s.is_number else int(s) for s in t.shape)
            for t in decode.inputs
        ]
        return [Desc(tuple(map(Number, sizes)), None) for sizes in shapes]

    definition["register"](*descs(8))
    with pytest.raises(KernelError, match=r"dimension 0 of leaf0 is ShapeExpr\[16\].*compiled for 8"):
        definition["register"](*descs(16))


REFUSED: dict[str, tuple[Carried, list[tuple[int, ...]] | None, str]] = {
    "no sizes": (scores.buckets(4), [], r"its scores read 1 tables, and the shapes of 0 are known"),
    "another rank": (scores.buckets(4), [(8,)], r"table 0 has the shape \[8\], and is read by 2 places"),
    "truth values": (
        scores.stacked(),
        None,
        r"leaf1 is torch\.uint8 \(truth values or bytes\), which TensorRT's plugins do not take",
    ),
    "activations": (
        replace(scores.windows(4), mod=replace(scores.windows(4).mod, leaves=("key",))),
        None,
        r"computed from activations \(for every token\), and kernels read weights alone",
    ),
    "weights of probabilities": (
        replace(scores.dilated(), mod=replace(scores.dilated().mod, weight=0)),
        None,
        "weighed once more",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_as_a_plugin_is_refused(name: str) -> None:
    carried, shapes, reason = REFUSED[name]
    own = shape("float32")
    site = replace(own.site(LAYOUTS["contiguous"]), score=ScoreSpec(mod=carried.mod))
    given = [tuple(leaf.shape) for leaf in carried.leaves] if shapes is None else shapes
    with pytest.raises(KernelError, match=reason):
        for launch in launched(
            site, own.heads, own.dims, torch.float32, DEVICES[90], LIMIT, True, leaves=given
        ):
            plugin_of(launch)


@pytest.mark.slow
def test_ptx_takes_the_tables() -> None:
    decode = plugins("contiguous", one=True, carried=scores.buckets(4))[1]
    (made,) = ptx.assembled([decode], 89)
    entry = made.code[made.code.index(".visible .entry") : made.code.index("\n)\n")]
    assert entry.count(".param .u64") == sum(name.endswith("_ptr") for name in wrapper.arguments(decode))
    assert "leaf0_ptr" in wrapper.arguments(decode)
