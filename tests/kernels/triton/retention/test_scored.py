"""Shares that decode adds to scores itself, where it joins the parts of a head: those that role score adds."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvcompile.kernels.spec import ScoreSpec
from kvcompile.kernels.triton.host import ops_write
from kvcompile.kernels.triton.retention import score as score_role
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import CacheLayout, Scored, Slots, int8, model_dtype
from tests.kernels.triton.attend.test_attend import at_the_end, decoded
from tests.support.triton_attention import H2O, Case
from tests.support.triton_write import Site, kernels_folder  # noqa: F401  (a fixture)


# Smaller examples would take minutes where it fails.
@settings(max_examples=10, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    score=st.sampled_from(("sum", "mean_age", "last")),
    pooling=st.sampled_from(("sum", "mean", "max")),
    heavy=st.sampled_from((4, 23, 28, 60)),
    heads=st.sampled_from(((4, 2), (6, 2), (3, 1))),
    storage=st.sampled_from((model_dtype(), int8())),
    sinks=st.booleans(),
    programs=st.sampled_from((1, 2, 3, 7, 30)),
    tile=st.sampled_from((4, 16)),
)
def test_the_program_that_joins_a_head_adds_what_score_would(
    score: str,
    pooling: str,
    heavy: int,
    heads: tuple[int, int],
    storage: object,
    sinks: bool,
    programs: int,
    tile: int,
) -> None:
    """Bit for bit, of one part and of several; a sequence of padding keeps its scores, and so do free slots."""
    retention = replace(H2O, heavy=heavy, score=score, pooling=pooling)
    layout = CacheLayout(storage, storage, Slots(), retention)  # type: ignore[arg-type]
    case = Case(layout, heads, score=ScoreSpec(sinks=sinks), chunks=(24, 15, 1))
    _, _, call = at_the_end(case, (0, 30, 40))
    call = replace(call, buffers=call.buffers[:-2])
    budget = retention.tokens
    before = torch.rand(3, heads[1], budget + 3, generator=torch.Generator().manual_seed(3))
    arrivals = torch.zeros(3, heads[0], dtype=torch.int32)
    out, lse, logits, levels = decoded(
        call, programs, tile, "joined", "listed", "logits", arrivals=arrivals.clone()
    )
    wanted = before.clone()
    spec = replace(call.kernels.spec("score"), block_n=score_role.block_n(budget), block_m=tile)
    ops_write.score(wanted[..., :budget], logits, levels, lse, call.positions, spec.to_json())
    found = before.clone()
    (alone,) = decoded(
        call,
        programs,
        tile,
        "joined",
        "listed",
        "logits",
        "scored",
        arrivals=arrivals,
        score=found[..., :budget],
    )
    assert torch.equal(alone, out)
    assert torch.equal(found, wanted) and torch.equal(found[2], before[2])
    assert torch.equal(found[1, :, 10:], before[1, :, 10:]) and not torch.equal(found[1], before[1])


def test_who_adds_shares() -> None:
    """Not who has a head in several programs, who would read for long, nor who has one of several heads."""

    def spec(retention: Scored, **changes: int) -> KernelSpec:
        return replace(Site(CacheLayout(placement=Slots(), retention=retention)).spec("decode"), **changes)

    few = Scored(4, 508, 512)
    assert score_role.adds(spec(few))
    assert not score_role.adds(spec(replace(few, granularity="layer")))
    assert score_role.adds(spec(few, num_qo_heads=32, num_kv_heads=2, block_m=16))
    assert not score_role.adds(spec(few, num_qo_heads=34, num_kv_heads=2, block_m=16))
    assert score_role.adds(spec(Scored(4, 16380 - 512, 512)))
    assert not score_role.adds(spec(Scored(4, 16381 - 512, 512)))
