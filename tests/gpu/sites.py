"""Sites for tests on hardware: layouts over all axes, and random queries, keys and values for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    Full,
    InKeys,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    Window,
    fp8,
    int8,
    model_dtype,
    mxfp4,
    nf4,
    per_channel,
    uint,
    with_hadamard,
    with_residual,
)
from kvcompile.specs import BiasSpec, MaskSpec, ScoreSpec

KIVI = CacheLayout(per_channel(2, 32, 64), with_residual(uint(2, 32), 64))


@dataclass(frozen=True)
class Sized:
    """A layout with heads (queries, keys) and dims (keys, values), and what the site does with scores."""

    layout: CacheLayout
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (128, 128)
    score: ScoreSpec = ScoreSpec()
    mask: MaskSpec = MaskSpec("causal")

    def site(self, **more: object) -> SiteSpec:
        made = SiteSpec(self.layout, self.dims[0] ** -0.5, self.mask, self.score, kernels="triton")
        return replace(made, **more)  # type: ignore[arg-type]

    def extra(self, device: torch.device) -> dict[str, Tensor]:
        """Sink logits and biases, where the site has them."""
        heads, found = self.heads[0], {}
        if self.score.sinks:
            found["sinks"] = torch.linspace(-2, 3, heads, device=device)
        if self.score.bias is not None:
            found["bias"] = 2.0 ** -torch.linspace(1, 8, heads, device=device)
        return found


SITES = {
    "model": Sized(CacheLayout()),
    "model, 64 channels": Sized(CacheLayout(), (9, 3), (64, 64)),
    "model, 80 channels": Sized(CacheLayout(), (4, 4), (80, 80)),
    "model, 256 channels, softcap": Sized(CacheLayout(), (8, 4), (256, 256), ScoreSpec(softcap=30.0)),
    "model, 16 heads of one": Sized(CacheLayout(), (16, 1)),
    "model, pages of 16": Sized(CacheLayout(placement=Paged(16))),
    "model, ring": Sized(CacheLayout(placement=Ring(), retention=SinkWindow(4, 60))),
    "model, ring in pages": Sized(CacheLayout(placement=Paged(16), retention=SinkWindow(4, 60))),
    "model, window": Sized(CacheLayout(placement=Contiguous(), retention=Window(50))),
    "model, sliding mask": Sized(CacheLayout(), mask=MaskSpec("sliding", 70)),
    "model, chunked mask": Sized(CacheLayout(), mask=MaskSpec("chunked", 64)),
    "alibi": Sized(CacheLayout(), score=ScoreSpec(bias=BiasSpec("alibi"))),
    "sinks": Sized(CacheLayout(), score=ScoreSpec(sinks=True)),
    "int8": Sized(CacheLayout(int8(), int8())),
    "int8, pages of 64": Sized(CacheLayout(int8(), int8(), Paged(64))),
    "int8, ring": Sized(CacheLayout(int8(), int8(), Ring(), SinkWindow(4, 60))),
    "fp8": Sized(CacheLayout(fp8(), fp8())),
    "fp8 e5m2 without scales": Sized(CacheLayout(fp8("e5m2", "none"), fp8("e5m2", "none"))),
    "int4": Sized(CacheLayout(uint(4, 32), uint(4, 32))),
    "int4, 64 channels, pages of 32": Sized(
        CacheLayout(uint(4, 32), uint(4, 32), Paged(32)), (9, 3), (64, 64)
    ),
    "nf4": Sized(CacheLayout(nf4(32), nf4(32))),
    "mxfp4, pages of 32": Sized(CacheLayout(mxfp4(), mxfp4(), Paged(32))),
    "int2 and int3": Sized(CacheLayout(uint(2, 32), uint(3, 32))),
    "kivi": Sized(KIVI),
    "kivi, pages of 32": Sized(replace(KIVI, placement=Paged(32))),
    "int4 turned": Sized(CacheLayout(with_hadamard(uint(4, 32)), with_hadamard(uint(4, 32)))),
    "int8 with the last in full": Sized(CacheLayout(with_residual(int8(), 32), with_residual(int8(), 32, 4))),
    "mixed": Sized(CacheLayout(int8(), uint(4, 32))),
    "latent": Sized(CacheLayout(values=InKeys(128)), (16, 1), (192, 128)),
    "latent int8": Sized(CacheLayout(int8(), InKeys(128)), (16, 1), (192, 128)),
    # As many slots as tokens: which token goes is a matter of rounding, and tested in the interpreter.
    "h2o": Sized(CacheLayout(placement=Slots(), retention=Scored(4, 260, 64))),
    "h2o, scores of a layer": Sized(
        CacheLayout(placement=Slots(), retention=Scored(4, 260, 64, granularity="layer"))
    ),
    "h2o int8": Sized(CacheLayout(int8(), int8(), Slots(), Scored(4, 260, 64))),
}
EXACT_CODES = ("int8", "int8, pages of 64", "int8, ring", "fp8", "int4", "int2 and int3", "mixed")
assert Full() == CacheLayout().retention and model_dtype() == CacheLayout().keys


def vectors(sized: Sized, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v of `batch` sequences; some channels of the keys are large, as those of models are."""
    g = torch.Generator().manual_seed(3)
    (queries, heads), (dim, v_dim) = sized.heads, sized.dims
    q = torch.randn(batch, queries, tokens, dim, generator=g)
    k = torch.randn(batch, heads, tokens, dim, generator=g) * (1 + 5 * (torch.arange(dim) % 29 == 3))
    v = torch.randn(batch, heads, tokens, v_dim, generator=g)
    if isinstance(sized.layout.values, InKeys):
        v = k[..., :v_dim]
    return [x.to(device, dtype) for x in (q, k, v)]
