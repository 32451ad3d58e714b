"""Roles that read the cache, each alone: decode and combine in any number of splits, prefill in any tiles, columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.ops import cached_attention as ops
from kvcompile.kernels.reference.retention import by_score
from kvcompile.kernels.triton.config import Config
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.host import ops_attend
from kvcompile.kernels.triton.host.call import Call, New, prefill, transformed
from kvcompile.kernels.triton.host.retention import by_score as on_triton
from kvcompile.kernels.triton.host.site_kernels import Kernels, kernels_of
from kvcompile.kernels.triton.retention import score_sums
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import (
    CacheLayout,
    Contiguous,
    InKeys,
    Paged,
    Placement,
    Retention,
    Ring,
    Scored,
    SinkWindow,
    Slots,
    Storage,
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
from tests.support.budget import within
from tests.support.kernel_specs import spec
from tests.support.runner import Ran, run, shuffled
from tests.support.triton_attention import H2O, Case, check, oracle, ran, real
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

# A score far above a softcap: its exp2 is inf, and 1 / inf the 0 that is meant.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
ALIBI, SINKS = ScoreSpec(bias=BiasSpec("alibi")), ScoreSpec(softcap=4.0, sinks=True)
LONG = (40, 1)  # several tiles of 16 slots, and a token that decode is asked about
IN_ORDER = {
    "plain": Case(CacheLayout(), chunks=LONG),
    "pages": Case(CacheLayout(int8(), uint(4, 16), Paged(16)), (6, 2), chunks=LONG),
    "gathered pages": Case(
        CacheLayout(float_dtype("float16"), fp8(), Paged(24)), (3, 1), score=ALIBI, chunks=LONG
    ),
    "sinks and window": Case(CacheLayout(retention=SinkWindow(3, 9)), score=SINKS, chunks=LONG),
    "chunked": Case(
        CacheLayout(int8(), model_dtype(), Paged(32)), (16, 1), mask=MaskSpec("chunked", 12), chunks=LONG
    ),
    "in full": Case(CacheLayout(per_channel(4, 16, 16), with_residual(int8(), 5, 2)), (4, 1), chunks=LONG),
    "nf4": Case(CacheLayout(nf4(16), nf4(8), Paged(16)), (6, 2), (32, 24), chunks=LONG),
    "mxfp4": Case(CacheLayout(mxfp4(), mxfp4()), (4, 2), (32, 64), chunks=LONG),
    "mxfp4 beside a residual": Case(
        CacheLayout(with_residual(mxfp4(), 5, 2), with_hadamard(nf4())), (4, 1), (64, 40), chunks=LONG
    ),
    "latent": Case(CacheLayout(uint(4, 16), InKeys(16)), (4, 1), (48, 16), score=SINKS, chunks=LONG),
    "turned": Case(CacheLayout(with_hadamard(int8()), with_hadamard(uint(4))), (4, 2), (24, 40), chunks=LONG),
    "before RoPE": Case(
        CacheLayout(int8(), int8(), before_rope=True), rotary=RotaryForm("interleaved", 0, 8), chunks=LONG
    ),
}
RINGS = {
    "ring": Case(CacheLayout(int8(), int8(), Ring(), SinkWindow(3, 30)), (4, 2), chunks=(24, 15, 1)),
    "window": Case(CacheLayout(placement=Ring(), retention=Window(20)), score=SINKS, chunks=(24, 15, 1)),
    "places": Case(
        CacheLayout(fp8(), int8(), Paged(8), SinkWindow(3, 16, "in_cache")),
        rotary=RotaryForm("half", 8, 8),
        chunks=(24, 15, 1),
    ),
    "H2O": Case(CacheLayout(int8(), int8(), Slots(), replace(H2O, heavy=30)), (4, 2), chunks=(24, 15, 1)),
}
# Groups of more heads than a tile of decode has rows.
LARGE = {
    "group of 20": Case(CacheLayout(int8(), uint(4, 16)), (40, 2), score=ALIBI, chunks=(9, 1, 1)),
    "H2O, group of 20": Case(
        CacheLayout(int8(), int8(), Slots(), H2O), (40, 2), score=SINKS, chunks=(9, 1, 1)
    ),
}


# ---- decode and combine


def at_the_end(case: Case, pads: tuple[int, ...]) -> tuple[Case, Ran, Call]:
    """A cache that the reference has filled, and the call of the last token; the cache holds it already."""
    case = replace(case, pads=pads)
    same = ran(case, "reference")
    q, k, v = (x[:, :, -1:] for x in case.qkv())
    positions = case.total - 1 - torch.tensor(pads)[:, None]
    table = None
    if isinstance(case.layout.placement, Paged):
        table = shuffled(case.layout, len(pads), case.total + 2)
    site = replace(case.site, kernels="triton")
    made = kernels_of(site, case.heads, case.dims, case.dtype, q.device, False)
    extra = case.extra()
    call = Call(
        made, q, k, v, same.buffers, positions, case.rope(), extra.get("sinks"), extra.get("bias"), table
    )
    return case, same, call


def spec_of(call: Call, role: Any, *options: str, **changes: Any) -> str:
    return replace(call.kernels.spec(role, options), **changes).to_json()


def decoded(
    call: Call,
    splits: int,
    block: int,
    *options: str,
    arrivals: Tensor | None = None,
    score: Tensor | None = None,
    **sizes: int,
) -> tuple[Tensor, ...]:
    """Partial results, tops and totals of the last token (and spans, logits; joined, the output), without an append."""
    q = transformed(call)
    return tuple(
        ops_attend.decode(
            q,
            call.buffers,
            call.positions,
            call.bias,
            call.leaves,
            call.rope_read,
            call.page_table,
            None,
            None,
            None,
            call.sinks if "joined" in options else None,
            arrivals,
            score,
            splits,
            4,
            2,
            spec_of(call, "decode", *options, block_n=block, **sizes),
        )
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("name", IN_ORDER)
def test_any_number_of_splits(name: str) -> None:
    """One, some, and more than there are tiles; a sequence of few tokens, and one of none."""
    case, same, call = at_the_end(IN_ORDER[name], (0, 36, 41))
    wanted = oracle(case, same.held)[0][:2, :, -1:]
    for splits in (1, 2, 3, 7):
        partial, sums = decoded(call, splits, 16)
        assert sums.isfinite().all()
        (out,) = ops_attend.combine(partial, sums, None, None, call.sinks, 1, 1, spec_of(call, "combine"))
        within(out[:2], same.out[:2, :, -1:], wanted, torch.float32, f"{splits} splits", few=True)
        assert not out[2].any()
        # A share with no tile weighs nothing, whatever memory has in its place.
        empty = sums[..., 1] == 0
        assert empty[2].all() and partial[~empty].isfinite().all()
        partial[empty] = float("nan")
        (again,) = ops_attend.combine(partial, sums, None, None, call.sinks, 1, 1, spec_of(call, "combine"))
        assert torch.equal(again, out)
        if splits == 7:
            assert empty[1].sum() >= 3 * empty[1, :, 0].numel()


@pytest.mark.few(4)
@pytest.mark.parametrize("name", [*IN_ORDER, "group of 20"])
def test_any_number_of_programs_over_a_list(name: str) -> None:
    """As splits. What is not of a part that was written may be anything."""
    own = (IN_ORDER | LARGE)[name]
    case, same, call = at_the_end(own, (0, 36, 41) if name in IN_ORDER else (0, 8, 11))
    rows = 16 if name in LARGE else 0
    wanted = oracle(case, same.held)[0][:2, :, -1:]
    sizes = {"block_m": rows} if rows else {}
    for programs in (1, 2, 3, 7, 30):
        partial, sums, spans = decoded(call, programs, 16, "listed", **sizes)
        parts = partial.shape[0]
        written = torch.zeros(parts, dtype=torch.bool)
        for first, count in spans[:2].flatten(0, 1).tolist():
            assert not written[first : first + count].any()
            written[first : first + count] = True
        sums[~written], partial[~written], spans[2] = float("nan"), float("nan"), 1 << 20
        joined = spec_of(call, "combine", "listed", block_m=rows or call.kernels.spec("decode").block_m)
        (out,) = ops_attend.combine(partial, sums, spans, call.positions, call.sinks, 1, 1, joined)
        within(out[:2], same.out[:2, :, -1:], wanted, torch.float32, f"{programs} programs", few=True)
        assert not out[2].any()
        # As the last program of each head has joined them, which leaves all programs counted.
        arrivals = torch.zeros(3, case.heads[0], dtype=torch.int32)
        (alone,) = decoded(call, programs, 16, "listed", "joined", arrivals=arrivals, **sizes)
        within(alone[:2], same.out[:2, :, -1:], wanted, torch.float32, f"{programs} programs", few=True)
        assert not alone[2].any()
        assert torch.equal(arrivals[:2, : spans.shape[1]], spans[:2, :, 1]) and not arrivals[2].any()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("splits", [1, 5, 16, 40, 64, 99])
def test_combine(splits: int, sinks: bool) -> None:
    """Against a softmax over all; splits at once are 16 or 64."""
    g = torch.Generator().manual_seed(splits)
    case = Case(CacheLayout(), (6, 2), (16, 24), score=ScoreSpec(sinks=sinks))
    spec = kernels_of(case.site, case.heads, case.dims, case.dtype, torch.device("cpu"), False)
    scores = 4 * torch.randn(2, 2, splits, 3, 8, generator=g).double()
    scores[:, :, ::3] = -math.inf  # shares with no tile
    scores[:, :, 0] = 4 * torch.randn(2, 2, 3, 8, generator=g)
    values = torch.randn(2, 2, splits, 3, 8, 24, generator=g).double()
    tops = scores.amax(-1).clamp(min=-1.0e30)
    p = (scores - tops[..., None]).exp2()
    sums = torch.stack([tops, p.sum(-1)], -1).float()
    sink = torch.randn(6, generator=g) if sinks else None
    partial = (p[..., None] * values).sum(-2).float()
    out, lse = ops_attend.combine(
        partial, sums, None, None, sink, 1, 1, spec.spec("combine", ("lse",)).to_json()
    )
    flat = scores.transpose(2, 3).flatten(3)
    if sink is not None:
        own = sink.double().view(1, 2, 3, 1).expand(2, -1, -1, -1) / math.log(2)
        flat = torch.cat([flat, own], -1)

    def joined(dtype: torch.dtype) -> list[Tensor]:
        """The output and the log-sum-exp, of all scores at once."""
        own = (flat * math.log(2)).to(dtype)
        weights = own.softmax(-1)[..., : splits * 8]
        rows = values.to(dtype).transpose(2, 3).flatten(3, 4)
        return [
            torch.einsum("bhgt,bhgtd->bhgd", weights, rows).flatten(1, 2),
            own.logsumexp(-1) / math.log(2),
        ]

    found = (out[:, :, 0], lse.view(2, 2, 3))
    for mine, torchs, truth in zip(found, joined(torch.float32), joined(torch.float64), strict=True):
        within(mine, torchs, truth, torch.float32)


def test_combine_of_padding_gives_nothing() -> None:
    spec = kernels_of(Case(CacheLayout()).site, (2, 1), (16, 16), torch.float32, torch.device("cpu"), False)
    sums = torch.tensor([-1.0e30, 0.0]).expand(1, 1, 3, 2, 2).contiguous()
    (out,) = ops_attend.combine(
        torch.zeros(1, 1, 3, 2, 16), sums, None, None, None, 1, 1, spec.spec("combine").to_json()
    )
    assert not out.any()


def test_logits_are_those_of_the_slots() -> None:
    case = Case(
        CacheLayout(int8(), int8(), Slots(), H2O), (4, 2), chunks=(7, 1), score=ScoreSpec(softcap=4.0)
    )
    _, same, call = at_the_end(case, (0, 3))
    call = replace(call, buffers=call.buffers[:-2])
    _, _, logits, levels = decoded(call, 2, 16, "logits")
    logits = logits + levels.repeat_interleave(16, -1)[..., : logits.shape[-1]]
    held = same.held[-1]
    assert (logits[:, :, :, :].isfinite() == (held >= 0)[:, :, None]).all()
    q, k, _ = case.qkv()

    def scores(dtype: torch.dtype) -> Tensor:
        keys = call.buffers[0].to(dtype) * call.buffers[1].to(dtype)[..., None]
        rows = q[:, :, -1].to(dtype).unflatten(1, (2, 2))
        raw = torch.einsum("bhgd,bhtd->bhgt", rows, keys) * case.site.sm_scale
        return 4.0 * torch.tanh(raw / 4.0) / math.log(2)

    there = (held >= 0)[:, :, None].expand_as(logits)
    torchs, truth = scores(torch.float32), scores(torch.float64)
    within(logits[there], torchs[there], truth[there], torch.float32)
    assert k.shape[1] == 2


# ---- tiles


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "tile"),
    [
        *((name, (32, 32)) for name in (*IN_ORDER, *RINGS)),
        *((name, (64, 16)) for name in ("plain", "in full", "sinks and window", "ring", "H2O")),
        *((name, (16, 16)) for name in LARGE),
    ],
)
def test_any_tiles(monkeypatch: pytest.MonkeyPatch, name: str, tile: tuple[int, int]) -> None:
    """What a table of configurations may say changes nothing: rows and slots of tiles, and splits."""
    case = (IN_ORDER | RINGS | LARGE)[name]

    def config(kernels: Kernels, role: str, options: Sequence[str] = ()) -> Config:
        return Config(16 if role == "decode" else tile[0], tile[1], waves=6.0)

    monkeypatch.setattr(Kernels, "config", config)
    check(replace(case, pads=(0, 7) if name not in LARGE else (3,)))


def test_the_log_sum_exp_of_many_queries() -> None:
    case, same, call = at_the_end(
        replace(IN_ORDER["plain"], chunks=(19,), score=ScoreSpec(sinks=True)), (0, 4)
    )
    q, k, v = case.qkv()
    positions = torch.arange(19)[None] - torch.tensor([[0], [4]])
    call = replace(call, q=q, k=k, v=v, positions=positions)
    out, lse = prefill(call, New(q, k, v, []), ("lse",))
    shown = (positions[:, None, :] <= positions[:, :, None]) & (positions[:, None, :] >= 0)

    def summed(dtype: torch.dtype) -> Tensor:
        raw = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)) * case.site.sm_scale
        raw = raw.masked_fill(~shown[:, None], -math.inf)
        sink = case.extra()["sinks"].to(dtype).view(1, -1, 1, 1).expand(2, -1, 19, 1)
        return torch.cat([raw, sink], -1).logsumexp(-1) / math.log(2)

    there = (positions >= 0)[:, None].expand_as(lse)
    within(lse[there], summed(torch.float32)[there], summed(torch.float64)[there], torch.float32)
    wanted, _ = oracle(case, same.held)
    within(*(x.masked_select(real(case)) for x in (out, same.out, wanted)), torch.float32)


@dataclass(frozen=True)
class OneLargeValue(Case):
    """A token that most looks at and that gives nothing, many that weigh alike, and one that hardly weighs anything,
    whose values are 3,000 times theirs."""

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv()
        q, k, v = torch.zeros_like(q), torch.zeros_like(k), v.clone()
        q[..., 0] = 8.0
        k[..., 0, 0], v[..., 0, :] = 4.5, 0.0  # p = exp(9) of the others'
        k[..., 7, 0] = -12.0  # p = exp(-24) of the others'
        v[..., 7, :] *= 3000.0
        return q, k, v


@pytest.mark.parametrize("layout", [CacheLayout(values=int8()), CacheLayout(values=uint(4, 8))], ids=str)
def test_one_large_value_takes_no_bits_of_the_others(layout: CacheLayout) -> None:
    """float16 holds probabilities times scales: divided by the largest scale, most of them would be next to nothing."""
    case = OneLargeValue(layout, (2, 1), (16, 16), torch.float16, chunks=(39, 1), pads=(0,))
    got, same = ran(case, "triton"), ran(case, "reference")
    wanted, _ = oracle(case, got.held)
    late = slice(20, None)
    within(*(x[:, :, late] for x in (got.out, same.out, wanted)), torch.float16)


# ---- columns


@pytest.mark.few(4)
@pytest.mark.parametrize("chunks", [(12, 9), (5, 6, 8)], ids=str)
@pytest.mark.parametrize(
    "retention",
    [
        H2O,
        replace(H2O, pooling="sum", rows=4),
        replace(H2O, pooling="max", granularity="layer"),
        replace(H2O, positions="in_cache"),
        Scored(0, 5, 2, "tova", "last", "mean", "layer"),
        Scored(2, 3, 4, "snapkv", "vote", "max", rows=4, smooth=3),
    ],
    ids=str,
)
def test_columns(monkeypatch: pytest.MonkeyPatch, retention: Scored, chunks: tuple[int, ...]) -> None:
    """What passes give to each token, as `kernels/reference/score_sums.py` sums it."""
    rotary = RotaryForm("half", 0, 16) if retention.in_cache else None
    keys = fp8(scale="head") if retention.in_cache else with_residual(int8(), 3, 1)
    layout = CacheLayout(keys, int8(), Slots(), retention)
    case = Case(
        layout, (4, 2), (16, 16), rotary=rotary, chunks=chunks, score=ScoreSpec(4.0, BiasSpec("alibi"))
    )
    gains: dict[str, list[list[dict[int, float]]]] = {"triton": [], "reference": [], "exact": []}
    exact: list[Tensor] = []

    def by_token(tokens: Tensor, gained: Tensor) -> list[dict[int, float]]:
        pairs = zip(tokens.flatten(0, 1).tolist(), gained.flatten(0, 1).tolist(), strict=True)
        return [{t: g for t, g in zip(*both, strict=True) if t >= 0} for both in pairs]

    def staying(
        token: Tensor, score: Tensor, gained: Tensor, positions: Tensor, before: Tensor, *args: Any
    ) -> Any:
        held = torch.where(torch.arange(token.shape[2]) < before[:, None], token.long(), -1)
        own = positions[:, None].expand(-1, token.shape[1], -1)
        gains["triton"].append(by_token(torch.cat([held, own], 2), gained))
        return own_staying(token, score, gained, positions, before, *args)

    def attend_columns(*args: Any, **more: Any) -> Any:
        exact.append(in_float64(args, more).unflatten(2, (len(args[8]), -1)).sum(2))
        return own_op(*args, **more)

    def after(score: Tensor, gained: Tensor, tokens: Tensor, *args: Any) -> Any:
        gains["reference"].append(by_token(tokens, gained))
        gains["exact"].append(by_token(tokens, exact[-1]))
        return own_after(score, gained, tokens, *args)

    own_staying, own_after = on_triton.staying, by_score.scores_after
    monkeypatch.setattr(on_triton, "staying", staying)
    monkeypatch.setattr(by_score, "scores_after", after)
    own_op = by_score.score_sums.OP
    monkeypatch.setattr(by_score.score_sums, "OP", attend_columns)
    mine, theirs = ran(case, "triton"), ran(case, "reference")
    for a, b in zip(mine.held, theirs.held, strict=True):
        assert torch.equal(a.sort(-1).values, b.sort(-1).values)
    assert len(gains["triton"]) == len(gains["reference"]) == len(chunks)
    heads = [[head for one in passes for head in one] for passes in gains.values()]
    assert all(x.keys() == y.keys() == z.keys() for x, y, z in zip(*heads, strict=True))
    within(*(torch.tensor([x[t] for x in of for t in sorted(x)]).double() for of in heads), torch.float32)


def in_float64(args: tuple[Any, ...], more: dict[str, Any]) -> Tensor:
    """The columns of `attend_columns`, from the same vectors."""
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            wide = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
            found: Tensor = by_score.score_sums.attend_columns(*wide, **more)[1]
        finally:
            torch.set_default_dtype(before)
    assert found.dtype == torch.float64
    return found


def test_columns_are_for_retention_by_scores() -> None:
    spec = KernelSpec("columns", Case(CacheLayout()).site, 2, 1, 16, 16, "float32")
    with pytest.raises(ValueError, match="retention by scores"):
        score_sums.generate(spec)


# ---- sites that share a cache


SHARED = {
    "contiguous": CacheLayout(int8(), int8(), Contiguous()),
    "ring": CacheLayout(int8(), int8(), Ring(), SinkWindow(2, 7)),
    "in full": CacheLayout(with_residual(int8(), 4), with_hadamard(with_residual(int8(), 3)), Paged(8)),
    "groups": CacheLayout(per_channel(4, 8, 8), int8()),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "turns"),
    [
        *((name, "") for name in SHARED),
        ("ring", "on append"),
        ("in full", "on append"),
        ("ring", "on read"),
        ("in full", "on read"),
    ],
)
def test_sites_that_share_a_cache(name: str, turns: str) -> None:
    """The first of them appends before attention, the last after; each has queries of its own."""
    layout = replace(SHARED[name], before_rope=turns == "on read")
    rotary = RotaryForm("half", 0, 16) if turns else None
    case = Case(layout, (2, 1), rotary=rotary, chunks=(9, 1, 5))
    q, k, v = case.qkv()
    g = torch.Generator().manual_seed(3)
    queries = {
        "first": q,
        "middle": torch.randn(q.shape, generator=g),
        "last": torch.randn(q.shape, generator=g),
    }
    pads, there, rope = torch.tensor(case.pads), real(case), case.rope()
    together = run_shared(case, queries, k, v)
    for share, own in queries.items():
        same = run(case.site, (own, k, v), case.chunks, pads, rope)
        wanted, _ = oracle(case, same.held, own)
        within(*(x.masked_select(there) for x in (together[share], same.out, wanted)), case.dtype, share)


def run_shared(case: Case, queries: dict[str, Tensor], k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """All sites of a layer group, chunk by chunk, on the same buffers."""
    limit, batch = case.total + 2, len(case.pads)
    table = shuffled(case.layout, batch, limit) if isinstance(case.layout.placement, Paged) else None
    pages = 0 if table is None else 1 + int(table.max())
    sizes = case.layout.buffers(case.heads[1], *case.dims, case.dtype, limit)
    fills = [float("nan") if b.dtype.is_floating_point else 77 for b in sizes]
    buffers = [
        torch.full((pages if b.paged else batch, *b.shape), fill, dtype=b.dtype)
        for b, fill in zip(sizes, fills, strict=True)
    ]
    lengths, start = torch.zeros(batch, dtype=torch.int64), 0
    outs: dict[str, list[Tensor]] = {share: [] for share in queries}
    for count in case.chunks:
        part = slice(start, start + count)
        positions = (lengths - (torch.tensor(case.pads) - start).clamp(0, count))[:, None] + torch.arange(
            count
        )
        for share, q in queries.items():
            site = replace(case.site, kernels="triton", share=share)
            new = [x[:, :, part] for x in (q, k, v)]
            outs[share].append(
                ops.cached_attention(
                    *new, buffers, positions, lengths, case.rope(), limit, site.to_json(), page_table=table
                )
            )
        lengths, start = positions[:, -1] + 1, start + count
    return {share: torch.cat(parts, 2) for share, parts in outs.items()}


PAIR = with_residual(int8(), 3)
ROLLED = (
    # A window of 19, of which tiles of 16 have one that is full, and may be plain.
    (Ring(), Window(19), MaskSpec("sliding", 19), model_dtype(), True),
    (Ring(), Window(19), MaskSpec("sliding", 25), model_dtype(), True),
    (Paged(8), Window(19), MaskSpec("sliding", 19), int8(), True),
    (Ring(), Window(19), MaskSpec("sliding", 18), model_dtype(), False),
    (Paged(8), Window(32), MaskSpec("sliding", 31), int8(), False),
    (Ring(), Window(19), MaskSpec("chunked", 32), model_dtype(), False),
    (Ring(), SinkWindow(2, 17), MaskSpec("sliding", 19), model_dtype(), False),
    (Ring(), Window(19), MaskSpec("sliding", 19), PAIR, False),  # some tokens are in full elsewhere
)


@pytest.mark.parametrize(("placement", "retention", "mask", "storage", "plain"), ROLLED)
def test_a_window_of_the_model_hides_nothing_that_a_ring_of_no_more_tokens_holds(
    placement: Placement, retention: Retention, mask: MaskSpec, storage: Storage, plain: bool
) -> None:
    """Then a step's full tiles need no mask. What a shorter window or a chunk hides is held, and is not seen; of sinks,
    which every slot behind them leaves alone, a window hides what is older."""
    layout = CacheLayout(storage, storage, placement, retention)
    # A ring that has wrapped in some sequences, and one that is not full yet; behind a prompt that wraps in the middle.
    check(Case(layout, mask=mask, chunks=(25, 1, 14, 1), pads=(0, 3, 24)))
    text = generate(spec("decode", layout, mask=mask)[0]).text
    assert ("plain_from" in text) == plain
