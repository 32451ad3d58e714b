"""Where queries stand, also beyond 2^31 elements: in a file with nothing between its rows, so that no GPU is needed.

And in which order their tiles come, and how large they may be.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.triton.attend.queries import over_channels
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.host.call import New, prefill
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.layouts import CacheLayout, Paged, uint
from tests.kernels.triton.attend.test_attend import at_the_end, decoded
from tests.support.triton_attention import Case
from tests.support.triton_write import Site, kernels_folder  # noqa: F401  (a fixture)

FAR = 2**30  # elements between two rows: twice that is beyond 31 bits
CASE = Case(CacheLayout(), (3, 1), (16, 16), torch.float16, chunks=(3,), pads=(0,))


def far_apart(folder: Path, x: Tensor, dim: int) -> Tensor:
    """x float16 with rows of dimension `dim` FAR elements apart, in a file of which little is written: what is 2^31
    elements before a row is there as well, and 0."""
    size = 2**31 + FAR * x.shape[dim]
    memory = torch.from_file(str(folder / "memory"), shared=True, size=size, dtype=torch.float16)
    strides = list(x.stride())
    strides[dim] = FAR
    return memory.as_strided(x.shape, strides, 2**31).copy_(x)


@pytest.mark.parametrize("packed", [(), ("packed",)], ids=["batch", "packed"])
@given(tiles=st.integers(1, 40), block_m=st.sampled_from((16, 64, 128)))
def test_each_tile_of_queries_is_one_program_and_the_heaviest_comes_first(
    packed: tuple[str, ...], tiles: int, block_m: int
) -> None:
    """As the text says: what a program's rows begin behind, and of a row of sequences, which programs end at once."""
    layout = CacheLayout(placement=Paged(16))
    spec = replace(Site(layout).spec("prefill", *packed), block_m=block_m, block_n=16)
    lines = [line.strip() for line in generate(spec).text.splitlines()]
    (begins,) = (line.removeprefix("below = ") for line in lines if line.startswith("below = "))
    found = []
    for program in range(tiles):
        tl = SimpleNamespace(num_programs=lambda axis: tiles, program_id=lambda axis, own=program: own)
        found.append(eval(begins, {"tl": tl}))
        if packed:
            (ends,) = (
                line[3:-1]
                for line in lines
                if line.startswith("if ") and line.endswith(f"tokens * {spec.group}:")
            )
            few = (tiles * block_m) // (2 * spec.group)  # half of what the launch is for
            assert eval(ends, {"tl": tl, "tokens": few}) == (found[-1] >= few * spec.group)
    assert found == [tile * block_m for tile in reversed(range(tiles))]


@pytest.mark.parametrize("dim", [1, 2], ids=["heads", "tokens"])
def test_queries_of_a_long_prompt(tmp_path: Path, dim: int) -> None:
    _, _, call = at_the_end(CASE, (0,))
    q, k, v = CASE.qkv()
    call = replace(call, q=q, k=k, v=v, positions=torch.arange(3)[None])
    (near,) = prefill(call, New(q, k, v, []))
    far = far_apart(tmp_path, q, dim)
    (found,) = prefill(replace(call, q=far), New(far, k, v, []))
    assert torch.equal(found, near) and near.isfinite().all() and near.abs().max() > 0


def test_the_query_of_a_step(tmp_path: Path) -> None:
    _, _, call = at_the_end(CASE, (0,))
    near = decoded(call, 1, 16)
    far = decoded(replace(call, q=far_apart(tmp_path, call.q.contiguous(), 1)), 1, 16)
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True)) and near[0].abs().max() > 0


@pytest.mark.parametrize("bits", [2, 4])
def test_large_queries_over_codes(bits: int) -> None:
    """In float16, which has no number for them times what codes are owed: as exact as small ones."""
    layout = CacheLayout(uint(bits), uint(bits))
    case, _, call = at_the_end(replace(CASE, layout=layout, dims=(128, 128), heads=(2, 1)), (0,))
    near = decoded(call, 1, 16)
    large = call.q * (2.0**15 / call.q.abs().max().log2().ceil().exp2())
    times = (large.abs().max() / call.q.abs().max()).item()
    site = replace(case.site, kernels="triton", sm_scale=case.site.sm_scale / times)
    made = kernels_of(site, case.heads, case.dims, case.dtype, call.q.device, False)
    far = decoded(replace(call, q=large, kernels=made), 1, 16)
    assert times > 2**10 and large.abs().max() > 2**14
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True)) and near[0].abs().max() > 0


@given(widths=st.lists(st.sampled_from((16, 32, 64)), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_all_pieces_of_a_query_count_over_its_channels(widths: list[int], seed: int) -> None:
    """Those of one width are joined before they are reduced: a reduction for each width, in any order of pieces."""
    g = torch.Generator().manual_seed(seed)
    blocks = [torch.randint(-9, 9, (4, width), generator=g) for width in widths]
    attend = SimpleNamespace(keys=SimpleNamespace(pieces=[SimpleNamespace(block=width) for width in widths]))
    tl = SimpleNamespace(
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        maximum=torch.maximum,
        abs=torch.abs,
    )
    names: dict[str, object] = {"tl": tl} | {f"q{place}": block for place, block in enumerate(blocks)}
    of = list(range(len(widths)))
    whole = torch.cat(blocks, 1)
    total = over_channels(attend, "tl.sum", {i: f"q{i}" for i in of})  # type: ignore[arg-type]
    largest = over_channels(attend, "tl.max", {i: f"tl.abs(q{i})" for i in of})  # type: ignore[arg-type]
    assert total.count("tl.sum") == largest.count("tl.max(") == len({*widths})
    assert torch.equal(eval(total, names), whole.sum(1))
    assert torch.equal(eval(largest, names), whole.abs().amax(1))
