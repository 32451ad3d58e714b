"""`kvcompile tune`, with Triton's interpreter in place of a GPU: its times mean nothing, what is made of them does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.errors import KernelError
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton.config import Config, config, found, table_of, using
from kvcompile.kernels.triton.device import Device, device_of
from kvcompile.kernels.triton.host.attention import cached_attention
from kvcompile.kernels.triton.host.launch import recording
from kvcompile.kernels.triton.tools import tune as module
from kvcompile.kernels.triton.tools.synthetic_cache import sample
from kvcompile.kernels.triton.tools.tune import Point, Subject, Tuned, call_of, candidates, tune, write
from kvcompile.layouts import CacheLayout, Paged, Storage, int8, per_channel

CPU = torch.device("cpu")
H200 = Device("NVIDIA H200", 90, 132)
SITE = SiteSpec(CacheLayout(int8(), int8(), Paged(16)), 0.25)
SUBJECT = Subject("int8", "decode", SITE, (4, 2), (16, 16), torch.float32, (Point(2, 40), Point(1, 20)))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))
    found.cache_clear()


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(KernelError, match="measures on an NVIDIA GPU, and there is none here"):
        tune([SUBJECT], CPU)
    shown = CliRunner().invoke(app, ["tune", "--recipes", "int8"])
    said = " ".join(shown.stderr.split())
    assert shown.exit_code == 1 and "measures on an NVIDIA GPU" in said
    assert "Of a CPU there is nothing to tune" in said and "whoever is free takes the next piece" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--heads", "32"], "--heads: expected query heads / KV heads"),
        (["--heads", "9/2"], "a multiple of them"),
        (["--batch", "1,x"], "--batch: expected numbers separated by commas"),
        (["--context", "0"], "--context: expected numbers separated by commas"),
        (["--roles", "append"], "--roles: expected decode or prefill, got 'append'"),
        (["--recipes", "nothing"], "nothing"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], said: str) -> None:
    shown = CliRunner().invoke(app, ["tune", *arguments])
    assert shown.exit_code == 1 and said in shown.stderr


def test_candidates_fit_and_are_tried_once() -> None:
    large = replace(SUBJECT, heads=(32, 8), dims=(128, 128))
    tried = candidates(large, H200)
    assert len(set(tried)) == len(tried) == 4 * 4 * 5 * 5
    assert {one.num_stages for one in tried} == {2, 3, 4, 5, 6}  # of pages, two buffers take five
    assert {one.block_n for one in tried} == {16, 32, 64, 128}
    grouped = replace(large, site=SiteSpec(CacheLayout(per_channel(4, 32, 64)), 0.25), dtype=torch.bfloat16)
    assert {one.block_n for one in candidates(grouped, H200)} == {16, 32, 64, 128}
    two_bits = replace(large, site=SiteSpec(CacheLayout(per_channel(2, 32, 64)), 0.25))
    assert {one.block_n for one in candidates(two_bits, H200)} == {16, 32}


def test_what_is_measured_is_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate runs with its own configuration, at each point, and the fastest wins; the clock is a fake."""
    tried = [Config(block_n=16, num_warps=1, waves=waves) for waves in (1.0, 2.0, 5.0)]
    now, seen = config(SUBJECT.case, SITE, device_of(CPU)), []
    monkeypatch.setattr(module, "candidates", lambda subject, device: tried)

    def times(role: str, pair: tuple[Config, Config], one: object, rounds: int) -> tuple[float, float]:
        assert pair[0] == now
        module.call_of("decode", pair[1], one, 0)()  # type: ignore[arg-type]
        seen.append(pair[1])
        return 10.0, {1.0: 12.0, 2.0: 5.0, 5.0: 9.9}[pair[1].waves]

    monkeypatch.setattr(module, "_times", times)
    won = module._tuned(SUBJECT, CPU, 1, 0, lambda *_: None)
    assert seen == tried * 2  # two points
    assert won.best == tried[1] and won.us == (5.0, 5.0) and won.gain == pytest.approx(2.0)
    tried[1:2] = []
    assert module._tuned(SUBJECT, CPU, 1, 0, lambda *_: None).best == now  # 1 % is noise


