"""The headers of vectors alone, in every instruction set of this machine: what kernels build on, number by number."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.cpp.host.compiler import built, flags_for
from kvcompile.kernels.cpp.isa import Isa, available
from tests.kernels.cpp.test_attention import PAIRS

ISAS = {isa.name: isa for isa in (*available(), PAIRS)}
OF_PAIRS = [name for name, isa in ISAS.items() if "-DKV_PAIRS" in isa.flags]
NONE, HUGE = float("nan"), float("inf")


def ran(isa: Isa, body: str, x: Tensor, out: Tensor) -> Tensor:
    """`out` after `body` in C++, which sees x and out as `const float* x, float* out, int64_t n`."""
    headers = ("attend.h", "codes.h", "matmul.h", "weights.h")
    text = "#include KV_VECTORS\n" + "".join(f'#include "{header}"\n' for header in headers)
    text += f'extern "C" void probe(const float* x, float* out, int64_t n) {{ using namespace kv; {body} }}\n'
    probe = ctypes.CDLL(str(built(f"probe_{isa.name}", text, flags_for(isa)))).probe
    probe(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(x.numel()))
    return out


@pytest.mark.parametrize("name", OF_PAIRS)
def test_powers_of_two_for_bfloat16(name: str) -> None:
    """Off by no more than the header says, exact where hidden scores and no numbers are."""
    x = torch.cat(
        [torch.linspace(-125.9, 1, 1 << 16), torch.tensor([0.0, -126.5, -140, -1e30, -HUGE, NONE] * 16)]
    )
    got = ran(
        ISAS[name], "for (int64_t i = 0; i < n; i += W) store(out + i, exp2_short(load(x + i)));", x, x * 0
    )
    wanted = torch.exp2(x.double())
    there = x > -126
    off = ((got.double() - wanted) / wanted)[there].abs().max()
    assert off < 2.7e-6 + 4 * 2.0**-24  # what include/exp2.h says, and four roundings of float32
    assert got[x.isnan()].isnan().all() and not got[x < -126].any()


@pytest.mark.parametrize("name", ISAS)
def test_blocks_turn(name: str) -> None:
    """A block of W rows and columns, of rows that lie farther apart."""
    x = torch.arange(16 * 24, dtype=torch.float32)
    body = "transpose(reinterpret_cast<const Word*>(x), 24, reinterpret_cast<Word*>(out), 20); out[0] += W;"
    got = ran(ISAS[name], body, x, torch.full((16, 20), -1.0))
    width = int(got[0, 0])
    got[0, 0] -= width
    wanted = torch.full((16, 20), -1.0)
    wanted[:width, :width] = x.view(16, 24)[:width, :width].T
    assert width in (4, 8, 16) and torch.equal(got, wanted)


@pytest.mark.parametrize("name", ISAS)
def test_a_block_becomes_weights(name: str) -> None:
    """Blocks of scores one behind the other: a top that rises, one that does not, all hidden, hidden before any."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 64, generator=g)
    x[0] = -HUGE  # nothing is seen yet
    x[2] *= 4
    x[3] -= 100  # far below the top
    x[4, 5:] = -HUGE
    x[5, 7] = 30.0
    body = """
      SoFar so_far;
      alignas(64) float sum[W] = {};
      for (int block = 0; block < 6; ++block) {
        weigh<W, float>(x + block * BLOCK, 0.5f, so_far, sum, out + block * (BLOCK + 2));
        out[block * (BLOCK + 2) + BLOCK] = kv::sum(so_far.total);
        for (int c = 0; c < W; ++c) sum[c] += 1.0f;
        out[block * (BLOCK + 2) + BLOCK + 1] = sum[W - 1];
      }"""
    got = ran(ISAS[name], body, x * 2, torch.zeros(6, 66))
    top = x.amax(1).cummax(0).values.double()
    weights = (x.double() - top.clamp(min=-1e9)[:, None]).exp()
    total = below = torch.zeros((), dtype=torch.float64)
    before = -HUGE
    for block in range(6):
        less = 0.0 if before == -HUGE else float(torch.exp(torch.tensor(before) - top[block]))
        total = total * less + weights[block].sum()
        below = below * less + 1
        wanted = torch.cat([weights[block], total[None], below[None]])
        torch.testing.assert_close(got[block].double(), wanted, rtol=2e-6, atol=1e-30)
        before = float(top[block])
