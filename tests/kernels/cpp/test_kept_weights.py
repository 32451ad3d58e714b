"""What queries give each key: summed up of weights that were kept, against products that are made twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.cpp.attend import prefill as texts
from kvcompile.kernels.cpp.host import ops, prefill, source
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, Scored, Slots

QUERIES = 150  # in two blocks or more, of keys in three
RETENTIONS = {
    "mean": Scored(2, 60, 20),
    "largest": Scored(2, 60, 20, pooling="max"),
    "the last": Scored(2, 60, 20, "snapkv", "vote", "mean", "layer", rows=30),
}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    yield
    ops.forget()
    source._kernel.cache_clear()


def columns(retention: Scored, dtype: torch.dtype) -> Tensor:
    """[2, units, QUERIES]; the second sequence begins with padding."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, QUERIES, 32, generator=generator).to(dtype) for heads in (6, 2, 2))
    at = torch.arange(QUERIES).expand(2, -1) - torch.tensor([[0], [70]])
    at = at.where(at >= 0, torch.tensor(-1))
    site = SiteSpec(CacheLayout(placement=Slots(), retention=retention), 0.5)
    ops.forget()
    source._kernel.cache_clear()
    _, found = prefill.attend_columns(q, k, v, at[:, None], at, at, at[:, None], site, (0,))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RETENTIONS)
def test_they_are_those_of_products_made_twice(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To what the weights are kept as: nobody sees what is padding, and each query gives one in all."""
    kept = columns(RETENTIONS[name], dtype)
    monkeypatch.setattr(texts, "_MOST_KEPT", 0)
    twice = columns(RETENTIONS[name], dtype)
    limit = 1e-5 if dtype == torch.float32 else 2e-3
    assert float((kept - twice).abs().max()) <= limit * float(twice.abs().max())
    if name == "mean":
        given = kept.sum(-1)
        assert torch.allclose(
            given, torch.tensor([[QUERIES], [QUERIES - 70]]).expand(2, 2).float(), rtol=limit
        )
        assert not kept[1, :, :70].any()
