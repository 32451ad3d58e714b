"""Untrue refusals: what meets no other token, or weights alone, needs no cache; and what may look like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile
from kvcompile.errors import CaptureError, DetectionError
from tests.support.models import NanoBlock, TinyConfig

SIZES = TinyConfig()
WIDTH = SIZES.num_heads * SIZES.head_dim
TOKENS = 90
Change = Callable[["Changed", Tensor], Tensor]


class Changed(nn.Module):
    """A decoder whose states are changed behind its block."""

    def __init__(self, change: Change):
        super().__init__()
        self.change = change
        self.wte, self.block = nn.Embedding(61, WIDTH), NanoBlock(SIZES, eager=False)
        self.head = nn.Linear(WIDTH, 61)
        self.memory = nn.Parameter(torch.randn(1, 9, WIDTH))
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.change(self, self.block(self.wte(input_ids))))  # type: ignore[no-any-return]


def made(change: Change, prepare: Callable[[Changed], object] = lambda model: None) -> Changed:
    torch.manual_seed(0)
    model = Changed(change)
    prepare(model)
    return model.eval()


def assert_equal(*given: Change | Callable[[Changed], object]) -> None:
    fast = kvcompile.optimize(made(*given), max_tokens=TOKENS, compile={"mode": "none"}, verify="off")  # type: ignore[arg-type]
    ids = torch.randint(0, 61, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = made(*given)(ids)  # type: ignore[arg-type]
    found = torch.cat([fast(part) for part in ids.split((40, 1, TOKENS - 41), 1)], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def of_memory(model: Changed, x: Tensor) -> Tensor:
    """Attention to vectors that are weights."""
    memory = model.memory.expand(x.shape[0], -1, -1)
    return x + F.scaled_dot_product_attention(x, memory, memory)


def of_memory_in_heads(model: Changed, x: Tensor) -> Tensor:
    heads = (*x.shape[:2], 2, WIDTH // 2)
    q = x.view(heads).transpose(1, 2)
    memory = model.memory.expand(x.shape[0], -1, -1).unflatten(-1, heads[2:]).transpose(1, 2)
    return x + F.scaled_dot_product_attention(q, memory, memory).transpose(1, 2).flatten(2)


def one_channel(model: Changed, x: Tensor) -> Tensor:
    x = x.clone()
    x[..., 0] = 1
    x[..., 3].zero_()
    return x


@pytest.mark.parametrize("change", [of_memory, of_memory_in_heads, one_channel])
def test_each_token_alone(change: Change) -> None:
    assert_equal(change)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_norms_of_weights(norm: str) -> None:
    assert_equal(
        lambda model, x: x + model.part(x),
        lambda model: getattr(nn.utils.parametrizations, norm)(model.part),
    )


class Written(nn.Module):
    """Attention spelled with einsum, keys and queries in a dtype of their own."""

    def __init__(self, equations: tuple[str, str], dtype: torch.dtype = torch.float32):
        super().__init__()
        self.equations, self.dtype = equations, dtype
        self.wte, self.qkv = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 61)

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, size = input_ids.shape
        heads = self.qkv(self.wte(input_ids)).view(batch, size, 3, 2, WIDTH // 2)
        q, k, v = (each.transpose(1, 2) for each in heads.unbind(2))
        scores = torch.einsum(self.equations[0], q.to(self.dtype), k.to(self.dtype)).float()
        hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.head(torch.einsum(self.equations[1], weights, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_an_ellipsis_is_all_the_other_dimensions() -> None:
    equations = ("...id,...jd->...ij", "...ij,...jd->...id")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Written(equations).eval())
    fast = kvcompile.optimize(models[0], max_tokens=TOKENS, compile={"mode": "none"}, verify="off")
    ids = torch.randint(0, 61, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = models[1](ids)
    found = torch.cat([fast(part) for part in ids.split((40, 1, TOKENS - 41), 1)], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_scores_in_another_dtype_than_values() -> None:
    model = Written(("bhid,bhjd->bhij", "bhij,bhjd->bhid"), torch.bfloat16).eval()
    with pytest.raises(DetectionError, match="bfloat16, bfloat16, float32"):
        kvcompile.optimize(model, verify="off")


def of_first_tokens(model: Changed, x: Tensor) -> Tensor:
    first = F.pad(x, (0, 0, 0, 9))[:, :9]
    return x + F.scaled_dot_product_attention(x, first, first)


def of_ones(model: Changed, x: Tensor) -> Tensor:
    ones = torch.ones(x.shape[1], device=x.device)
    return x / torch.vdot(ones, ones)


@pytest.mark.parametrize("change", [of_first_tokens, of_ones])
def test_what_looks_like_it(change: Change) -> None:
    with pytest.raises(DetectionError):
        kvcompile.optimize(made(change), verify="off")


def test_a_scripted_part_is_no_crash() -> None:
    def script(model: Changed) -> None:
        model.part = torch.jit.script(model.part)  # type: ignore[no-untyped-call]

    with pytest.raises(CaptureError):
        kvcompile.optimize(made(lambda model, x: model.part(x), script), verify="off")
