"""What ranks bring to the start: rank 0 proves and reads all, another one reads its own part of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kvcompile
from kvcompile import api
from kvcompile.api import brought_by
from kvcompile.errors import RankError, VerificationError
from kvcompile.original.digest import of_tensors
from kvcompile.pipeline import divided
from kvcompile.runtime.parallel.group import Brought, Group
from kvcompile.runtime.parallel.options import Parallel
from tests.support.models import TinyConfig, TinyLlama, make
from tests.support.processes import spawn
from tests.support.ranks import over_ranks


def llama() -> Any:
    return make(TinyLlama, TinyConfig(num_heads=8, num_kv_heads=4))


def compared(rank: int, brought: list[Brought], monkeypatch: pytest.MonkeyPatch) -> Brought:
    """What a group of as many ranks says, seen from one of them."""
    group = Group.__new__(Group)
    group.rank, group.size, group.options = rank, len(brought), Parallel(len(brought))
    group.failed, group.control = None, None  # type: ignore[assignment]

    def gathered(into: list[Any], mine: Any, group: Any) -> None:
        into[:] = brought

    monkeypatch.setattr("torch.distributed.all_gather_object", gathered)
    return group.compare(brought[rank])


def test_a_rank_reads_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    over = over_ranks(model, 2)

    def bring(rank: int) -> Brought:
        return brought_by(rank, model, over.front, over.plan)

    first, second = bring(0), bring(1)
    assert first.same == second.same and first.part != second.part
    assert first.parts == (first.part, second.part) and first.weights and not second.weights
    for rank in (0, 1):
        assert compared(rank, [first, second], monkeypatch).weights == first.weights
    weight = model.layers[0].q_proj.weight  # by columns: rows of it are of one rank each
    half = len(weight) // 2
    with torch.no_grad():
        weight[0, 0] += 1
    assert bring(1).part == second.part and bring(0).part != first.part
    with torch.no_grad():
        weight[half, 0] += 1
    other = bring(1)
    for rank in (0, 1):
        told = rf"weights: the part of rank 1 is {second.part} on rank 0, and {other.part} on rank 1"
        with pytest.raises(RankError, match=told):
            compared(rank, [first, other], monkeypatch)
    staged = divided(over.front, over.plan, 1, 2)
    last = brought_by(2, model, staged, over.plan).part  # of the second stage
    with torch.no_grad():
        model.embed.weight[0, 0] += 1
    assert brought_by(2, model, staged, over.plan).part == last and bring(1).part != other.part


def test_what_rank_0_could_not_do_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = [Brought(problem="VerificationError: layer 3 differs"), Brought({"plan": "x"}, "part")]
    with pytest.raises(RankError, match="rank 0 has not begun: VerificationError: layer 3 differs"):
        compared(1, brought, monkeypatch)


def test_a_digest_of_tensors_knows_names_and_bytes_and_no_order() -> None:
    one, two = ("a", torch.arange(6.0)), ("b", torch.arange(6.0).view(2, 3))
    known = of_tensors([one, two])
    assert known == of_tensors([two, one])
    others = [[one], [("b", one[1]), two], [one, ("b", two[1] + 1)], [one, ("b", two[1].double())]]
    assert len({known, *(of_tensors(each) for each in others)}) == 5


def _fails(rank: int, ranks: int) -> None:
    def verify(model: nn.Module, *given: Any) -> Any:
        assert rank == 0  # no other rank runs the original
        raise VerificationError("layer 3 differs", 3, 1.0)

    api.verify = verify  # type: ignore[assignment]
    kind = RankError if rank else VerificationError
    with pytest.raises(kind, match="layer 3 differs"):
        kvcompile.optimize(llama(), max_tokens=64, compile={"mode": "none"}, parallel={"tensor": ranks})


@pytest.mark.slow
def test_a_failed_verification_ends_all_ranks() -> None:
    spawn(2, _fails)
