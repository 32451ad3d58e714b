"""An engine over ranks: rank 0 plans and chooses tokens, and all others do what it does, each with its own heads.

Every rank has the same rows, pages and room on the host. What rank 0 carries out (moves, passes, what goes to the host
and comes back) it tells the others first, as data, over gloo, and they do the same in the same order. So tables, pages,
snapshots and what is kept on the host are the same everywhere, and the collectives inside of passes meet.

A rank that fails in anything leaves the others with a cache that is not theirs: all ranks end, and say why. Requests
that run fail then; whoever started the ranks starts them again.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from kvcompile.errors import KVCompileError, PlanError, RankError, ServeError
from kvcompile.recipe.serve import ServeConfig, bytes_of
from kvcompile.runtime.module import CachedModel
from kvcompile.runtime.parallel.group import Group
from kvcompile.serve.capacity import Capacity, capacity
from kvcompile.serve.moves import Fork, Move, Snapshot
from kvcompile.serve.pages import Key
from kvcompile.serve.passes import Passes, Piece
from kvcompile.serve.shared import Shared
from kvcompile.serve.tiers import Below, Tier, Tiers

log = logging.getLogger(__name__)

Made = TypeVar("Made")
_BEATS = 4  # signs of life within the time limit of a rank


class Channel:
    """From rank 0 to all others, in order; made by all ranks at once."""

    def __init__(self, group: Group):
        self.group = group
        limit = datetime.timedelta(seconds=group.options.timeout)
        ranks = dist.get_process_group_ranks(group.control)
        with group.told("start"):
            made = dist.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=True)
        assert made is not None
        self._channel: dist.ProcessGroup = made
        # Held while all ranks do something that nothing else may be told beside.
        self.alone = threading.RLock()

    def tell(self, what: str, *given: Any) -> None:
        """Let all other ranks do something.

        Raises:
            RankError: one of them is gone.
        """
        with self.alone:
            self._send([(what, given)])

    def hear(self) -> tuple[str, tuple[Any, ...]]:
        """What rank 0 told next.

        Raises:
            RankError: rank 0 is gone, or gave no sign of life in time.
        """
        message: list[Any] = [None]
        self._send(message)
        found: tuple[str, tuple[Any, ...]] = message[0]
        return found

    def _send(self, message: list[Any]) -> None:
        group = self.group
        try:
            with group.told("call"):
                dist.broadcast_object_list(message, group=self._channel, group_src=0)
        except BaseException as error:
            # Half of it may be out, and what comes next would be taken for the rest.
            group.failed = group.failed or f"what rank 0 tells was broken off ({type(error).__name__})"
            raise

    @contextmanager
    def starting(self) -> Iterator[None]:
        """What a rank does between two agreements: where it fails, the others must not wait for the next one."""
        try:
            yield
        except KVCompileError as error:
            with suppress(ServeError, RankError):
                self.agreed("starting the engine", partial(_raised, error))
            raise

    def agreed(self, what: str, make: Callable[[], Made]) -> list[Made]:
        """What `make` gives on each rank, rank 0's first; every rank calls this.

        Raises:
            ServeError: it failed on one of them, with its reason.
        """
        mine: tuple[Any, str] = (None, "")
        try:
            mine = (make(), "")
        except KVCompileError as error:
            mine = (None, str(error))
        found: list[Any] = [None] * self.group.size
        with self.group.told("start"):
            dist.all_gather_object(found, mine, group=self.group.control)
        problems = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(found) if reason]
        if problems:
            raise ServeError(f"{what} failed on {'; '.join(problems)}")
        return [value for value, _ in found]


def _raised(error: KVCompileError) -> None:
    raise error


def least(rooms: Sequence[Capacity]) -> Capacity:
    """What all ranks have room for."""
    first = rooms[0]
    groups = tuple(
        replace(own[0], pages=min(group.pages for group in own))
        for own in zip(*(room.groups for room in rooms), strict=True)
    )
    return replace(first, rows=min(room.rows for room in rooms), groups=groups)


def room_of(module: CachedModel, config: ServeConfig, chunk: int, channel: Channel | None) -> Capacity:
    """What an engine's cache has room for: on all of its ranks, where it has several.

    Raises:
        LimitError, or ServeError where there are several ranks: not one text fits.
    """

    def own() -> Capacity:
        wanted = config.max_sequences or module.plan.limits.max_batch
        given = None if config.memory is None else bytes_of(config.memory)
        return capacity(module.plan, module.cache.shape, module.device, wanted, given, chunk)

    return own() if channel is None else least(channel.agreed("dividing the memory", own))


def lead(module: CachedModel, config: ServeConfig, chunk: int, store: bool) -> Channel | None:
    """What rank 0 tells the others by, who are in `follow`; None: the module is not on several ranks.

    Raises:
        ServeError: this is another rank than 0.
        PlanError: a store of files, which ranks do not have.
    """
    group = module.group
    if group is None:
        return None
    check_stages(group)
    if group.rank:
        raise ServeError(
            f"an engine is made on rank 0 of {group.size}, and this is rank {group.rank}: call "
            "kvcompile.serve.follow(module) here"
        )
    if store:
        raise PlanError(
            "store: ranks have none: what a page holds is on all of them; leave it out, or use one rank"
        )
    channel = Channel(group)
    channel.tell("settings", config, chunk)
    return channel


def check_stages(group: Group) -> None:
    """Raises PlanError where a module is over stages."""
    if group.options.stages > 1:
        raise PlanError(
            f"stages: {group.options.stages}: an engine keeps the pages of all layers on each of its ranks; serve with "
            "tensor alone, or generate"
        )


def follow(module: CachedModel) -> None:
    """Serve as one of the ranks that an engine on rank 0 leads; returns when that engine is closed.

    Raises:
        ServeError: the module is on no ranks, or this is rank 0; not enough memory on one of them.
        RankError: another rank is gone; start all of them again.
    """
    group = module.group
    if group is None or group.rank == 0:
        where = "on no ranks" if group is None else "rank 0"
        raise ServeError(f"follow: this module is {where}: make a kvcompile.serve.Engine of it")
    check_stages(group)
    channel = Channel(group)
    what, (config, chunk) = channel.hear()
    assert what == "settings", what
    room = room_of(module, config, chunk, channel)
    with channel.starting():
        tiers = _tiers(module, room, config)
    made: list[Passes] = []
    channel.agreed("allocating the cache", lambda: made.append(Passes(module, room, tiers)))
    (passes,) = made
    while True:
        what, given = channel.hear()
        if what == "end":
            return
        try:
            _do(passes, tiers, group, what, given)
        except BaseException as error:
            group.failed = group.failed or f"{what} failed ({type(error).__name__}: {error})"
            log.exception("rank %d of %d", group.rank, group.size)
            raise


def _do(passes: Passes, tiers: Tiers, group: Group, what: str, given: tuple[Any, ...]) -> None:
    match what:
        case "idle":
            pass  # rank 0 lives
        case "fetch" | "limit" | "release":
            getattr(tiers, what)(*given)
        case "warm":
            passes.warm(*given)
            _together(group)
        case "move" | "keep" | "fork" | "leave" | "begin_again" | "pass_apart" | "pass_packed":
            getattr(passes, what)(*given)
        case _:
            raise RankError(f"rank 0 told {what!r}, which this version does not know")


def _together(group: Group) -> None:
    """All ranks have compiled; one may have taken longer than a pass may wait."""
    with group.told("start"):
        dist.barrier(group=group.control)


def _tiers(module: CachedModel, room: Capacity, config: ServeConfig) -> Tiers:
    """As rank 0 has them."""
    snapshots = None if config.snapshot_memory is None else bytes_of(config.snapshot_memory)
    return Shared.of(module, room, config.prefix_cache, bytes_of(config.host_memory), snapshots, None).tiers


class Leading(Passes):
    """Rank 0's passes: whatever they do, the others do, too."""

    def __init__(self, module: CachedModel, room: Capacity, tiers: Tiers, channel: Channel):
        self._channel, self._ended = channel, False
        self.beat = channel.group.options.timeout / _BEATS
        allocate = partial(super().__init__, module, room, tiers)
        channel.agreed("allocating the cache", allocate)

    @property
    def failed(self) -> str | None:
        return self._channel.group.failed

    @contextmanager
    def _everywhere(self, what: str, *given: Any) -> Iterator[None]:
        """The others do something while rank 0 does it; where rank 0 fails, nobody knows what the others have.

        Other threads have to wait with what they tell: who compiles (`warm`) does not listen.
        """
        with self._channel.alone:
            self._channel.tell(what, *given)
            try:
                yield
            except BaseException as error:
                group = self._channel.group
                group.failed = group.failed or f"{what} failed on rank 0 ({type(error).__name__}: {error})"
                raise

    def idle(self) -> None:
        if self._channel.alone.acquire(blocking=False):  # else they are told something anyway
            try:
                with suppress(RankError):  # `failed` tells it
                    self._channel.tell("idle")
            finally:
                self._channel.alone.release()

    def warm(self, shapes: Sequence[tuple[int, int]], packed: bool) -> None:
        with self._everywhere("warm", tuple(shapes), packed):
            super().warm(shapes, packed)
            _together(self._channel.group)

    def move(self, moves: Sequence[Move], computed: dict[int, int]) -> None:
        if not moves:
            super().move(moves, computed)
            return
        with self._everywhere("move", tuple(moves), computed):
            super().move(moves, computed)

    def keep(self, snapshot: Snapshot) -> None:
        with self._everywhere("keep", snapshot):
            super().keep(snapshot)

    def fork(self, fork: Fork) -> None:
        with self._everywhere("fork", fork):
            Passes.move(self, fork.moves, {})  # the others do these with the fork
            self.rows.fork(fork.source, fork.target)

    def leave(self, text: int) -> None:
        if self.failed is None:
            with suppress(RankError):  # `failed` tells it
                self._channel.tell("leave", text)
        super().leave(text)

    def begin_again(self) -> None:
        if self.failed is None:
            with suppress(RankError):  # `failed` tells it
                self._channel.tell("begin_again")
        super().begin_again()

    def pass_apart(self, pieces: Sequence[Piece]) -> tuple[list[int], Tensor]:
        with self._everywhere("pass_apart", tuple(pieces)):
            return super().pass_apart(pieces)

    def pass_packed(self, pieces: Sequence[Piece]) -> Tensor:
        with self._everywhere("pass_packed", tuple(pieces)):
            return super().pass_packed(pieces)

    def close(self) -> None:
        if self.failed is None and not self._ended:
            self._ended = True
            with suppress(RankError):  # they have ended already
                self._channel.tell("end")


