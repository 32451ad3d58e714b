"""The table of tile sizes: every case has an entry, the tile fits, and what was measured comes first."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from kvcompile.expression import Instruction, ScoreMod
from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton import config as module
from kvcompile.kernels.triton.config import (
    Case,
    Config,
    bits_of,
    case_of,
    config,
    found,
    table_of,
)
from kvcompile.kernels.triton.device import INTERPRETER, Device, device_of
from kvcompile.kernels.triton.roles import ROLES
from kvcompile.kernels.triton.spec import KernelSpec, Role, as_rows
from kvcompile.kernels.triton.tile.reader import reader
from kvcompile.layouts import (
    CacheLayout,
    InKeys,
    Paged,
    TopPages,
    fp8,
    int8,
    model_dtype,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import ScoreSpec
from tests.support.kernel_specs import recipe_layouts

H200 = Device("NVIDIA H200", 90, 132)
A100 = Device("NVIDIA A100-SXM4-80GB", 80, 108)
CPU = device_of(torch.device("cpu"))
PLAIN = SiteSpec(CacheLayout(), 0.1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))
    found.cache_clear()


@pytest.mark.parametrize("device", [H200, A100, Device("L4", 89, 58), CPU], ids=lambda device: device.name)
def test_every_case_has_an_entry_that_fits(device: Device) -> None:
    tiled = [name for name, role in ROLES.items() if role.tiled]
    for role, bits, dim, rows, page in product(
        tiled, (32, 16, 8, 4, 2), (16, 64, 80, 128, 256, 576), (1, 4, 16, 71), (0, 16, 64, 128)
    ):
        case = Case(role, bits, dim, rows, page)
        own = config(case, PLAIN, device)
        assert own.source.startswith(("heuristic: ", "measured on "))
        for size in (own.block_m, own.block_n, own.num_warps):
            assert size & (size - 1) == 0, case
        assert own.block_n >= 16 and own.block_m >= 16 and own.num_stages >= 1
        if role == "decode":
            most = 16 if dim > 256 else 32 if dim > 128 else 64  # larger groups are several programs
            assert own.block_m >= min(rows, most)
            tile = own.block_n * dim * 2 * max(bits, 8) // 8
            assert tile * max(own.num_stages - 1, 1) <= device.shared or own.block_n == 16, case


def test_one_warp_group_has_a_tile_of_a_prompt() -> None:
    """Of 16 bits on sm_90, where two were no faster; what an expression goes through has the registers of two."""
    site = SiteSpec(CacheLayout(), 0.1)
    case = case_of("prefill", site, 32, 8, 128, 128, torch.bfloat16)
    own = config(case, site, H200)
    assert (own.block_m, own.block_n, own.num_warps, own.num_stages) == (64, 64, 4, 3)
    # Without warp groups, a warp has whole rows of queries.
    tiles = {
        arch: config(case, site, Device("a GPU", arch, 100)) for arch in (80, 86, 89, 100, 103, 110, 120)
    }
    cut = {arch: (made.block_m, made.block_n, made.num_warps) for arch, made in tiles.items()}
    assert cut[100] == cut[103] == cut[110] == (64, 64, 4)
    assert cut[80] == (128, 64, 8) and cut[86] == cut[89] == cut[120] == (128, 32, 8)
    # A third buffer is for what has the shared memory of two such programs.
    assert {arch: made.num_stages for arch, made in tiles.items()} == {**dict.fromkeys(tiles, 3), 110: 2}
    # Which page is looked up takes as many stages as what is found there.
    paged = replace(case, page=64, lookups=1)
    for arch in (80, 86, 89, 90, 100, 103, 120):
        assert config(paged, site, Device("a GPU", arch, 100)).num_stages == 5
    # In float32, codes of 8 bits become numbers of four bytes: 64 slots would not fit 99 KB.
    for page, lookups in ((0, 0), (64, 1)):
        own = config(
            replace(case, bits=8, page=page, lookups=lookups, wide=True), site, Device("a GPU", 86, 72)
        )
        assert (own.block_m, own.block_n, own.num_stages) == (32, 32, 2)
    mod = ScoreMod((Instruction("leaf", "bool", (), 0),), ("pair",), mask=0)
    expression = SiteSpec(CacheLayout(), 0.1, score=ScoreSpec(mod=mod))
    own = config(case, expression, H200)
    assert (own.block_m, own.num_warps) == (64, 8)
    tall = replace(own, block_m=128)  # as somebody may have measured it for a site without
    assert module.fitted(tall, case, site, H200).block_m == 128
    assert module.fitted(tall, case, expression, H200).block_m == 64


def test_conditions() -> None:
    case = Case("decode", 8, 128, 4, page=128)
    holds = module._holds
    assert holds({}, case, H200) and holds({"arch": 90, "device": "NVIDIA H200"}, case, H200)
    assert not holds({"arch": 90}, case, A100)
    assert holds({"bits": [4, 8], "page": {"min": 128}}, case, H200)
    assert not holds({"page": {"max": 127}}, case, H200) and not holds({"bits": [4, 16]}, case, H200)
    with pytest.raises(KeyError):
        holds({"head": 1}, case, H200)


def test_bits_of_storages() -> None:
    dtype = torch.bfloat16
    expected = {
        model_dtype(): 16,
        fp8(): 8,
        int8(): 8,
        uint(4, 32): 4,
        uint(2, 32): 2,
        uint(3, 32): 3,
        per_channel(4, 32, 128): 4,
        with_hadamard(int8()): 8,
    }
    assert {storage: bits_of(storage, 128, dtype) for storage in expected} == expected


def test_case_of_a_site() -> None:
    site = SiteSpec(CacheLayout(int8(), model_dtype(), Paged(64)), 0.1)
    assert case_of("decode", site, 32, 8, 128, 64, torch.float16) == Case("decode", 8, 128, 4, 64, lookups=1)
    assert case_of("prefill", site, 32, 8, 128, 64, torch.float16) == Case(
        "prefill", 8, 128, 4, 64, lookups=1
    )
    chosen = replace(site, layout=replace(site.layout, selection=TopPages(64, 8)))
    found = {
        role: case_of(role, chosen, 32, 8, 128, 64, torch.float16).lookups for role in ("decode", "prefill")
    }
    assert found == {"decode": 2, "prefill": 1}  # prompts read all pages
    kivi = CacheLayout(per_channel(4, 32, 128), with_residual(uint(4, 32), 128))
    of = [
        case_of("prefill", SiteSpec(own, 0.1), 32, 8, 128, 128, torch.float16)
        for own in (kivi, as_rows(kivi))
    ]
    assert [(own.bits, own.mixed, own.decoded) for own in of] == [(4, True, False), (16, True, True)]
    assert case_of("prefill", site, 32, 8, 128, 64, torch.float32).wide
    groups = SiteSpec(CacheLayout(uint(4, 32), uint(4, 64)), 0.1)
    assert case_of("decode", groups, 32, 8, 128, 128, torch.float16).stack == 4


@pytest.mark.parametrize(
    ("role", "bits", "group", "expected"),
    [
        ("decode", 2, 32, 32),  # dequantized in float16: one group, the work of a single warp
        ("decode", 2, 64, 64),
        ("decode", 2, 48, 32),
        ("decode", 2, 256, 64),
        ("prefill", 2, 16, 16),
        ("prefill", 2, 32, 32),
        ("prefill", 4, 16, 64),
        ("decode", 4, 32, 64),  # as above
        ("decode", 4, 16, 64),
        ("decode", 4, 256, 64),
    ],
)
def test_tiles_and_groups_of_tokens(role: str, bits: int, group: int, expected: int) -> None:
    """Scales per channel are folded into the queries once a tile, which then has one group; or the keys take them."""
    site = SiteSpec(CacheLayout(per_channel(bits, group, group), uint(4)), 0.1)
    assert config(case_of(role, site, 32, 8, 128, 128, torch.bfloat16), site, H200).block_n == expected


def test_heads_are_rows_once_for_each_group_of_channels() -> None:
    """Sixteen rows, the least of a product, are four heads of four groups; of more heads, codes take the scales of
    their groups, where these are in float16."""
    site = SiteSpec(CacheLayout(uint(4, 32), uint(4, 32)), 0.1)
    for heads, expected in ((8, (4, 4)), (32, (4, 4)), (40, (16, 1)), (64, (16, 1)), (256, (32, 1))):
        case = case_of("decode", site, heads, 8, 128, 128, torch.bfloat16)
        assert (config(case, site, H200).block_m, case.stack) == expected
    assert case_of("decode", site, 64, 8, 128, 128, torch.float32).stack == 4
    narrow = SiteSpec(CacheLayout(uint(4, 32), uint(3, 32)), 0.1)
    assert case_of("decode", narrow, 64, 8, 128, 128, torch.bfloat16).stack == 4


def test_values_have_more_columns_than_rows() -> None:
    """Else Triton gives each warp all of both products: of 16 rows, pieces of 16 channels stand in 32 columns."""
    for channels, expected in ((64, {(16, 32)}), (128, {(32, 32)})):
        site = SiteSpec(CacheLayout(uint(4, 32), uint(4, 32)), 0.1)
        own = config(case_of("decode", site, 32, 8, channels, channels, torch.bfloat16), site, H200)
        spec = KernelSpec("decode", site, 32, 8, channels, channels, "bfloat16", own.block_m, own.block_n)
        assert {(piece.width, piece.block) for piece in reader(spec, "values").pieces} == expected
        assert {(piece.width, piece.block) for piece in reader(spec, "keys").pieces} == {
            (channels // 4, channels // 4)
        }


@pytest.mark.parametrize(
    ("page", "expected"), [(0, 128), (16, 128), (64, 64), (96, 128), (128, 128), (256, 128)]
)
def test_a_tile_lies_in_one_page_where_that_is_not_too_small(page: int, expected: int) -> None:
    assert config(Case("decode", 2, 128, 4, page, stack=4), PLAIN, A100).block_n == expected


def test_latent_rows_count_once() -> None:
    site = SiteSpec(CacheLayout(values=InKeys(512)), 0.1)
    case = case_of("decode", site, 16, 1, 576, 512, torch.bfloat16)
    shared, apart = config(case, site, A100), config(case, PLAIN, A100)
    assert shared.block_n * shared.num_stages > apart.block_n * apart.num_stages


def test_splits_fill_the_device_and_no_more() -> None:
    own = Config(waves=2.0)
    assert own.splits(H200, programs=8, tiles=512) == 33  # 264 programs of 8
    assert own.splits(H200, programs=1, tiles=64) == 64  # no share without a tile
    assert own.splits(H200, programs=4096, tiles=64) == 1


def test_splits_of_symbols() -> None:
    """A batch that is not known when the graph is made."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def sized(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(Config(waves=2.0).splits(H200, x.shape[0] * 8, 512))

    graph = make_fx(sized, tracing_mode="symbolic")(torch.empty(3))
    for batch in (1, 2, 5):
        assert graph(torch.empty(batch)).shape[0] == Config(waves=2.0).splits(H200, batch * 8, 512)