def test_a_configuration_in_use_reaches_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcompile.kernels.triton.host import ops_arguments

    launched: list[tuple[int, ...]] = []
    plain = ops_arguments.launch
    monkeypatch.setattr(
        ops_arguments,
        "launch",
        lambda kernel, grid, *a, **k: (
            launched.append((kernel.spec.block_n, *grid)),
            plain(kernel, grid, *a, **k),
        ),
    )
    one = sample(replace(SITE, share="middle"), (4, 2), (16, 16), (40,), torch.float32, CPU)
    with using("decode", Config(block_n=32, waves=8.0)):
        wide = cached_attention(one.inputs(0))
    usual = cached_attention(one.inputs(0))
    assert [entry[0] for entry in launched[::2]] == [32, 16]
    assert launched[0][1] == 2 and launched[2][1] == 2  # three tiles of the table's, for two heads
    torch.testing.assert_close(wide, usual)


@pytest.mark.parametrize("keys", [int8(), per_channel(4, 16, 16)], ids=str)
def test_of_prompts_slots_are_read_as_they_stand(keys: Storage) -> None:
    """And not rows that were made of them, which are another case: what is measured, and what is predicted of it."""
    site = SiteSpec(CacheLayout(keys, int8()), 0.25, share="middle", kernels="triton")
    one = sample(site, (4, 2), (16, 16), (64,), torch.bfloat16, CPU, tokens=64)
    own = Config(block_m=16, block_n=16)
    with recording() as tuned:
        call_of("prefill", own, one, 0)()
    with recording() as usual, using("prefill", own):
        cached_attention(one.inputs(0))
    # Beside tokens in full, new ones are encoded, though not kept.
    before = ["append"] if keys.residual else []
    assert [found.kernel.spec.role for found in tuned] == [*before, "prefill"]
    assert [found.kernel.spec.role for found in usual] == [*before, "decoded_rows", "prefill"]


def test_the_clock_measures_both_in_turns() -> None:
    one = sample(replace(SITE, share="middle"), (4, 2), (16, 16), (20,), torch.float32, CPU)
    now = config(SUBJECT.case, SITE, device_of(CPU))
    old, new = module._times("decode", (now, replace(now, waves=1.0)), one, 1)
    assert old > 0 and new > 0


def test_no_configuration_that_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def fails(*_: object) -> tuple[float, float]:
        raise OutOfResources(300000, 232448, "shared memory")

    monkeypatch.setattr(module, "_times", fails)
    with pytest.raises(KernelError, match=r"int8: none of .* configurations runs on"):
        module._tuned(SUBJECT, CPU, 1, 0, lambda *_: None)


def test_the_table_keeps_other_cases_and_is_used(tmp_path: Path) -> None:
    def tuned(block_n: int, bits: int) -> Tuned:
        site = SITE if bits == 8 else SiteSpec(CacheLayout(placement=Paged(16)), 0.25)
        subject = replace(SUBJECT, site=site, dtype=torch.bfloat16)
        return Tuned(subject, Config(block_n=block_n), (5.0,), (10.0,))

    write([tuned(32, 8), tuned(64, 16)], H200)
    path = write([tuned(128, 8)], H200)
    assert path == table_of(H200)
    entries = json.loads(path.read_text())["entries"]
    assert [(entry["when"]["bits"], entry["use"]["block_n"]) for entry in entries] == [(8, 128), (16, 64)]
    assert found(tuned(0, 8).subject.case, H200).block_n == 128
    assert found(tuned(0, 16).subject.case, H200).source.startswith("measured on NVIDIA H200, torch ")
    assert found(tuned(0, 8).subject.case, Device("NVIDIA A100", 80, 108)).source.startswith("heuristic")
    path.write_text("[]")
    with pytest.raises(KernelError, match="cannot be written"):
        write([tuned(32, 8)], H200)
    assert write([tuned(32, 8)], H200, tmp_path / "mine" / "table.json").exists()