class LeadingTiers:
    """What rank 0's scheduler asks of its tiers; what changes them, changes those of all ranks."""

    def __init__(self, own: Tiers, channel: Channel):
        self._own, self._channel = own, channel
        self._fetched = False
        self.takes_pages, self.takes_snapshots = own.takes_pages, own.takes_snapshots

    def lookup(self, key: Key) -> bool:
        return self._own.lookup(key)

    @property
    def reading(self) -> bool:
        return self._own.reading

    def begin(self, pages: Iterable[Key], snapshots: Iterable[Key]) -> bool:
        return self._own.begin(pages, snapshots)  # ranks have no store of files

    def forget(self) -> None:
        self._own.forget()

    def fetch(self, pages: Iterable[Key], snapshots: Iterable[Key]) -> Tier | None:
        pages, snapshots = tuple(pages), tuple(snapshots)
        if pages or snapshots:
            self._channel.tell("fetch", pages, snapshots)
            self._fetched = True
        return self._own.fetch(pages, snapshots)

    def limit(self, room: int) -> None:
        self._tell("limit", room)
        self._own.limit(room)

    def release(self) -> None:
        if self._fetched:
            self._tell("release")
            self._fetched = False
        self._own.release()

    def _tell(self, what: str, *given: Any) -> None:
        """What a text gives back is told as far as ranks are there to hear it: a text ends without them, too."""
        if self._channel.group.failed is None:
            with suppress(RankError):  # `failed` tells it
                self._channel.tell(what, *given)


def below(tiers: Tiers, channel: Channel | None) -> Below:
    """What a scheduler asks."""
    return tiers if channel is None else LeadingTiers(tiers, channel)