def test_what_was_measured_comes_first() -> None:
    case = Case("decode", 16, 128, 4)
    entry = {
        "when": {"role": "decode", "bits": 16},
        "use": {"block_n": 128, "num_warps": 8},
        "source": "measured on NVIDIA H200",
    }
    path = table_of(H200)
    assert path.name == "nvidia-h200.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"entries": [entry]}))
    assert found(case, H200) == Config(block_n=128, num_warps=8, source="measured on NVIDIA H200")
    assert found(case, A100).source.startswith("heuristic: ")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"entries": [{"when": {}, "use": {"block": 1}, "source": ""}]}']
)
def test_a_broken_table_is_an_error(text: str) -> None:
    path = table_of(H200)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"nvidia-h200\.json: no table of configurations .* run kvcompile tune"
    ):
        found(Case("decode", 16, 128, 4), H200)


def test_the_interpreter_is_a_device_of_its_own() -> None:
    assert CPU.arch == INTERPRETER
    assert config(Case("decode", 16, 64, 3), PLAIN, CPU).block_n == 16


def test_tokens_in_full_beside_few_bits_take_the_registers_of_more_warps() -> None:
    """Of 32 heads to a KV head, two warps spill in the main loop; of prompts of 256 channels, 64 rows do."""
    site = SiteSpec(recipe_layouts("kivi2")["causal"], 0.1)

    def of(role: Role, heads: tuple[int, int], dim: int) -> Config:
        return config(case_of(role, site, *heads, dim, dim, torch.bfloat16), site, H200)

    many = of("decode", (32, 1), 128)
    assert (many.num_warps, many.num_stages) == (4, 3)
    prompt = of("prefill", (8, 4), 256)
    assert (prompt.block_m, prompt.block_n, prompt.num_warps) == (16, 32, 8)


