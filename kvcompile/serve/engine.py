"""The engine: requests that come and go on one optimized module, a step at a time.

One thread owns the steps. `submit`, `cancel` and `stats` may be called from any other: they leave a note that the next
step begins with, and read what the last one left.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kvcompile.errors import BusyError, InputError, KVCompileError, LimitError, RankError, ServeError
from kvcompile.recipe import Recipe
from kvcompile.recipe.serve import bytes_of
from kvcompile.runtime.module import CachedModel
from kvcompile.serve.disk import Disk
from kvcompile.serve.ends import Ends
from kvcompile.serve.identity import Identity
from kvcompile.serve.live import LiveRequest, LiveText
from kvcompile.serve.moves import Chunk, StepPlan
from kvcompile.serve.packing import unpacked_because
from kvcompile.serve.passes import Passes
from kvcompile.serve.pick import Matcher, Picked, Picker, pick
from kvcompile.serve.prompts import Prompt, bounds_of, ends_of, ids_of
from kvcompile.serve.ranks import Leading, below, lead, room_of
from kvcompile.serve.request import Handle, Result, TokenLogprob
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.schedule import Scheduler
from kvcompile.serve.settings import settings
from kvcompile.serve.shared import Shared
from kvcompile.serve.stats import Speed, Stats
from kvcompile.serve.structure import matcher
from kvcompile.serve.texts import Rules, State, Text
from kvcompile.util.console import parse_bytes

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching of requests over an optimized module.

    Every request is computed as if it were alone: what runs beside it changes when its tokens come, not which, up to
    the rounding of products of another batch size.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: object = None,
        *,
        tokenizer: Any = None,
        name: str | None = None,
        memory: int | str | None = None,
        max_sequences: int | None = None,
        max_queue: int | None = None,
        prefill_tokens: int | None = None,
        prefix_cache: str | None = None,
        deterministic: bool | None = None,
        host_memory: int | str | None = None,
        snapshot_memory: int | str | None = None,
        store: str | Path | None = None,
        store_memory: int | str = "10GiB",
        watermark: float | None = None,
        packed: str | None = None,
        **overrides: Any,
    ):
        """What is None is as the section `serve` of the module's recipe has it; the defaults told here are that one's.

        Args:
            model: an optimized module, or a decoder that is optimized here.
            recipe: of a decoder that is not optimized yet; "paged" by default.
            tokenizer: a transformers tokenizer: prompts and results may then be texts.
            name: that the model goes by; its class by default.
            memory: bytes of the cache, or "8GiB"; by default a share of what is free, and no more than could be used.
            max_sequences: texts at a time; by default the recipe's runtime.max_batch.
            max_queue: requests that may wait; 1024.
            prefill_tokens: tokens of prompts in one step; by default the recipe's runtime.prefill_chunk.
            prefix_cache: "auto", the default: on where the layouts allow it; "on": or else refuse; "off".
            deterministic: a prefix that is found was computed in the same pieces, and ends with one, so that the rest
                gives the same bits as without the prefix cache.
            host_memory: bytes on the host for texts that give up their pages, and then for evicted pages; 0, the
                default: texts are computed again, and evicted pages are forgotten.
            snapshot_memory: bytes on the host for what prefixes have in no page; by default a quarter of the cache's,
                where they have any; 0: none.
            store: a folder where pages and snapshots outlive the engine; made if it is not there. Engines of the same
                model and plan may have one together.
            store_memory: bytes of its files; what was not used for longest goes first.
            watermark: share of the pages that stays available when a request comes in beside others; 0.01.
            packed: whether all texts of a step take one pass, which reads the weights once: "auto", the default: on
                GPUs, where the layouts allow it; "on": or else refuse; "off": one for all that decode, and one for
                each chunk.
            overrides: of the recipe, as for `optimize`.

        Raises:
            PlanError: prefix_cache="on" or packed="on", and some layout cannot.
            LimitError: not one text fits the memory.
            InputError: an argument that is none; `store` cannot be used: no folder, not writable, or others may read
                its secret.
            KVCompileError: as `optimize`.
        """
        if not isinstance(model, CachedModel):
            from kvcompile.api import optimize

            model = optimize(model, Recipe.load("paged" if recipe is None else recipe, **overrides))
        elif recipe is not None or overrides:
            raise InputError(
                "recipe: this module is optimized already; give the original model, or no recipe"
            )
        given = {
            "memory": memory,
            "max_sequences": max_sequences,
            "max_queue": max_queue,
            "prefill_tokens": prefill_tokens,
            "prefix_cache": prefix_cache,
            "deterministic": deterministic,
            "host_memory": host_memory,
            "snapshot_memory": snapshot_memory,
            "watermark": watermark,
            "packed": packed,
        }
        config = settings(model.recipe, given)
        self.module = model
        self.tokenizer = tokenizer
        self.name = name or type(model.model).__name__
        plan = model.plan
        limits = plan.limits
        self.max_tokens = limits.max_tokens
        self._max_queue = config.max_queue
        self._unpacked = unpacked_because(config.packed, model, config.deterministic)
        chunk = config.prefill_tokens or limits.prefill_chunk
        channel = lead(model, config, chunk, store is not None)
        room = room_of(model, config, chunk, channel)
        host_bytes = bytes_of(config.host_memory)
        with nullcontext() if channel is None else channel.starting():
            self._shared = Shared.of(
                model,
                room,
                config.prefix_cache,
                host_bytes,
                None if config.snapshot_memory is None else bytes_of(config.snapshot_memory),
                None if store is None else Disk(store, parse_bytes(store_memory)),
            )
            self._identity = Identity(model, chunk, config.deterministic, self._shared.disk)
        sharing, tiers = self._shared.sharing, self._shared.tiers
        self._passes = Passes(model, room, tiers) if channel is None else Leading(model, room, tiers, channel)
        chunks = sharing.chunks or config.deterministic
        rules = Rules(
            rows=room.rows,
            chunk=chunk,
            whole=plan.whole_prompts,
            shares=self._shared.on,
            until=sharing.until,
            in_order=self._passes.rows.in_order,
            chunks=chunks,
            aligned=chunk if chunks else 1,
            recomputes=sharing.recomputes,
            watermark=config.watermark,
            page_bytes=room.page_bytes,
            row_bytes=room.row_bytes,
            host_bytes=host_bytes,
        )
        self._scheduler = Scheduler(room.groups, rules, below(tiers, channel))
        self._bytes = room.bytes
        self._eos = ends_of(model.model, tokenizer)
        self._bounds = bounds_of(model.program, model.model)
        self._texts: dict[int, LiveText] = {}
        self._requests: dict[str, LiveRequest] = {}
        self._numbers = itertools.count(1)
        requests = ("requests", "finished", "failed", "cancelled")
        tokens = ("prompt_tokens", "completion_tokens", "cached_tokens")
        self._counts: dict[str, int] = dict.fromkeys((*requests, *tokens), 0)
        self._steps = self._packed_steps = 0
        self._speed = Speed()
        self._inbox: list[tuple[list[int], Callable[[], None]]] = []  # which texts, and what of them
        self._changed = threading.Condition()
        self._closing = self._closed = False
        self._idle = False  # the last turn had nothing to do but to wait for files
        tiers.on_read(self._wake)
        self._thread: threading.Thread | None = None
        self._start()

    # ---- what callers do

    @property
    def closed(self) -> bool:
        """Whether nothing runs any more: it was closed, or its thread has ended by a defect."""
        return self._closed

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        return self._bounds[1] + 1

    def submit(
        self, prompt: Prompt, sampling: Sampling | None = None, *, salt: str = "", id: str | None = None
    ) -> Handle:
        """Let a prompt be answered; returns at once.

        Args:
            prompt: token ids, or a text where there is a tokenizer.
            sampling: None: greedy.
            salt: requests share their prefixes with those of the same salt only.
            id: of the handle; None: a new one.

        Raises:
            InputError: no prompt, ids that the model does not have, a grammar that cannot be read.
            LimitError: longer than the limits, or more pages than there are.
            BusyError: the queue is full.
            ServeError: the engine is closed.
        """
        sampling = sampling or Sampling()
        ids = ids_of(prompt, self.tokenizer, self._bounds)
        room = None if self.max_tokens is None else self.max_tokens - len(ids) + 1
        if room is not None and room < 1:
            raise LimitError(
                f"a prompt of {len(ids):,} tokens, but the longest text has {self.max_tokens:,} (runtime.max_tokens)"
            )
        most = len(ids) + min(sampling.max_tokens, room or sampling.max_tokens) - 1
        self._scheduler.check(len(ids), most)
        name = id if id is not None else f"request-{next(self._numbers)}"
        handle = Handle(name, lambda: self._tell(request, self._cancel))
        request = LiveRequest(handle, ids, sampling)
        start = self._identity.root(salt)
        first = next(self._numbers)
        numbers = [first, *(next(self._numbers) for _ in range(sampling.n - 1))]
        for index, number in enumerate(numbers):
            text = Text(number, (first, index), list(ids), most, start, leader=first if index else None)
            picker = Picker(sampling, ids, index, self.module.device, self._matcher(sampling))
            ends = Ends(sampling, self._eos, self.tokenizer, ids, room)
            request.texts.append(LiveText(request, index, text, picker, ends))
        with self._changed:
            if self._closing:
                raise ServeError("the engine is closed")
            if name in self._requests:
                raise InputError(f"id: a request {name!r} is on its way already")
            if sum(r.began is None for r in self._requests.values()) >= self._max_queue:
                raise BusyError(f"{self._max_queue} requests are waiting: try again later")
            self._requests[name] = request
            self._counts["requests"] += 1
            self._tell(request, self._enter)
        return handle

    def generate(
        self, prompts: Iterable[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Result]:
        """The results of all prompts, in their order.

        Raises:
            InputError, LimitError: as `submit`; nothing goes on then.
            ServeError: a step failed.
        """
        given = list(prompts)
        each = (
            [sampling] * len(given) if sampling is None or isinstance(sampling, Sampling) else list(sampling)
        )
        if len(each) != len(given):
            raise InputError(f"sampling: {len(each)} of them for {len(given)} prompts")
        handles: list[Handle] = []
        try:
            for prompt, own in zip(given, each, strict=True):
                handles.append(self.submit(prompt, own))
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise

    def warmup(self) -> None:
        """Compile all that steps may need, so that nothing compiles while requests wait."""
        rows = self._scheduler.rules.rows
        shapes = [(batch, tokens) for batch, tokens in ((1, 2), (1, 1), (2, 1)) if batch <= rows]
        self._passes.warm(shapes, packed=self._unpacked is None)

    def stats(self) -> Stats:
        """What it is at and has done."""
        scheduler = self._scheduler
        with self._changed:
            states = [live.text.state for live in self._texts.values()]
            inbox = len(self._requests) - len({live.request.handle.id for live in self._texts.values()})
            return Stats(
                waiting=states.count(State.WAITING) + inbox,
                running=states.count(State.RUNNING),
                swapped=states.count(State.SWAPPED),
                preemptions=scheduler.preemptions,
                recomputed_tokens=scheduler.recomputed,
                swapped_bytes=scheduler.swapped,
                steps=self._steps,
                packed_steps=self._packed_steps,
                pages=sum(pages.group.pages for pages in scheduler.pages),
                pages_held=sum(pages.held for pages in scheduler.pages),
                pages_cached=sum(pages.cached for pages in scheduler.pages),
                bytes=self._bytes,
                tokens_per_second=self._speed.now(),
                prefix_cache=self._shared.told,
                found_device_tokens=scheduler.found["device"],
                found_host_tokens=scheduler.found["host"],
                found_store_tokens=scheduler.found["store"],
                **self._shared.stats(),
                packed="on" if self._unpacked is None else f"off: {self._unpacked}",
                **self._counts,
            )

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests, wait up to `drain` seconds for those on their way, and fail the rest."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._requests or self._closed, drain)
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        self._passes.close()
        self._shared.close(self._scheduler, self._passes.rows)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _matcher(self, sampling: Sampling) -> Matcher | None:
        """What the request's structure allows at the beginning; None: it has none."""
        if sampling.structure is None:
            return None
        return matcher(sampling.structure, self.tokenizer, self.vocabulary, self._eos)

    def _tell(self, request: LiveRequest, note: Callable[[LiveRequest], None]) -> None:
        """Leave a note about a request for the next step."""
        with self._changed:
            self._inbox.append(([live.text.id for live in request.texts], partial(note, request)))
            self._changed.notify_all()

    # ---- the engine's thread

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
                for request in list(self._requests.values()):
                    self._over(request)
                    request.handle.fail(ServeError("the engine was closed before this request had ended"))

    def _has_work(self) -> bool:
        waits = self._idle and self._shared.tiers.reading
        return bool(self._inbox or self._closed or (self._scheduler.texts and not waits))

    def _wake(self) -> None:
        """What was read is there."""
        with self._changed:
            self._changed.notify_all()

    def _turn(self) -> None:
        """What came since the last step, and a step."""
        with self._changed:
            notes, self._inbox = self._inbox, []
        for texts, note in notes:
            self._guarded(texts, note)
        try:
            self._step()
        except Exception as error:  # a defect of ours
            log.exception("the engine's step failed")
            self._fail(list(self._texts), error)

    def _enter(self, request: LiveRequest) -> None:
        with self._changed:
            for live in request.texts:
                self._texts[live.text.id] = live
                self._scheduler.add(live.text)

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
        if self._unpacked is None and len(plan.chunks) + bool(plan.decodes) > 1:
            self._guarded(plan.texts, partial(self._pack, plan))
            return
        for batch in self._passes.batches(plan.decodes):
            self._guarded(batch, partial(self._decode, batch))
        for chunk in plan.chunks:
            if chunk.text in self._texts:  # a text of the same request may have failed in this step
                self._guarded([chunk.text], partial(self._prefill, chunk))

    def _guarded(self, texts: Sequence[int], run: Callable[[], None]) -> None:
        """A pass that fails takes the requests in it along, and no others."""
        try:
            run()
        except Exception as error:
            self._fail(texts, error)

    def _decode(self, batch: Sequence[int]) -> None:
        """The next token of every text of a batch."""
        order, logits = self._passes.run([self._texts[id].text for id in batch])
        for text in order:
            self._scheduler.computed(text.id, len(text.tokens))
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
        snapshot = self._scheduler.computed(id, end)
        if snapshot is not None:
            self._passes.keep(snapshot)

    def _after(self, chunk: Chunk, logits: Tensor) -> None:
        """What comes after a piece of a prompt that is computed, from its last logits [1, V]."""
        if not chunk.last:
            return
        live = self._texts[chunk.text]
        lives = [live]
        for fork in self._scheduler.fork(chunk.text):
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
        self._scheduler.chosen(live.text.id, token)
        live.take(token, logprob)
        if live.finish is not None:
            self._leave(live)
            self._finished(request)

    # ---- ends

    def _leave(self, live: LiveText) -> None:
        with self._changed:
            if self._texts.pop(live.text.id, None) is not None:
                self._scheduler.end(live.text.id)
                self._passes.leave(live.text.id)

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

    def _fail(self, ids: Iterable[int], error: BaseException) -> None:
        """Requests end with an error, and all that they had is given back."""
        failed = {
            id_of.request.handle.id: id_of.request for id in ids if (id_of := self._texts.get(id)) is not None
        }
        for request in failed.values():
            log.warning("request %s failed: %s", request.handle.id, error, exc_info=error)
            for live in request.texts:
                if live.text.id in self._texts:
                    self._leave(live)
            with self._changed:
                self._counts["failed"] += 1
                self._over(request)
            told = error if isinstance(error, KVCompileError) else f"{type(error).__name__}: {error}"
            request.handle.fail(ServeError(f"a step of this request failed: {told}"))
