"""Generated kernels as TensorRT plugins: their arguments, grids and outputs against the launches themselves, their
numbers against the reference, their PTX for GPUs that are not there, and their registration."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvcompile.backends.tensorrt_plugins import ptx, qdp, wrapper
from kvcompile.backends.tensorrt_plugins.description import Plugin, plugin_of
from kvcompile.backends.tensorrt_plugins.launched import launched
from kvcompile.backends.tensorrt_plugins.ptx import Ptx
from kvcompile.errors import KernelError
from kvcompile.kernels.inputs import AttendInputs
from kvcompile.kernels.reference import attention as reference
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.append import append as append_role
from kvcompile.kernels.triton.attend.cascade import alone
from kvcompile.kernels.triton.attend.work_list import joined_apart
from kvcompile.kernels.triton.device import acting_as
from kvcompile.kernels.triton.host.launch import Recorded, arguments, recording
from kvcompile.kernels.triton.host.launches import call
from kvcompile.kernels.triton.params import TensorParam
from kvcompile.layouts import CacheLayout
from tests.support import reference_cache
from tests.support.budget import within
from tests.support.carried_scores import Carried
from tests.support.kernel_specs import DEVICES, cache, recipe_layouts
from tests.support.tensorrt_plugins import (
    LAYOUTS,
    LIMIT,
    Desc,
    Frontend,
    Number,
    number,
    plugins,
    run,
    shape,
    sizes,
    tensorrt,
)
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

PAGES = 23


def real(layout: str, batch: int, tokens: int) -> list[Recorded]:
    """The launches of a call with these sizes, where append takes as many heads a program as for any batch."""
    own = shape("bfloat16")
    with (
        patch.object(append_role, "PLACES", 0),
        joined_apart(),
        alone(),
        recording() as found,
        acting_as(DEVICES[90]),
        FakeTensorMode(),
        torch.no_grad(),
    ):
        call(own.site(LAYOUTS[layout]), own.heads, own.dims, torch.bfloat16, LIMIT, batch, tokens, PAGES)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("batch", "tokens"), [(3, 1), (2, 7), (5, 61)])
def test_what_a_plugin_is_told_is_what_a_launch_is_told(layout: str, batch: int, tokens: int) -> None:
    """Strides, sizes and grids are symbolic in the one and those of tensors in the other."""
    made, launches = plugins(layout, tokens == 1), real(layout, batch, tokens)
    assert [p.spec.role for p in made] == [one.kernel.spec.role for one in launches]
    for plugin, one in zip(made, launches, strict=True):
        known = sizes(plugin, [tuple(one.tensors[tensor.name].shape) for tensor in plugin.inputs])
        grid = [number(size, known) for size in plugin.grid]
        assert grid == [*one.grid, 1, 1][:3]
        told = dict(plugin.constants) | {name: number(value, known) for name, value in plugin.scalars}
        want = arguments(one.kernel, one.tensors, one.sizes)
        assert told == {name: int(v) for name, v in want.items() if not isinstance(v, Tensor)}
        for tensor in plugin.outputs:
            actual = one.tensors[tensor.aliases or tensor.name]
            assert [number(size, known) for size in tensor.shape] == [*actual.shape]
        assert (plugin.num_warps, plugin.num_stages) == (one.num_warps, one.num_stages)


def test_the_parts_of_the_cache_are_aliased_where_they_are_written() -> None:
    append, decode, combine = plugins("paged int8", one=True)
    parts = ["keys_data", "keys_scale", "values_data", "values_scale"]
    assert append.aliases == {f"{part}_kept": part for part in parts}
    assert decode.aliases == combine.aliases == {}
    assert [t.name for t in append.outputs] == ["q_out", *(f"{part}_kept" for part in parts)]
    assert [t.name for t in decode.outputs] == ["partial", "sums", "spans"]
    assert append.to_json()["outputs"][1]["aliases"] == "keys_data"  # type: ignore[index]


def test_arguments_stand_as_tensorrt_orders_them() -> None:
    append, prefill = plugins("contiguous", one=False)
    names = [*wrapper.arguments(append)]
    places = [
        names.index(name)
        for name in ("q_ptr", "sin_ptr", "q_s0", "tokens", "q_out_ptr", "keys_data_kept_ptr")
    ]
    assert places == sorted(places) and wrapper.arguments(append)["tokens"] == "i32"
    assert "q_s1" in wrapper.aligned(append)  # 16 x tokens
    assert "tokens" not in wrapper.aligned(append) and "positions_s0" not in wrapper.aligned(append)
    assert "keys_data_ptr" in wrapper.aligned(prefill)


def test_other_sizes_are_other_plugins() -> None:
    small, large = (plugins("contiguous", one=True, limit=limit)[0] for limit in (64, 128))
    assert small.name != large.name and small.spec == large.spec
    assert small.name == plugins("contiguous", one=True, limit=64)[0].name
    assert re.fullmatch(r"kvcompile::append_[0-9a-f]{16}", small.id)


# ---- numbers


def tensors(layout: str, batch: int, tokens: int, past: Tensor) -> dict[str, Any]:
    """A call's tensors with random contents; past: tokens that each sequence has."""
    generator = torch.Generator().manual_seed(batch + tokens)
    own, plan = shape("float32"), LAYOUTS[layout]
    buffers: list[Tensor] = []
    specs = plan.buffers(own.heads[1], *own.dims, torch.float32, LIMIT)
    for spec in specs:
        size = (PAGES if spec.paged else batch, *spec.shape)
        full = torch.randn(size, generator=generator)
        buffers.append(
            (full * 40).to(spec.dtype) if spec.dtype == torch.int8 else full.abs().to(spec.dtype) / 40
        )
    angles = torch.randn(LIMIT, own.dims[0] // 2, generator=generator).repeat(1, 2)
    table = torch.randperm(PAGES - 1, generator=generator)[: batch * 4].add(1).reshape(batch, 4).int()

    def vectors(heads: int) -> Tensor:
        return torch.randn(batch, heads, tokens, own.dims[0], generator=generator)

    return {
        "q": vectors(own.heads[0]),
        "k": vectors(own.heads[1]),
        "v": vectors(own.heads[1]),
        "buffers": buffers,
        "positions": past[:, None] + torch.arange(tokens),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "page_table": table if "paged" in layout else None,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_chain_of_plugins_is_the_op(layout: str, tokens: int, tmp_path: Path) -> None:
    """Append, decode and combine (or prefill) from one's outputs to the next one's inputs, against the reference."""
    past = torch.tensor([17, 4])
    own = tensors(layout, 2, tokens, past)
    first, *rest = plugins(layout, tokens == 1, "float32")
    names = [t.aliases for t in first.outputs if t.aliases]
    given = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    given |= dict(zip(names, own["buffers"], strict=True))
    outs = run(first, given, tmp_path)
    kept = {name: outs[f"{name}_kept"] for name in names}
    given = {**given, **kept, "q": outs["q_out"]}
    for plugin in rest:
        outs = run(plugin, given, tmp_path)
        given |= outs

    buffers = [buffer.clone() for buffer in own["buffers"]]
    args = own["q"], own["k"], own["v"], buffers, own["positions"], past, [own["cos"], own["sin"]], LIMIT
    want = reference.cached_attention(AttendInputs(*args, first.spec.site, page_table=own["page_table"]))
    within(given["out"], want, attended(own, buffers, first.spec.site, past), torch.float32)
    assert all(torch.equal(kept[name], buffer) for name, buffer in zip(names, buffers, strict=True))


def attended(
    own: dict[str, Any], buffers: list[Tensor], site: SiteSpec, past: Tensor, carried: Carried | None = None
) -> Tensor:
    """Attention to what the buffers hold, in float64: [B, Hq, S, Dv]."""
    keys, values, held = reference_cache.stored(
        buffers, past + own["q"].shape[2], LIMIT, site.layout, own["page_table"]
    )
    group = own["q"].shape[1] // keys[0].shape[1]
    k, v = (
        (parts[0].double() * (parts[1].double()[..., None] if len(parts) > 1 else 1)).repeat_interleave(
            group, 1
        )
        for parts in (keys, values)
    )
    wide = [own[name].double() for name in ("cos", "sin")]
    q = rotate(own["q"].double(), own["positions"], *wide, form=site.rotary)
    at = own["positions"][:, None, :, None]
    seen = (held[:, None, None] >= 0) & (held[:, None, None] <= at)
    scores = (q @ k.mT * site.sm_scale).masked_fill(~seen, float("-inf"))
    if carried is not None:
        for b, h, i, j in seen.expand_as(scores).nonzero().tolist():
            found = carried.plain(float(scores[b, h, i, j]), int(at[b, 0, i]), int(held[b, j]), h)
            scores[b, h, i, j] = float("-inf") if found is None else found
    return scores.softmax(-1) @ v


# ---- PTX


@pytest.fixture(scope="module")
def assembled() -> dict[str, tuple[Plugin, Ptx]]:
    wanted = {
        "append": plugins("contiguous int8", one=True)[0],
        "append many": plugins("paged", one=False)[0],
        "decode": plugins("paged int8", one=True)[1],
        "decode bf16": plugins("contiguous", one=True)[1],
        "combine": plugins("contiguous", one=True)[2],
    }
    return dict(
        zip(wanted, zip(wanted.values(), ptx.assembled(wanted.values(), 89), strict=True), strict=True)
    )


@pytest.mark.parametrize("which", ["append", "append many", "decode", "decode bf16", "combine"])
def test_ptx_takes_what_tensorrt_passes_and_no_more(
    which: str, assembled: dict[str, tuple[Plugin, Ptx]]
) -> None:
    plugin, made = assembled[which]
    assert made.name == plugin.name and made.target == "sm_89" and made.version == "8.8"
    entry = made.code[made.code.index(".visible .entry") : made.code.index("\n)\n")]
    params = re.findall(r"\.param (\.\w+)", entry)
    wide = {"i32": ".u32"}
    assert params == [wide.get(kind, ".u64") for kind in wrapper.arguments(plugin).values()]
    assert made.threads == 32 * plugin.num_warps and f".reqntid {made.threads}" in made.code
    assert 0 < made.registers <= 255 and made.shared <= DEVICES[90].shared


def test_a_kernel_that_needs_scratch_memory_is_refused() -> None:
    code = ".visible .entry f(\n\t.param .u64 f_param_0,\n\t.param .u64 f_param_1\n)\n{{\n ld.param.b64 %r, [{}];\n}}"
    assert "f_param_1" not in ptx.without_hidden(code.format("f_param_0"), "f", 1)
    with pytest.raises(KernelError, match=r"f reads scratch memory \(f_param_1\)"):
        ptx.without_hidden(code.format("f_param_1"), "f", 1)


def test_what_does_not_assemble_says_which() -> None:
    broken = replace(plugins("contiguous", one=True)[0], num_warps=3)
    with pytest.raises(
        KernelError, match=rf"does not assemble(.|\n)*num_warps(.|\n)*{broken.name} for sm_89"
    ):
        ptx.assembled([broken], 89)


# ---- registration


def stub(plugin: Plugin) -> Ptx:
    return Ptx(plugin.name, "// PTX", 89, "sm_89", "8.8", 128, 4096, 40)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("one", [True, False])
def test_registration(layout: str, one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `register` and `aot_impl` say, from numbers for symbols, against the launches of those sizes."""
    trt, frontend = tensorrt(), Frontend()
    monkeypatch.setitem(sys.modules, f"{trt.__name__}.plugin", frontend)  # type: ignore[arg-type]
    batch, tokens = 3, 1 if one else 37
    for plugin, launch in zip(plugins(layout, one), real(layout, batch, tokens), strict=True):
        definition = qdp.register(plugin, stub(plugin), trt)
        assert definition is qdp.register(plugin, stub(plugin), trt)  # once
        assert definition is not qdp.register(plugin, replace(stub(plugin), arch=90), trt)
        descs = [
            Desc(tuple(map(Number, launch.tensors[t.name].shape)), qdp._dtype(trt, t.dtype))
            for t in plugin.inputs
        ]
        outs = definition["register"](*descs)
        for tensor, out in zip(plugin.outputs, outs, strict=True):
            want = launch.tensors[tensor.aliases or tensor.name].shape
            assert [Number(size).value for size in out.shape_expr] == [*want]
            source = next(
                (d for t, d in zip(plugin.inputs, descs, strict=True) if t.name == tensor.aliases), None
            )
            assert out.aliased_to is source and out.dtype == qdp._dtype(trt, tensor.dtype)
        name, code, params, numbers = definition["aot_impl"](*descs, outs, 0)
        assert (name, code) == (plugin.name, "// PTX") and (params.block_x, params.shared_mem) == (128, 4096)
        grid = [Number(size).value for size in (params.grid_x, params.grid_y, params.grid_z)]
        assert grid == [*launch.grid, 1, 1][:3]
        own = arguments(launch.kernel, launch.tensors, launch.sizes)
        assert [n.value for n in numbers] == [own[name] for name, _ in plugin.scalars]


def test_a_network_of_other_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trt, frontend = tensorrt(), Frontend()
    monkeypatch.setitem(sys.modules, f"{trt.__name__}.plugin", frontend)  # type: ignore[arg-type]
    plugin = plugins("contiguous", one=True)[0]
    definition = qdp.register(plugin, stub(plugin), trt)
    launch = real("contiguous", 3, 1)[0]
    shapes = {t.name: [*launch.tensors[t.name].shape] for t in plugin.inputs}
    shapes["keys_data"][2] = 2 * LIMIT
    with pytest.raises(KernelError, match=r"dimension 2 of keys_data is ShapeExpr\[128\].*compiled for 64"):
        definition["register"](*[Desc(tuple(map(Number, s)), None) for s in shapes.values()])


def test_where_there_are_no_plugins() -> None:
    plugin = plugins("contiguous", one=True)[0]
    trt = tensorrt()
    del trt.IPluginV3QuickAOTBuild
    with pytest.raises(
        KernelError, match=r"11\.4 has no plugins that are compiled ahead of time: use the enterprise"
    ):
        qdp.register(plugin, stub(plugin), trt)
    del trt.INetworkDefinition
    with pytest.raises(KernelError, match="networks without plugin layers"):
        qdp.register(plugin, stub(plugin), trt)
    with pytest.raises(KernelError, match=r"tensorrt_of_tests\.plugin does not import"):
        qdp.register(plugin, stub(plugin), tensorrt())


def test_tensorrt_rtx_has_none() -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    told = qdp.unavailable(trt)
    assert told is not None and f"{trt.__version__} has networks without plugin layers" in told


def test_roles_and_types_without_a_form_are_refused() -> None:
    own = shape("bfloat16")

    def launches(layout: CacheLayout) -> Any:
        return launched(own.site(layout), own.heads, own.dims, torch.bfloat16, DEVICES[90], LIMIT, True)

    score = next(
        launch for launch in launches(recipe_layouts("h2o")["causal"]) if launch.spec.role == "score"
    )
    with pytest.raises(KernelError, match="kernels of role score have no form as TensorRT plugins"):
        plugin_of(score)
    with pytest.raises(
        KernelError, match=r"append kernel: keys_data is torch.uint8, which TensorRT's plugins do not"
    ):
        plugin_of(launches(cache(keys={"dtype": "int4"}))[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_the_real_tensorrt(layout: str) -> None:
    """Where `tensorrt.plugin` imports: the real frontend, the real registry, and a real ahead-of-time plugin of it."""
    trt = pytest.importorskip("tensorrt")
    pytest.importorskip("tensorrt.plugin")
    made = plugins(layout, one=True)
    for plugin, code in zip(made, ptx.assembled(made, 89), strict=True):
        qdp.register(plugin, code, trt)
        name = qdp.name_of(plugin, code)
        creator = trt.get_plugin_registry().get_creator(name, "1", "kvcompile")
        fields, build = trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD
        ahead = trt.QuickPluginCreationRequest.STRICT_AOT
        instance = creator.create_plugin(name, "kvcompile", fields, build, ahead)
        assert isinstance(instance, trt.IPluginV3QuickAOTBuild)
        kinds = [qdp._dtype(trt, tensor.dtype) for tensor in plugin.inputs]
        ranks = [len(tensor.shape) for tensor in plugin.inputs]
        given = instance.get_output_data_types(kinds, ranks)
        assert given == [qdp._dtype(trt, tensor.dtype) for tensor in plugin.outputs]
        names = [tensor.name for tensor in plugin.inputs]
        for place, tensor in enumerate(plugin.outputs):
            assert instance.get_aliased_input(place) == (
                names.index(tensor.aliases) if tensor.aliases else -1
            )


def test_every_parameter_of_a_kernel_has_a_place() -> None:
    """Nothing of the kernel's signature is left out of a wrapper, and nothing is in it twice."""
    for plugin in [p for name in LAYOUTS for one in (True, False) for p in plugins(name, one)]:
        code = wrapper.text(plugin)
        given = code[code.rindex(f"{plugin.source.name}(\n") :].splitlines()[1:-1]
        count = sum(len(param.names) for param in plugin.source.params)
        assert len(given) == count
        pointers = [line.strip(" ,") for line in given if line.strip(" ,").endswith("_ptr")]
        assert (
            len(set(pointers))
            == len(pointers)
            == sum(isinstance(p, TensorParam) for p in plugin.source.params)
        )
