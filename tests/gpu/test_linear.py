"""Linear layers of one token on hardware: against float64, beyond 2^31 elements, and in a model's step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvcompile
from kvcompile.compile.linear_forms import ACTIVATIONS
from kvcompile.compile.norm_forms import OWN, normed
from kvcompile.kernels.triton.host.linear import activated, added, gated, linears, norm_in, takes, takes_norm
from tests.gpu.test_steps import MODEL
from tests.support.budget import rounding, within
from tests.support.models import tiny_hf

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Columns, and rows of each layer of one vector.
LAYERS = (
    (4096, (4096, 1024, 1024)),
    (14336, (4096,)),
    (576, (576, 192, 192)),
    (1536, (577,)),
    (1072, (3, 1, 130)),
    (53248, (300,)),
)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "rows"), LAYERS)
def test_layers_of_one_token(
    columns: int, rows: tuple[int, ...], dtype: torch.dtype, biased: bool, device: torch.device
) -> None:
    x = drawn((1, 1, columns), dtype, device, 0)
    weights = [drawn((count, columns), dtype, device, 1 + at) for at, count in enumerate(rows)]
    biases = [drawn((count,), dtype, device, 9 + at) for at, count in enumerate(rows)] if biased else []
    assert takes(x, weights, biases)
    found = linears(x, weights, biases)
    for own, weight, bias in zip(found, weights, biases or [None] * len(rows), strict=True):
        truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert bool(((own.double() - truth).abs() <= rounding(x, weight, bias)).all())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_and_what_it_opens(dtype: torch.dtype, activation: str, device: torch.device) -> None:
    x = drawn((1, 1, 4096), dtype, device, 0)
    weights = [drawn((14336, 4096), dtype, device, seed) / 64 for seed in (1, 2)]

    def plain(dtype: torch.dtype) -> Tensor:
        gate, up = (F.linear(x.cpu().to(dtype), weight.cpu().to(dtype)) for weight in weights)
        return ACTIVATIONS[activation](gate) * up

    within(gated(x, weights, [], activation).cpu(), plain(dtype), plain(torch.float64), dtype, activation)


# As `norm_forms.py` says them: Llama, Gemma, OLMo, without weight; GPT-NeoX, Cohere, OLMo 1.
NORMS = ("", "wide one", "wide", "plain", "layer shift", "layer", "layer plain")


@pytest.mark.parametrize("how", NORMS)
@pytest.mark.parametrize(("columns", "rows"), [(3072, (3072, 1024, 1024)), (576, (577,))])
def test_a_token_that_is_normed_by_who_reads_it(
    columns: int, rows: tuple[int, ...], how: str, device: torch.device
) -> None:
    """Its mean is not near 0. The token behind its norm is one more result, of the numbers that the model has."""
    dtype, words = torch.bfloat16, how.split()
    x = drawn((1, 1, columns), dtype, device, 0) + 3
    count = ("plain" not in words) + ("shift" in words)
    tensors = [drawn((columns,), dtype, device, 20 + at) for at in range(count)]
    weights = [drawn((own, columns), dtype, device, 1 + at) * columns**-0.5 for at, own in enumerate(rows)]

    def plain(dtype: torch.dtype) -> Tensor:
        casts = OWN if dtype.itemsize == 2 and "layer" not in words else ""
        own = normed(x.to(dtype), [of.to(dtype) for of in tensors], 1e-5, how, casts)
        return torch.cat([F.linear(own, of.to(dtype)) for of in weights], -1).cpu()

    norm = norm_in(how, 1e-5, tensors, kept=True)
    assert takes(x, weights, []) and takes_norm(x, norm)
    *found, own = linears(x, weights, [], norm)
    within(torch.cat(found, -1).cpu(), plain(dtype), plain(torch.float64), dtype, how or "llama", few=True)
    spelled = normed(x, tensors, 1e-5, how, OWN if "layer" not in words else "")
    torch.testing.assert_close(own, spelled)
    assert int((own != spelled).sum()) <= columns // 100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, ""])
def test_what_a_layer_does_to_its_results(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    """An activation; or a factor, and two residuals, one after the other."""
    x, weight = drawn((1, 1, 2048), dtype, device, 0), drawn((1111, 2048), dtype, device, 1) / 45
    bias = drawn((1111,), dtype, device, 2)
    residuals = [drawn((1, 1, 1111), dtype, device, 3 + at) for at in range(2)]

    def plain(dtype: torch.dtype) -> Tensor:
        made = F.linear(x.cpu().to(dtype), weight.cpu().to(dtype), bias.cpu().to(dtype))
        if activation:
            return ACTIVATIONS[activation](made)
        return residuals[1].cpu().to(dtype) + (residuals[0].cpu().to(dtype) + made * 0.22)

    found = activated(x, weight, bias, activation) if activation else added(x, weight, bias, residuals, 0.22)
    within(found.cpu(), plain(dtype), plain(torch.float64), dtype, activation or "added", few=True)


def test_weights_beyond_31_bits(device: torch.device) -> None:
    """The last rows of a weight of more than 2^31 elements."""
    columns = 8192
    rows = 2**31 // columns + 40
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB")
    weight = torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)
    weight[-40:] = drawn((40, columns), torch.bfloat16, device, 1)
    x = drawn((1, 1, columns), torch.bfloat16, device, 0)
    (found,) = linears(x, [weight])
    assert bool((found[..., :-40] == 0).all())
    truth = F.linear(x.double(), weight[-40:].double())
    assert bool(((found[..., -40:].double() - truth).abs() <= rounding(x, weight[-40:], None)).all())


@pytest.mark.parametrize("mode", ["default", "cudagraphs"])
def test_a_step_with_and_without(
    mode: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of a model's steps, within the budget of steps whose linear layers are PyTorch's."""

    def logits(dtype: torch.dtype, disabled: str) -> Tensor:
        monkeypatch.setenv("KVCOMPILE_DISABLE", disabled)
        model = tiny_hf("llama", layers=2, **MODEL).to(device, torch.bfloat16).to(dtype)
        fast = kvcompile.optimize(model, max_tokens=256, verify="off", compile={"mode": mode})
        found = [fast(input_ids=torch.arange(20, device=device)[None]).logits[:, -1]]
        for number in range(20):
            found.append(fast(input_ids=torch.full((1, 1), number, device=device)).logits[:, -1])
        return torch.stack(found)

    truth = logits(torch.float32, "gemv")
    within(logits(torch.bfloat16, ""), logits(torch.bfloat16, "gemv"), truth, torch.bfloat16, mode)
