"""The engine: requests that come and go on one optimized module, a step at a time.

One thread owns the steps (`loop.py`). `submit`, `cancel` and `stats` may be called from any other: they leave a note
that the next step begins with, and read what the last one left.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from kvcompile.errors import BusyError, InputError, LimitError, ServeError
from kvcompile.recipe import Recipe
from kvcompile.recipe.serve import bytes_of
from kvcompile.runtime.module import CachedModel
from kvcompile.serve.disk import Disk
from kvcompile.serve.ends import Ends
from kvcompile.serve.identity import Identity
from kvcompile.serve.live import LiveRequest, LiveText
from kvcompile.serve.loop import Loop
from kvcompile.serve.packing import unpacked_because
from kvcompile.serve.passes import Passes
from kvcompile.serve.pick import Matcher, Picker
from kvcompile.serve.prompts import Prompt, bounds_of, ends_of, ids_of
from kvcompile.serve.ranks import Leading, below, lead, room_of
from kvcompile.serve.request import Handle, Result
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.schedule import Scheduler
from kvcompile.serve.settings import settings
from kvcompile.serve.shared import Shared
from kvcompile.serve.stats import Stats
from kvcompile.serve.structure import matcher
from kvcompile.serve.texts import Rules, State, Text
from kvcompile.util.console import parse_bytes


class Engine(Loop):
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
        passes = Passes(model, room, tiers) if channel is None else Leading(model, room, tiers, channel)
        chunks = sharing.chunks or config.deterministic
        rules = Rules(
            rows=room.rows,
            chunk=chunk,
            whole=plan.whole_prompts,
            shares=self._shared.on,
            until=sharing.until,
            in_order=passes.rows.in_order,
            chunks=chunks,
            aligned=chunk if chunks else 1,
            recomputes=sharing.recomputes,
            watermark=config.watermark,
            page_bytes=room.page_bytes,
            row_bytes=room.row_bytes,
            host_bytes=host_bytes,
        )
        scheduler = Scheduler(room.groups, rules, below(tiers, channel))
        self._numbers = itertools.count(1)
        super().__init__(scheduler, passes, tiers, packed=self._unpacked is None)
        self._bytes = room.bytes
        self._eos = ends_of(model.model, tokenizer)
        self._bounds = bounds_of(model.program, model.model)
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
            try:
                self._requests[name] = request
                self._tell(request, self._enter)
                self._counts["requests"] += 1
            except BaseException:  # nobody has its handle
                self._requests.pop(name, None)
                raise
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