def test_a_group_of_more_tokens_than_a_single_warp_has_slots_is_the_work_of_two() -> None:
    """Of 64 channels and 4 bits; else its scales would multiply the queries, which wait for ten loads."""

    def of(group: int) -> tuple[int, int, float]:
        site = SiteSpec(CacheLayout(per_channel(4, group, 128), uint(4, 32)), 0.1)
        made = config(case_of("decode", site, 32, 8, 64, 64, torch.bfloat16), site, H200)
        return made.block_n, made.num_warps, made.waves

    assert of(32) == of(16) == (32, 1, 8.0)
    assert of(64) == of(128) == (64, 2, 4.0)


def test_wide_heads_have_two_groups_of_tokens_a_tile_where_shared_memory_allows() -> None:
    """Of 32 heads to a KV head, a tile of 64 slots takes 108 KB, which programs of an A10 do not have."""
    site = SiteSpec(recipe_layouts("kivi4")["causal"], 0.1)
    a10 = Device("NVIDIA A10", 86, 72)

    def of(heads: tuple[int, int], device: Device) -> tuple[int, int, int]:
        own = config(case_of("decode", site, *heads, 256, 256, torch.bfloat16), site, device)
        return own.block_n, own.num_warps, own.num_stages

    assert of((8, 4), H200) == of((32, 1), A100) == (64, 8, 4)
    assert of((8, 4), a10) == (64, 8, 3)
    assert of((32, 1), a10)[0] == 32
