"""What the tests of kernels that attend share: sites of every kind, and what their results are held against.

The oracle is a dictionary of tokens in float64 (`tests/support/dictionary.py`), or of tokens and scores
(`policy.py`). A kernel may be off by twice the error of the reference in the same dtype, and by rounding: one of
the probabilities and one of the result, as its products take them in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvcompile.kernels.oracle.choice import Choice
from kvcompile.kernels.shared.rope import rotate
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import (
    AllTokens,
    CacheLayout,
    Contiguous,
    Full,
    InKeys,
    Paged,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    Storage,
    TopPages,
    Window,
    float_dtype,
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
from kvcompile.specs import BiasSpec, MaskSpec, RotaryForm, ScoreSpec
from tests.support import dictionary, reference_cache
from tests.support.carried_scores import Carried, anywhere, by_distance
from tests.support.policy import scored_attention
from tests.support.runner import Ran, run, shuffled

STORAGES: tuple[Storage, ...] = (
    model_dtype(),
    float_dtype("bfloat16"),
    float_dtype("float16"),
    int8(),
    uint(4),
    uint(4, 16),
    uint(3, 8),
    uint(2, 16),
    uint(8),
    nf4(),
    nf4(16),
    mxfp4(),
    with_residual(mxfp4(), 5, 2),
    with_hadamard(nf4(8)),
    fp8(),
    fp8("e5m2"),
    fp8(scale="none"),
    fp8(scale="head"),
    fp8(scale="tensor"),
    with_hadamard(int8()),
    with_hadamard(uint(3, 16)),
    with_residual(int8(), 5, 3),
    with_residual(uint(2, 8), 7),
    with_residual(fp8(scale="tensor"), 3),
    with_residual(fp8(), 0, 2),
    with_hadamard(with_residual(int8(), 6)),
    per_channel(2, 16, 16),
    per_channel(4, 8, 16, sinks=3),
    per_channel(3, 4, 8),
    with_hadamard(per_channel(3, 16, 16)),
    with_hadamard(per_channel(4, 4, 8)),
)
H2O = Scored(2, 4, 3)
SELECTIONS = (AllTokens(), AllTokens(), TopPages(4, 2), TopPages(5, 1), TopPages(16, 1))
RETENTIONS = (
    Full(),
    Full(),
    Window(7),
    SinkWindow(3, 6),
    SinkWindow(3, 6, "in_cache"),
    H2O,
    replace(H2O, score="mean_age", pooling="max"),
    replace(H2O, granularity="layer", rows=3),
    replace(H2O, positions="in_cache"),
    Scored(0, 5, 2, "tova", "last", "sum", "layer"),
    Scored(2, 3, 4, "snapkv", "vote", "mean", rows=4, smooth=3),
)
MASKS = (MaskSpec("causal"), MaskSpec("causal"), MaskSpec("sliding", 6), MaskSpec("chunked", 8))
CHUNKS = ((9, 1, 8, 1), (1, 1, 12, 1), (19,), (2, 5, 1, 1, 6), (13, 1, 1))
LIMIT = 24  # of tokens, at least those of any of CHUNKS


@dataclass(frozen=True)
class Case:
    """A site, and how tokens come to it.

    heads, dims: of queries and of keys; of a key and of a value
    one_bias:    the bias is the same for all heads
    pads:        padding of each sequence
    carried:     what it does to its scores as an expression
    """

    layout: CacheLayout
    heads: tuple[int, int] = (2, 1)
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    mask: MaskSpec = MaskSpec("causal")
    score: ScoreSpec = ScoreSpec()
    rotary: RotaryForm | None = None
    one_bias: bool = False
    chunks: tuple[int, ...] = (9, 1, 8, 1)
    pads: tuple[int, ...] = (0, 3)
    seed: int = 0
    carried: Carried | None = None

    @property
    def site(self) -> SiteSpec:
        score = self.score if self.carried is None else replace(self.score, mod=self.carried.mod)
        return SiteSpec(self.layout, self.dims[0] ** -0.5, self.mask, score, self.rotary)

    @property
    def scored(self) -> bool:
        return isinstance(self.layout.retention, Scored)

    @property
    def total(self) -> int:
        return sum(self.chunks)

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """New vectors, q and k before RoPE where there is one; some channels stand out, so that scores do."""
        g = torch.Generator().manual_seed(self.seed)
        (heads, kv_heads), (dim, v_dim) = self.heads, self.dims
        spread = 1 + 2 * (torch.rand(dim, generator=g) > 0.8)
        q = torch.randn(len(self.pads), heads, self.total, dim, generator=g)
        k = torch.randn(len(self.pads), kv_heads, self.total, dim, generator=g) * spread
        v = torch.randn(len(self.pads), kv_heads, self.total, v_dim, generator=g)
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)

    def rope(self) -> list[Tensor]:
        """Tables [cos, sin] of some rotary embedding, for the channels that turn."""
        if self.rotary is None:
            return []
        half = self.rotary.rotary_dim // 2
        angles = torch.arange(2 * max(LIMIT, self.total))[:, None] * 0.5 ** torch.arange(half)[None]
        wide = torch.cat([angles] * 2, 1) if self.rotary.style == "half" else angles.repeat_interleave(2, 1)
        return [wide.cos(), wide.sin()]

    def extra(self) -> dict[str, Any]:
        """The tensors of the site's scores."""
        g = torch.Generator().manual_seed(self.seed + 1)
        heads = self.heads[0]
        found: dict[str, Any] = {"sinks": torch.randn(heads, generator=g)} if self.score.sinks else {}
        if self.carried is not None:
            found["leaves"] = list(self.carried.leaves)
        if self.score.bias is not None:
            kind, own = self.score.bias.kind, 1 if self.one_bias else heads
            shape = {"alibi": (heads,), "table": (own, LIMIT, LIMIT)}.get(kind, (own, LIMIT))
            found["bias"] = torch.randn(shape, generator=g)
        return found

    def scales(self) -> dict[str, Tensor]:
        """Calibrated scales, by the name of their buffer: none that suits all of the vectors, some are cut off."""
        sizes = self.layout.buffers(self.heads[1], *self.dims, self.dtype, LIMIT)
        calibrated = [b.name for b in sizes if b.fixed and b.name.endswith(".scale")]
        return {name: torch.linspace(0.004, 0.009, self.heads[1]) for name in calibrated}


