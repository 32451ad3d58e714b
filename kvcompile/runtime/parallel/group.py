"""The processes of a group: ranks of tensor parallelism, stages, or both.

Rank s * tensor + t is rank t of stage s.

They meet once a rank's program is ready, and rank 0 has verified those of all: in the group of a caller's
`device_mesh`, over all processes of a default group that the caller has initialized, or over those that `torchrun` has
started. What each brings is compared before anything runs: one plan, the same graphs, the same software, and of the
weights those that it runs with, which must be that part of rank 0's.

A process that dies closes its connections, one that hangs lets the time limit pass; both are a `RankError` on the
others, and the module refuses every further call: its caches may differ from rank to rank.
"""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvcompile.errors import InputError, PlanError, RankError
from kvcompile.runtime.parallel.options import Parallel

_AXIS = "tensor"  # of a mesh of several dimensions
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Brought:
    """What a rank brings to the start.

    same:    what all ranks must have in common, by name
    part:    a digest of the weights that it runs with
    parts:   rank 0's: what `part` must be on each rank
    weights: rank 0's: a digest of all weights
    problem: why rank 0 does not begin
    """

    same: Mapping[str, str] = field(default_factory=dict)
    part: str = ""
    parts: tuple[str, ...] = ()
    weights: str = ""
    problem: str = ""


class Group:
    """A group of ranks.

    control: of all, over gloo: whatever is no tensor of a pass
    between: of all: what goes from stage to stage, and the last one's outputs; None: there is one stage
    data:    of the ranks of this one's stage: collectives of graphs
    """

    def __init__(
        self,
        data: dist.ProcessGroup,
        control: dist.ProcessGroup,
        options: Parallel,
        between: dist.ProcessGroup | None = None,
    ):
        self.data, self.control, self.options, self.between = data, control, options, between
        self.rank, self.size = dist.get_rank(control), dist.get_world_size(control)
        self.failed: str | None = None

    @property
    def stage(self) -> int:
        """Which stage this rank is of."""
        return self.rank // self.options.tensor

    @property
    def tensor_rank(self) -> int:
        """Which of its stage's ranks it is."""
        return self.rank % self.options.tensor

    @property
    def name(self) -> str:
        """That graphs know the group by."""
        return str(self.data.group_name)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the same rank of the stage before has sent."""
        value = torch.empty(tuple(shape), dtype=dtype, device=device)
        dist.recv(value, group=self.between, group_src=self.rank - self.options.tensor)
        return value

    def send(self, value: Tensor) -> None:
        """Give a value to the same rank of the next stage."""
        dist.send(value.contiguous(), group=self.between, group_dst=self.rank + self.options.tensor)

    def share(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The last stage's values on all ranks; elsewhere `values` are overwritten with them."""
        given = [value.contiguous() for value in values]
        for value in given:
            dist.broadcast(value, group=self.between, group_src=self.size - self.options.tensor)
        return given

    def compare(self, mine: Brought) -> Brought:
        """Refuse to begin unless all ranks bring the same; returns what rank 0 brings.

        Raises:
            RankError: they do not, with what differs and on which ranks; rank 0 did not get so far, with its reason; or
                one does not answer in time.
        """
        theirs: list[Any] = [None] * self.size
        with self.told("start"):
            dist.all_gather_object(theirs, mine, group=self.control)
        brought: list[Brought] = theirs
        first = brought[0]
        if first.problem:
            self.failed = f"rank 0 has not begun: {first.problem}"
            raise RankError(self.failed)
        problems = []
        for name in first.same:
            others = [rank for rank, own in enumerate(brought) if own.same.get(name) != first.same[name]]
            if others:
                found = ", ".join(f"{brought[rank].same.get(name)} on rank {rank}" for rank in others)
                problems.append(f"{name}: {first.same[name]} on rank 0, {found}")
        for rank, (own, wanted) in enumerate(zip(brought, first.parts, strict=True)):
            if own.part != wanted:
                problems.append(
                    f"weights: the part of rank {rank} is {wanted} on rank 0, and {own.part} on rank {rank}"
                )
        if problems:
            self.failed = f"the ranks do not have the same: {'; '.join(problems)}"
            raise RankError(f"{self.failed}. Start all ranks with one version, one checkpoint and one recipe")
        return first

    def agree(self, ids: Tensor, mask: Tensor | None) -> None:
        """Refuse a call that other ranks make with other tokens.

        On a GPU only prompts are compared: a step waits for no value there.

        Raises:
            InputError: they do.
            RankError: a rank does not answer in time.
        """
        if ids.device.type != "cpu" and ids.shape[1] == 1:
            return
        own = torch.tensor([_number(ids, mask)])
        found = [torch.zeros_like(own) for _ in range(self.size)]
        with self.told("call"):
            dist.all_gather(found, own, group=self.control)
        others = [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]
        if others:
            raise InputError(
                f"the ranks were called with different tokens: rank {', '.join(map(str, others))} not as rank 0. Give "
                "all ranks of a group the same calls"
            )

    def share_randomness(self, generator: torch.Generator | None = None) -> None:
        """Give all ranks rank 0's state of random numbers, so that they draw the same tokens."""
        state = torch.get_rng_state() if generator is None else generator.get_state()
        with self.told("call"):
            dist.broadcast(state, group=self.control, group_src=0)
        if generator is None:
            torch.set_rng_state(state)
        else:
            generator.set_state(state)

    @contextmanager
    def told(self, when: str) -> Iterator[None]:
        """What goes wrong with another rank, as an error that says so; from then on the group is of no use.

        Raises:
            RankError: as said.
        """
        if self.failed is not None:
            raise RankError(
                f"rank {self.rank} of {self.size} is out of use: {self.failed}. Start the ranks again"
            )
        try:
            yield
        except RuntimeError as error:
            if not _of_ranks(error):
                raise
            line = " ".join(str(error).split())[:300]
            limit = self.options.start if when == "start" else self.options.timeout
            self.failed = f"another rank has died, or did not answer within {limit:g} s ({line})"
            raise RankError(
                f"rank {self.rank} of {self.size}: {self.failed}. What is in the caches is lost: start the ranks again"
            ) from error

    @contextmanager
    def used(self) -> Iterator[None]:
        """A pass over the graphs of all ranks: whatever fails in it, leaves them at different places.

        Raises:
            RankError: another rank failed, or this one has before.
        """
        try:
            with self.told("call"):
                yield
        except BaseException as error:
            self.failed = self.failed or f"a pass was broken off ({type(error).__name__})"
            raise


