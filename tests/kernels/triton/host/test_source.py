"""Generated kernels as files: content-addressed, never run when they do not read as generated, private to the user."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcompile.errors import KernelError
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.device import interpreted
from kvcompile.kernels.triton.host import source as source_module
from kvcompile.kernels.triton.host.launch import arguments, launch
from kvcompile.kernels.triton.host.source import Kernel, function_of, kernel, stored
from kvcompile.kernels.triton.params import KernelSource, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import environment, header, jit
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import CacheLayout, int8, with_hadamard
from kvcompile.specs import RotaryForm, ScoreSpec

SPEC = KernelSpec("append", SiteSpec(CacheLayout(int8()), 0.125), 8, 2, 16, 16, "float32")
PARAMS = (
    TensorParam("x", torch.float32, 2),
    TensorParam("out", torch.float32, 2),
    ScalarParam("columns"),
    ScalarParam("factor", "fp32"),
)
TEXT = """
import triton
import triton.language as tl


{jit}
def scale({names}):
    row = tl.program_id(0)
    at = tl.arange(0, 16)
    x = tl.load(x_ptr + row * x_s0 + at, mask=at < columns, other=0.0)
    tl.store(out_ptr + row * out_s0 + at, x * factor, mask=at < columns)
"""
SCALE = KernelSource(
    "scale", PARAMS, TEXT.format(jit=jit(PARAMS), names=", ".join(n for p in PARAMS for n in p.names))
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source_module, "generate", lambda spec: SCALE)
    kernel.cache_clear()
    return tmp_path / "cache" / "kernels"


def run(made: Kernel, columns: int = 5) -> None:
    x, out = torch.randn(3, 7), torch.zeros(3, 9)
    launch(made, (3,), {"x": x, "out": out}, {"columns": columns, "factor": 2.0}, num_warps=1)
    expected = torch.zeros(3, 9)
    expected[:, :columns] = 2 * x[:, :columns]
    assert torch.equal(out, expected)


def test_the_kernel_runs_and_its_source_can_be_read(folder: Path) -> None:
    assert interpreted()
    made = kernel(SPEC)
    run(made)
    assert made.path.parent == folder and made.path.name.startswith(f"append_{SPEC.key}_")
    assert inspect.getsource(made.function.fn).startswith("@triton.jit")
    assert inspect.getsourcefile(made.function.fn) == str(made.path)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == [made.path.name]  # nothing temporary is left


def test_equal_specs_are_one_kernel() -> None:
    again = KernelSpec.from_json(SPEC.to_json())
    assert again == SPEC and kernel(again) is kernel(SPEC)
    assert source_module.kernel_of(SPEC.to_json()) is kernel(SPEC)
    other = replace(SPEC, block_n=128)
    assert kernel(other).path != kernel(SPEC).path


def test_the_header_says_what_the_kernel_is_for() -> None:
    site = replace(
        SPEC.site,
        layout=CacheLayout(with_hadamard(int8())),
        score=ScoreSpec(softcap=50.0, sinks=True),
        rotary=RotaryForm("half", 0, 8),
    )
    spec = replace(SPEC, site=site, options=("rope",))
    text = header(spec)
    assert all(line.startswith("#") for line in text.splitlines()) and "\n\n" not in text
    for part in (str(spec.layout), "softcap 50", "rope", "channels 0 to 7", spec.key, "triton "):
        assert part in text
    assert KernelSpec.from_json(text.splitlines()[-1].removeprefix("# spec").strip()) == spec
    assert text == header(KernelSpec.from_json(spec.to_json()))
    assert "torch" not in header(spec, versions=False)


def test_a_changed_file_is_written_again_and_never_run() -> None:
    path, text = stored(SPEC, SCALE)
    path.write_text("raise SystemExit('run')")
    made = kernel(SPEC)
    assert made.path == path and path.read_text() == text
    run(made)


def test_a_file_changed_after_the_check_is_not_run() -> None:
    path, text = stored(SPEC, SCALE)
    path.write_text("raise SystemExit('run')")
    function_of(SCALE, path, text)


@pytest.mark.parametrize("which", ["cache", "cache/kernels"])
def test_folders_that_others_can_write_to_are_refused(which: str, tmp_path: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True)
    (tmp_path / which).chmod(0o777)
    with pytest.raises(KernelError, match=r"others can write to it \(mode 0777\).*chmod go-w"):
        kernel(SPEC)


def test_a_shared_folder_with_sticky_bit_may_hold_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    run(kernel(SPEC))


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs root, to give a folder away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True)
    os.chown(folder, 12345, -1)
    with pytest.raises(KernelError, match="belongs to user 12345, not to you"):
        kernel(SPEC)


def test_what_cannot_be_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(KernelError, match="set KVCOMPILE_CACHE_DIR"):
        kernel(SPEC)


def test_processes_and_threads_may_write_at_once(folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = {path for path, _ in pool.map(lambda _: stored(SPEC, SCALE), range(64))}
    assert {*folder.iterdir()} == paths and len(paths) == 1


def test_wrong_arguments_are_named() -> None:
    made = kernel(SPEC)
    x, sizes = torch.zeros(2, 4), {"columns": 4, "factor": 1.0}
    with pytest.raises(TypeError, match=r"missing \['out'\], unknown \['other'\]"):
        arguments(made, {"x": x, "other": x}, sizes)
    with pytest.raises(TypeError, match=r"out is torch.float16 of 2 dimensions, expected torch.float32 of 2"):
        arguments(made, {"x": x, "out": x.half()}, sizes)
    with pytest.raises(TypeError, match=r"x .* has stride 4 in its last dimension, expected 1"):
        arguments(made, {"x": torch.zeros(4, 4).t(), "out": x}, sizes)


def test_a_tensor_of_any_rank_is_dense() -> None:
    params = (TensorParam("x", torch.float32),)
    made = Kernel(SPEC, KernelSource("none", params, ""), Path(), None)
    x = torch.zeros(2, 3, 4)
    assert list(arguments(made, {"x": x}, {})) == ["x_ptr"]
    with pytest.raises(TypeError, match=r"x \(2, 3, 2\) has strides \(12, 4, 1\), expected it without gaps"):
        arguments(made, {"x": x[..., :2]}, {})


def test_fp8_comes_as_bytes_where_bytes_are_asked_for() -> None:
    params = (TensorParam("codes", torch.uint8, 2),)
    made = Kernel(SPEC, KernelSource("none", params, ""), Path(), None)
    codes = torch.ones(2, 4).to(torch.float8_e4m3fn)
    given = arguments(made, {"codes": codes}, {})
    assert given["codes_ptr"].dtype == torch.uint8 and given["codes_ptr"].data_ptr() == codes.data_ptr()


def test_templates_are_strict() -> None:
    with pytest.raises(Exception, match="'absent' is undefined"):
        environment().from_string("{{ absent }}").render()
    assert environment().from_string("{% if true %}\na\n{% endif %}\nb\n").render() == "a\nb\n"


TRACED = """
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from kvcompile.kernels.triton.host import source
from tests.kernels.triton.host.test_source import SCALE, SPEC, interpreted, launch
source.generate = lambda spec: SCALE
made = source.kernel(SPEC)
assert not interpreted()

def double(x):
    out = torch.empty_like(x)
    launch(made, (x.shape[0],), {"x": x, "out": out}, {"columns": 4, "factor": 2.0}, num_warps=2)
    return out

graph = make_fx(double, tracing_mode="symbolic")(torch.empty(3, 4))
print(graph.code)
"""


def test_a_launch_is_seen_by_make_fx(tmp_path: Path) -> None:
    """In a process whose Triton compiles; tracing launches nothing, so it needs no GPU."""
    done = subprocess.run(
        [sys.executable, "-c", TRACED],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "triton_kernel_wrapper_mutation" in done.stdout
    assert "'x_s0': " in done.stdout and "grid = [(sym_size_int" in done.stdout, done.stdout