Pick = Callable[[Sequence[Any]], Any]


@st.composite
def cases(draw: st.DrawFn, scored: bool = False) -> Case:
    """Any site that kernels are for."""
    return case_of(lambda options: draw(st.sampled_from(options)), scored)


def case_of(pick: Pick, scored: bool, kernels: str = "triton") -> Case:
    """Any site that kernels are for; each choice is among what goes with those before it.

    kernels: "cpp": also what those for CPUs alone compute, and expressions of scores.
    """
    retention = pick([r for r in RETENTIONS if isinstance(r, Scored) == scored])
    dim = pick((16, 4, 24, 32, 48, 64, 80, 96))
    dims = (dim, pick((dim, 16, 32, 40)))
    before = retention.in_cache or pick((False, False, False, False, True))
    own = [Slots()] if scored else [Contiguous(), *([Ring()] if retention.window else [])]
    own += [*own, Paged(8), Paged(16), Paged(24), Paged(32)]
    if retention.window:
        own += [Paged(8, released=True), Paged(16, released=True)]

    def placed(keys: Storage, values: Storage) -> list[CacheLayout]:
        layouts = [CacheLayout(keys, values, placement, retention, before) for placement in own]
        return [layout for layout in layouts if layout.check() is None]

    stored = [s for s in STORAGES if placed(s, model_dtype())]
    keys = pick(
        [s for s in stored if not s.check(dims[0]) and (kernels == "cpp" or not (before and s.hadamard))]
    )
    rotary = None
    if before or pick((False, False, True)):
        turned = pick([d for d in (dim, dim // 2) if d % 2 == 0])
        rotary = RotaryForm(pick(("half", "interleaved")), pick((0, dim - turned)), turned)
    values: Storage = InKeys(16)
    if dim >= 32 and pick((False, False, False, False, True)):
        dims = (dim, 16)
        if before:  # a latent does not turn, what stands behind it does
            rotary = RotaryForm("half", 16, dim - 16)
    else:
        values = pick([s for s in stored if not s.check(dims[1]) and placed(keys, s)])
    group = pick((2, 1, 3, 4, 5, 16))
    heads = pick((1, 1, 2)) if group < 5 else 1
    # A bias by positions in the sequence is refused by a plan where they are counted in the cache.
    kinds = ("alibi", "relative") if retention.in_cache else ("alibi", "relative", "columns", "table")
    bias = pick((None, *kinds, None, None))
    score = ScoreSpec(pick((None, None, 4.0)), bias and BiasSpec(bias), pick((False, False, False, True)))
    layout, mask = pick(placed(keys, values)), MASKS[0] if scored or retention.in_cache else pick(MASKS)
    if mask.window is None:  # what a selection needs of a model
        some = [replace(layout, selection=selection) for selection in SELECTIONS]
        layout = pick([own for own in some if own.check() is None])
    carried = None
    if kernels == "cpp" and not layout.selection.selects and pick((False, False, True)):
        made = by_distance(group * heads) if retention.in_cache else anywhere(group * heads)
        carried = pick(made)()
    return Case(
        layout,
        (group * heads, heads),
        dims,
        pick((torch.float32, torch.float32, torch.float16, torch.bfloat16)),
        mask,
        score,
        rotary,
        pick((False, True)),
        pick(CHUNKS),
        pick(((0,), (3,)) if group > 4 else ((0, 3), (2, 0), (0, 12, 1))),
        pick(range(1000)),
        carried,
    )


def ran(case: Case, kernels: str) -> Ran:
    """The op over the chunks. What generated kernels do not write is NaN: masked, it must not even be multiplied."""
    # Where many tokens come at once, C++ kernels attend and the reference does the rest: it decodes what is in rings
    # (`kernels/ops/on_cpu.py`).
    alone = set(case.chunks) == {1}
    by_position = not (case.scored or case.layout.residual)
    generated = kernels == "triton" or (kernels == "cpp" and (alone or by_position))
    unwritten = float("nan") if generated else 77.0
    site = replace(case.site, kernels=kernels)
    return run(
        site,
        case.qkv(),
        case.chunks,
        torch.tensor(case.pads),
        case.rope(),
        scales=case.scales(),
        unwritten=unwritten,
        **case.extra(),
    )


def oracle(case: Case, held: list[Tensor], q: Tensor | None = None) -> tuple[Tensor, list[Choice]]:
    """float64 [B, Hq, T, Dv] (0 for padding), and of retentions by scores the choices (`held` is what was kept, or of
    selections of pages what was read).

    q: instead of the case's
    """
    q, k, v = (
        own if given is None else given for own, given in zip(case.qkv(), (q, None, None), strict=True)
    )
    layout, pads, rope = case.layout, torch.tensor(case.pads), case.rope()
    if case.rotary is not None and not layout.rotates_on_read:
        at = torch.arange(case.total)[None] - pads[:, None]
        q, k = (rotate(x, at, *rope, form=case.rotary) for x in (q, k))
        rope = []
    # Rows that are turned and kept in the model's dtype are rounded to it once more before they settle.
    if not any(s.hadamard and (s.residual or s.sinks) for s in (layout.keys, layout.values)):
        k, v = k.float(), v.float()
    extra, scales = case.extra(), case.scales()
    both = (scales.get("keys.scale"), scales.get("values.scale"))
    if case.scored:
        out, choices = scored_attention(
            q.float(), k, v, case.site, rope, case.chunks, pads, held=held, scales=both, **extra
        )
        return out.double(), choices
    if case.carried is not None:
        extra["carried"] = case.carried.plain
        del extra["leaves"]
    if "bias" in extra:
        extra["bias"] = extra["bias"].expand(case.heads[0], *extra["bias"].shape[1:])
    turn = None if not rope else turner(case, [table.double() for table in rope])
    rows = []
    for row, pad in enumerate(case.pads):
        pad = min(pad, case.total)
        own = [x[row, :, pad:] for x in (q, k, v)]
        if layout.selection.selects:
            pages = [step[row] for step in held]
            extra["read"] = dictionary.pages_read(case.site, own[0], own[1], case.chunks, pad, pages)
        out = dictionary.attend(case.site, *own, turn, scales=both, **extra)
        rows.append(torch.cat([out.new_zeros(out.shape[0], pad, out.shape[2]), out], 1))
    return torch.stack(rows), []


def turner(case: Case, rope: list[Tensor]) -> dictionary.Rotate:
    form = case.rotary
    assert form is not None
    channels = torch.arange(form.start, form.start + form.rotary_dim)
    first, second = channels.chunk(2) if form.style == "half" else (channels[::2], channels[1::2])
    local = [x - form.start for x in (first, second)]

    def turn(x: Tensor, position: int) -> Tensor:
        cos, sin = (table[position] for table in rope)
        out = x.clone()
        out[first] = x[first] * cos[local[0]] - x[second] * sin[local[0]]
        out[second] = x[second] * cos[local[1]] + x[first] * sin[local[1]]
        return out

    return turn


def real(case: Case) -> Tensor:
    """Which tokens are no padding, bool [B, 1, T, 1]."""
    return (torch.arange(case.total)[None] >= torch.tensor(case.pads)[:, None])[:, None, :, None]


def check(case: Case, kernels: str = "triton") -> None:
    """Generated kernels against the oracle and the reference: results, what is kept, and the bits of the cache.

    Raises:
        AssertionError: they differ by more than what rounding explains.
    """
    got, same = ran(case, kernels), ran(case, "reference")
    wanted, choices = oracle(case, got.held)
    there = real(case)
    assert kernels != "triton" or not got.out.masked_select(~there).any(), "padding gives 0"
    error = _error(got.out, wanted, there)
    chooses = case.scored or case.layout.selection.selects
    own = _error(same.out, oracle(case, same.held)[0] if chooses else wanted, there)
    largest = float(case.qkv()[0 if isinstance(case.layout.values, InKeys) else 2].float().abs().max())
    if isinstance(case.layout.values, InKeys):
        largest = float(case.qkv()[1].float().abs().max())
    rounding = (torch.finfo(case.dtype).eps + 64 * torch.finfo(torch.float32).eps) * largest
    assert error <= 2 * own + rounding, f"off by {error:.2e}, the reference by {own:.2e}, {rounding=:.2e}"
    if case.scored:
        # Shares are sums of at most `total` probabilities, each as exact as scores are.
        limit = max(2e-5, 4 * torch.finfo(case.dtype).eps)
        excess = max((choice.excess for choice in choices), default=0.0)
        assert excess <= limit, f"kept a score that is lower by {excess:.2e}"
        _same_scores(case, got, same)
    else:
        _same_bits(case, got, same)


def _error(got: Tensor, wanted: Tensor, there: Tensor) -> float:
    assert bool((got.isfinite() | ~there).all()), "not finite"
    return float((got.double() - wanted).masked_fill(~there, 0.0).abs().max())


def _same_scores(case: Case, got: Ran, same: Ran) -> None:
    """Where both kept the same tokens all along, in whatever slots, their scores agree."""
    sums = max(1.0, float(case.total)) * case.heads[0]
    limit = sums * max(1e-5, torch.finfo(case.dtype).eps)
    for row in range(len(case.pads)):
        histories = [[h[row].sort(-1).values for h in x.held] for x in (got, same)]
        if all(torch.equal(a, b) for a, b in zip(*histories, strict=True)):
            orders = [x.held[-1][row].argsort(-1) for x in (got, same)]
            scores = [
                x.buffers[-1][row].gather(-1, o).masked_fill(x.held[-1][row].gather(-1, o) < 0, 0.0)
                for x, o in zip((got, same), orders, strict=True)
            ]
            assert float((scores[0] - scores[1]).abs().max()) <= limit, "other scores"


def _same_bits(case: Case, got: Ran, same: Ran) -> None:
    """Vectors that were not turned on their way stand in their slots with the same bits."""
    layout = case.layout
    storages = (layout.keys, layout.values)
    if case.site.rotates_on_append or any(s.hadamard or s.channelwise for s in storages):
        return
    table = None
    limit = case.total + 2
    if isinstance(layout.placement, Paged):
        table = shuffled(layout, len(case.pads), limit)
    lengths = (case.total - torch.tensor(case.pads)).clamp(min=0)
    span = min(limit, layout.slots(limit))
    *mine, at = reference_cache.stored(got.buffers, lengths, span, layout, table)
    *theirs, _ = reference_cache.stored(same.buffers, lengths, span, layout, table)
    held = (at >= 0)[:, None]
    for a, b in zip([x for side in mine for x in side], [x for side in theirs for x in side], strict=True):
        if a.shape[2] != held.shape[2]:
            continue  # rows that are not those of slots
        bits = [x.contiguous()[..., None].view(torch.uint8).flatten(3) for x in (a, b)]
        assert torch.equal(*(x.masked_fill(~held[..., None], 0) for x in bits)), "other bits"
