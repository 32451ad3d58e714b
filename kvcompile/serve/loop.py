"""The engine's thread: notes that callers left, and a step, again and again.

One thread owns the steps, the scheduler and what passes run over. What callers want of it they leave as a note, which
the next turn begins with; what they read is behind `_changed`.

A pass that fails ends the requests in it. What notes who has what (the scheduler, rows) has no memory of its own to
fail with but Python's: where it does fail on its way, nobody knows what is whose, so all requests end, and the engine
begins again with nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from torch import Tensor

from kvcompile.errors import KVCompileError, RankError, ServeError
from kvcompile.serve.live import LiveRequest, LiveText
from kvcompile.serve.moves import Chunk, StepPlan
from kvcompile.serve.passes import Passes
from kvcompile.serve.pick import Picked, pick
from kvcompile.serve.request import TokenLogprob
from kvcompile.serve.schedule import Scheduler
from kvcompile.serve.stats import Speed
from kvcompile.serve.tiers import Tiers

log = logging.getLogger(__name__)

Noted = TypeVar("Noted")


class Loop:
    """Takes steps by a scheduler's plans, until it is closed or a defect ends it."""

    def __init__(self, scheduler: Scheduler, passes: Passes, tiers: Tiers, packed: bool):
        """packed: whether all texts of a step take one pass"""
        self._scheduler, self._passes, self._tiers, self._packs = scheduler, passes, tiers, packed
        self._texts: dict[int, LiveText] = {}
        self._requests: dict[str, LiveRequest] = {}
        requests = ("requests", "finished", "failed", "cancelled")
        tokens = ("prompt_tokens", "completion_tokens", "cached_tokens")
        self._counts: dict[str, int] = dict.fromkeys((*requests, *tokens), 0)
        self._steps = self._packed_steps = 0
        self._speed = Speed()
        self._inbox: list[tuple[LiveRequest, Callable[[LiveRequest], None]]] = []
        self._changed = threading.Condition()
        self._closing = self._closed = False
        self._idle = False  # the last turn had nothing to do but to wait for files
        self._half_done = False  # notes of who has what were changed, and that did not come to its end
        tiers.on_read(self._wake)
        self._thread: threading.Thread | None = None

    def _tell(self, request: LiveRequest, note: Callable[[LiveRequest], None]) -> None:
        """Leave a note about a request for the next step."""
        with self._changed:
            self._inbox.append((request, note))
            self._changed.notify_all()

    # ---- turns

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvcompile engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    wanted = self._changed.wait_for(self._has_work, self._passes.beat)
                    if self._closed:
                        break
                if wanted:
                    self._turn()
                else:
                    self._passes.idle()
                if self._passes.failed is not None:  # no step can be taken any more
                    self._fail(list(self._texts), RankError(self._passes.failed))
                    break
        finally:  # also after a defect of ours: nobody may wait for ever
            with self._changed:
                self._closing = self._closed = True
            for _ in range(3):  # there may be no memory to tell it
                with suppress(MemoryError):
                    self._nobody_waits()
                    break

    def _nobody_waits(self) -> None:
        with self._changed:
            for request in list(self._requests.values()):
                request.handle.fail(ServeError("the engine was closed before this request had ended"))
                self._over(request)

    def _has_work(self) -> bool:
        waits = self._idle and self._tiers.reading
        return bool(self._inbox or self._closed or (self._scheduler.texts and not waits))

    def _wake(self) -> None:
        """What was read is there."""
        with self._changed:
            self._changed.notify_all()

    def _turn(self) -> None:
        """What came since the last step, and a step."""
        everyone: dict[str, LiveRequest] = {}
        try:
            with self._changed:
                everyone, notes, self._inbox = dict(self._requests), self._inbox, []
            for request, note in notes:
                texts = [live.text.id for live in request.texts]
                self._guarded(texts, partial(note, request), {request.handle.id: request})
            self._step()
        except Exception as error:  # a defect of ours, or no memory to note who has what
            log.exception("the engine's step failed")
            self._begin_again(error, everyone)

    def _begin_again(self, error: Exception, everyone: Mapping[str, LiveRequest]) -> None:
        """All requests end with an error, and nobody has anything.

        everyone: those that were here when the turn began; who came since then has nothing yet, and goes on
        """
        failed = {**everyone, **self._requests_of(self._texts)}
        with self._changed:
            self._texts.clear()
            self._scheduler.begin_again()
            self._passes.begin_again()
            self._half_done = False
        for request in failed.values():
            self._failed(request, error)

    def _enter(self, request: LiveRequest) -> None:
        with self._changed:
            if self._requests.get(request.handle.id) is not request:
                return  # whoever submitted it was told that it is not here
            self._half_done = True
            for live in request.texts:
                self._texts[live.text.id] = live
                self._scheduler.add(live.text)
            self._half_done = False

    def _cancel(self, request: LiveRequest) -> None:
        for live in request.texts:
            if live.finish is None and live.text.id in self._texts:
                live.stop()
                self._leave(live)
        self._finished(request)

    def _step(self) -> None:
        """One step of the scheduler's plan."""
        plan = self._scheduler.plan()
        self._idle = not plan
        if not plan:
            return
        self._steps += 1
        now = time.monotonic()
        for id in plan.texts:
            request = self._texts[id].request
            request.began = request.began or now
        try:
            self._passes.move(plan.moves, {id: live.text.computed for id, live in self._texts.items()})
        except Exception as error:
            self._fail([*plan.texts, *plan.moved], error)
            return
        if self._packs and len(plan.chunks) + bool(plan.decodes) > 1:
            self._guarded(plan.texts, partial(self._pack, plan))
            return
        for batch in self._passes.batches(plan.decodes):
            self._guarded(batch, partial(self._decode, batch))
        for chunk in plan.chunks:
            if chunk.text in self._texts:  # a text of the same request may have failed in this step
                self._guarded([chunk.text], partial(self._prefill, chunk))

    def _guarded(
        self,
        texts: Sequence[int],
        run: Callable[[], None],
        before: Mapping[str, LiveRequest] | None = None,
    ) -> None:
        """A pass that fails takes the requests in it along, and no others.

        before: the requests of these texts; None: as far as they are here
        """
        if before is None:
            before = self._requests_of(texts)
        try:
            run()
        except Exception as error:
            if self._half_done:
                raise
            self._fail(texts, error, before)

    def _noted(self, change: Callable[..., Noted], *given: object) -> Noted:
        """Let the scheduler change what it has noted; where that fails on its way, all must begin again."""
        self._half_done = True
        found = change(*given)
        self._half_done = False
        return found

    def _decode(self, batch: Sequence[int]) -> None:
        """The next token of every text of a batch."""
        order, logits = self._passes.run([self._texts[id].text for id in batch])
        for text in order:
            self._noted(self._scheduler.computed, text.id, len(text.tokens))
        self._choose([self._texts[text.id] for text in order], logits)

    def _prefill(self, chunk: Chunk) -> None:
        """A piece of a prompt, and after the last one the first token of every text of this prompt."""
        live = self._texts[chunk.text]
        _, logits = self._passes.run([live.text], chunk.end)
        self._computed(chunk.text, chunk.end)
        self._after(chunk, logits)

    def _pack(self, plan: StepPlan) -> None:
        """A token of every text that decodes and a piece of every prompt, in one pass."""
        texts = [self._texts[id].text for id in plan.texts]
        ends = [len(text.tokens) for text in texts[: len(plan.decodes)]] + [c.end for c in plan.chunks]
        logits = self._passes.run_packed(texts, ends)
        self._packed_steps += 1
        for text, end in zip(texts, ends, strict=True):
            self._computed(text.id, end)
        decoded, pieces = logits[: len(plan.decodes)], logits[len(plan.decodes) :]
        if plan.decodes:
            lives = [self._texts[id] for id in plan.decodes]
            self._guarded(plan.decodes, partial(self._choose, lives, decoded))
        for chunk, row in zip(plan.chunks, pieces, strict=True):
            if chunk.text in self._texts:  # a text of the same request may have failed in this step
                self._guarded([chunk.text], partial(self._after, chunk, row[None]))

    def _computed(self, id: int, end: int) -> None:
        """Tokens of a text up to `end` are in the cache; what of them is in no page may be kept."""
        snapshot = self._noted(self._scheduler.computed, id, end)
        if snapshot is not None:
            self._passes.keep(snapshot)

    def _after(self, chunk: Chunk, logits: Tensor) -> None:
        """What comes after a piece of a prompt that is computed, from its last logits [1, V]."""
        if not chunk.last:
            return
        live = self._texts[chunk.text]
        lives = [live]
        for fork in self._noted(self._scheduler.fork, chunk.text):
            self._passes.fork(fork)
            lives.append(self._texts[fork.target])
        self._choose(lives, logits.expand(len(lives), -1))

    def _choose(self, lives: Sequence[LiveText], logits: Tensor) -> None:
        """The next token of each text from logits [B, V]."""
        try:
            picked = pick(logits, [live.picker for live in lives])
        except Exception:  # one row's: the others have theirs
            if len(lives) == 1:
                raise
            for row, live in enumerate(lives):
                self._guarded([live.text.id], partial(self._choose, [live], logits[row : row + 1]))
            return
        self._take(lives, picked)

    def _take(self, lives: Sequence[LiveText], picked: Picked) -> None:
        for live, token, logprob in zip(lives, picked.tokens, picked.logprobs, strict=True):
            self._guarded([live.text.id], partial(self._took, live, token, logprob))
        self._speed.note(len(lives))

    def _took(self, live: LiveText, token: int, logprob: TokenLogprob | None) -> None:
        if live.text.id not in self._texts:  # another text of its request has failed meanwhile
            return
        request = live.request
        request.first = request.first or time.monotonic()
        self._noted(self._scheduler.chosen, live.text.id, token)
        live.take(token, logprob)
        if live.finish is not None:
            self._leave(live)
            self._finished(request)

    # ---- ends

    def _leave(self, live: LiveText) -> None:
        id = live.text.id
        with self._changed:
            if id not in self._texts:
                return
            self._half_done = True
            del self._texts[id]
            self._scheduler.end(id)
            try:
                self._passes.leave(id)
            finally:  # a row that is nobody's and could not be cleared is cleared when it is used next
                self._half_done = self._passes.has(id)

    def _finished(self, request: LiveRequest) -> None:
        if not request.done or self._requests.get(request.handle.id) is not request:
            return
        result = request.result()
        usage = result.usage
        with self._changed:
            self._counts["cancelled" if request.cancelled else "finished"] += 1
            self._counts["prompt_tokens"] += usage.prompt_tokens
            self._counts["completion_tokens"] += usage.completion_tokens
            self._counts["cached_tokens"] += usage.cached_tokens
            self._over(request)
        request.handle.finish(result)

    def _over(self, request: LiveRequest) -> None:
        self._requests.pop(request.handle.id, None)
        self._changed.notify_all()

    def _requests_of(self, ids: Iterable[int]) -> dict[str, LiveRequest]:
        """The requests of these texts, as far as they are here, by name."""
        lives = [self._texts[id] for id in ids if id in self._texts]
        return {live.request.handle.id: live.request for live in lives}

    def _fail(
        self, ids: Iterable[int], error: BaseException, before: Mapping[str, LiveRequest] | None = None
    ) -> None:
        """Requests end with an error, and all that they had is given back.

        before: requests that were here when what failed began; where one has not ended by now, it is told, even if
            none of its texts is here any more
        """
        with_lost = (*ids, *self._passes.lost)
        for request in {**(before or {}), **self._requests_of(with_lost)}.values():
            for live in request.texts:
                self._leave(live)
            self._failed(request, error)

    def _failed(self, request: LiveRequest, error: BaseException) -> None:
        """A request that has nothing any more ends with an error, if it has not ended."""
        if self._requests.get(request.handle.id) is request:
            log.warning("request %s failed: %s", request.handle.id, error, exc_info=error)
            with self._changed:
                self._counts["failed"] += 1
                self._over(request)
        # One that has ended is told again, as it may be that which failed.
        told = error if isinstance(error, KVCompileError) else f"{type(error).__name__}: {error}"
        request.handle.fail(ServeError(f"a step of this request failed: {told}"))
