"""Which kernels a site launches, told without running any; and `kvcompile kernels`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton import config
from kvcompile.kernels.triton.available import fp8_form
from kvcompile.kernels.triton.device import Device, acting_as, device_of
from kvcompile.kernels.triton.host import site_kernels
from kvcompile.kernels.triton.host.launch import arguments, known, recording
from kvcompile.kernels.triton.host.launches import call, launches
from kvcompile.kernels.triton.host.site_kernels import Kernels
from kvcompile.kernels.triton.params import ScalarParam
from kvcompile.kernels.triton.spec import KernelSpec
from tests.support.kernel_specs import DEVICES, H200, SHAPES, cache, recipe_layouts


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))


def roles(recipe: str, tokens: int, attention: str = "causal") -> list[str]:
    layout = recipe_layouts(recipe)[attention]
    return [launch.spec.role for launch in SHAPES["llama"].kernels(layout, H200, tokens)]


@pytest.mark.parametrize(
    ("recipe", "one", "many"),
    [
        ("baseline", ["append", "decode"], ["append", "prefill"]),
        ("paged", ["append", "decode"], ["append", "prefill"]),
        ("int8", ["append", "decode"], ["append", "decoded_rows", "prefill", "prefill"]),
        (
            "kivi4",
            ["append", "group", "decode", "combine"],
            ["append", "group", "decoded_rows", "prefill", "append"],
        ),
        ("streaming", ["append", "decode"], ["append", "prefill", "append"]),
        (
            "h2o",
            ["append", "decode"],
            ["append", "prefill", "columns", "columns", "append"],
        ),
        (
            "sinks_h2o_fp8",
            ["append", "decode", "combine", "score"],
            ["append", "prefill", "columns", "columns", "append"],
        ),
        ("quest", ["append", "page_bounds", "decode", "combine"], ["append", "prefill"]),
    ],
)
def test_the_launches_of_recipes(recipe: str, one: list[str], many: list[str]) -> None:
    """RoPE, encoding and the write of a token are one launch, whatever the storage."""
    assert roles(recipe, 1) == one and roles(recipe, 128) == many


def test_every_tiled_role_is_cut_up_as_its_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """And combine, whose row is looked up like the others."""
    own = config.config

    def odd(case: config.Case, site: SiteSpec, device: Device) -> config.Config:
        return replace(own(case, site, device), num_warps=8, num_stages=1)

    monkeypatch.setattr(site_kernels, "config", odd)
    paged = recipe_layouts("paged")["causal"]
    found = SHAPES["llama"].kernels(paged, DEVICES[80], 1) + SHAPES["llama"].kernels(paged, DEVICES[80], 64)
    cut = {one.spec.role: (one.num_warps, one.num_stages) for one in found if one.spec.role != "append"}
    assert cut == dict.fromkeys(("decode", "combine", "prefill"), (8, 1))


def test_they_are_those_of_the_device() -> None:
    fp8 = recipe_layouts("fp8")["causal"]
    old, new = (SHAPES["llama"].kernels(fp8, DEVICES[arch], 1) for arch in (80, 90))
    assert {launch.spec.fp8 for launch in old} == {"bits"} and {launch.spec.fp8 for launch in new} == {
        "native"
    }
    assert not any("interpreted" in launch.spec.options for launch in (*old, *new))
    assert device_of(torch.device("cpu")).arch == 0  # outside of it, a CPU is what it is


def test_what_decides_about_fp8_acts_as_the_device_too() -> None:
    """The specs of a site, and the cache that its kernels are given."""
    cpu = torch.device("cpu")
    own = Kernels(SiteSpec(cache(), 0.1), 8, 2, 64, 64, torch.bfloat16, cpu)
    for arch, form in ((80, "bits"), (86, "bits"), (89, "native"), (90, "native"), (120, "native")):
        with acting_as(Device("a GPU", arch, 100)):
            assert own.fp8 == own.spec("decode").fp8 == fp8_form(cpu) == form
    assert own.fp8 == fp8_form(cpu) == "bits"


def test_every_shape_of_site_can_be_asked() -> None:
    for name, shape in SHAPES.items():
        for tokens in (1, 64):
            found = shape.kernels(cache(), H200, tokens)
            assert found and all(launch.spec.num_qo_heads == shape.heads[0] for launch in found), name


def test_kernels_on_the_command_line(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["kernels", "--recipe", "kivi4", "--out", str(tmp_path / "sources")])
    assert shown.exit_code == 0, shown.output
    assert "group" in shown.stdout and "x 64" in shown.stdout
    sources = list((tmp_path / "sources").iterdir())
    assert {path.name.partition("_")[0] for path in sources} == {
        "append",
        "group",
        "decode",
        "combine",
        "prefill",
    }
    for path in sources:
        line = next(line for line in path.read_text().splitlines() if line.startswith("# spec "))
        assert KernelSpec.from_json(line.removeprefix("# spec ")).key in path.name


def test_assembled_on_the_command_line() -> None:
    arguments = ["kernels", "--recipe", "baseline", "--head-dim", "64", "--heads", "4/4", "--assemble"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "decode" in shown.stdout and "sm_90" in shown.stdout and "128 x" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "70"], "--arch: expected 80, 86, 89, 90, 100, 120, got 70"),
        (["--heads", "8/3"], "--heads: expected query heads / KV heads"),
        (["--recipe", "int4", "--head-dim", "80"], "group 32 does not divide head_dim 80"),
    ],
)
def test_what_has_no_kernels_is_refused(arguments: list[str], said: str) -> None:
    shown = CliRunner().invoke(app, ["kernels", *arguments])
    assert shown.exit_code == 1 and said in " ".join(shown.stderr.split())


def test_what_is_assembled_is_what_a_launch_specialises_for() -> None:
    """By Triton's own launcher, on tensors of these shapes and strides: of every argument the same is known."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    seen = set()
    for recipe in ("int8", "paged_int8", "int4", "kivi4", "h2o_int8", "sinks_h2o_fp8", "quest"):
        layout = recipe_layouts(recipe)["causal"]
        for tokens in (1, 128):
            with recording() as found, acting_as(H200), FakeTensorMode():
                call(SHAPES["llama"].site(layout), (32, 8), (128, 128), torch.bfloat16, 4096, 2, tokens)
            for one in found:
                told = dict(known(one.kernel, one.tensors))
                real = torch.empty(16)  # instead of tensors without memory: as aligned as all
                sizes = {p.name for p in one.kernel.source.params if isinstance(p, ScalarParam)}
                for name, value in arguments(one.kernel, one.tensors, one.sizes).items():
                    value = real if isinstance(value, torch.Tensor) else value
                    _, key = native_specialize_impl(
                        BaseBackend, value, False, name not in sizes, name not in sizes
                    )
                    expected = 16 if key == "D" else 1 if key == 1 else None
                    assert told.get(name) == expected, (one.kernel.spec.role, name, key)
                seen.add(one.kernel.spec.role)
    assert {"append", "decode", "prefill", "combine", "group", "score", "page_bounds", "decoded_rows"} <= seen


def test_slots_come_as_sixteens_where_they_are() -> None:
    int8 = recipe_layouts("int8")["causal"]
    for limit, expected in ((4096, True), (4090, False)):
        found = launches(SHAPES["llama"].site(int8), (32, 8), (128, 128), torch.bfloat16, H200, 1, limit)
        decode = next(one.spec for one in found if one.spec.role == "decode")
        assert ("slots16" in decode.options) == expected