def check_world(options: Parallel, mesh: Any = None) -> None:
    """Refuse before anything is computed what no group can be made for.

    Raises:
        PlanError: other processes than `options` says, or none; stages in a mesh.
    """
    if mesh is not None and options.stages > 1:
        raise PlanError(
            "device_mesh: of stages, the groups are made of the default one: rank stage * tensor + t; leave it out"
        )
    if mesh is not None:
        size, where = _of_mesh(mesh).size(), "device_mesh has"
    elif dist.is_available() and dist.is_initialized():
        size, where = dist.get_world_size(), "the default process group has"
    elif all(name in os.environ for name in _VARIABLES):
        size, where = int(os.environ["WORLD_SIZE"]), "torchrun has started"
    else:
        raise PlanError(
            f"parallel: {options} needs {options.size} processes, and this one was started alone: run "
            f"`torchrun --nproc-per-node {options.size} ...`, initialize torch.distributed, or give device_mesh="
        )
    if size != options.size:
        raise PlanError(f"parallel: {options}: {options.size} ranks, and {where} {size} processes")


def rank_of_process(mesh: Any = None) -> int:
    """This process's rank in a mesh's group, else in the default one, or as torchrun has started it; 0 where it was
    started alone."""
    if mesh is not None:
        return dist.get_rank(_of_mesh(mesh))
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


def join(options: Parallel, device: torch.device, mesh: Any = None) -> Group:
    """Meet the other ranks.

    Raises:
        RankError: they do not come in time.
    """
    start = datetime.timedelta(seconds=options.start)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        if mesh is None and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=start)
        ranks = dist.get_process_group_ranks(_of_mesh(mesh) if mesh is not None else dist.group.WORLD)

        def group_of(members: Sequence[int], kind: str, seconds: float) -> Any:
            limit = datetime.timedelta(seconds=seconds)
            return dist.new_group(list(members), timeout=limit, backend=kind, use_local_synchronization=True)

        control, data = group_of(ranks, "gloo", options.start), group_of(ranks, backend, options.timeout)
        between = None
        if options.stages > 1:
            between, first = data, dist.get_rank(control) // options.tensor * options.tensor
            data = group_of(ranks[first : first + options.tensor], backend, options.timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"the {options.size} ranks did not meet within {options.start:g} s: {' '.join(str(error).split())[:300]}"
        ) from error
    assert data is not None and control is not None
    return Group(data, control, options, between)


def _of_mesh(mesh: Any) -> dist.ProcessGroup:
    """The group of a mesh: of its dimension "tensor" (or "tp"), or of the only one.

    Raises:
        PlanError: it has several dimensions and none of that name.
    """
    names = mesh.mesh_dim_names or ()
    for name in (_AXIS, "tp"):
        if name in names:
            group = mesh.get_group(name)
            assert isinstance(group, dist.ProcessGroup)
            return group
    if mesh.ndim != 1:
        raise PlanError(
            f"device_mesh: expected one dimension, or one that is named {_AXIS!r}; got {mesh.ndim}, "
            f"named {', '.join(names) or 'nothing'}"
        )
    group = mesh.get_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def _number(ids: Tensor, mask: Tensor | None) -> int:
    """Ids and mask as one number of 63 bits."""
    hashed = hashlib.sha256()
    for tensor in (ids, mask):
        if tensor is not None:
            hashed.update(f"{tuple(tensor.shape)}".encode())
            hashed.update(tensor.to("cpu", torch.int64).contiguous().numpy().tobytes())
    return int.from_bytes(hashed.digest()[:8], "big") >> 1


def _of_ranks(error: RuntimeError) -> bool:
    """Whether an error is one of communication."""
    text = str(error).lower()
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "process group", "peer")
    return isinstance(error, kinds) or any(word in text for word in words)
