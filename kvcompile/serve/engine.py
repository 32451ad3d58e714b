"""The engine: requests that come and go on one optimized module, a step at a time.

One thread owns the steps. `submit`, `cancel` and `stats` may be called from any other: they leave a note that the next
step begins with, and read what the last one left.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvcompile.errors import BusyError, InputError, KVCompileError, LimitError, PlanError, ServeError
from kvcompile.layouts.sharing import sharing
from kvcompile.recipe import Recipe
from kvcompile.runtime.module import CachedModel
from kvcompile.serve.capacity import capacity
from kvcompile.serve.ends import Ends
from kvcompile.serve.live import LiveRequest, LiveText
from kvcompile.serve.pick import Matcher, Picked, Picker, pick
from kvcompile.serve.prefix import root
from kvcompile.serve.request import Handle, Result
from kvcompile.serve.rows import Rows
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.schedule import Chunk, Copy, Drop, In, Move, Out, Rules, Scheduler, State, StepPlan, Text
from kvcompile.serve.stats import Speed, Stats
from kvcompile.serve.structure import matcher
from kvcompile.util.console import parse_bytes

log = logging.getLogger(__name__)
Prompt = str | Sequence[int]


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
        max_queue: int = 1024,
        prefill_tokens: int | None = None,
        prefix_cache: str = "auto",
        deterministic: bool = False,
        host_memory: int | str = 0,
        watermark: float = 0.01,
        **overrides: Any,
    ):
        """
        Args:
            model: an optimized module, or a decoder that is optimized here.
            recipe: of a decoder that is not optimized yet; "paged" by default.
            tokenizer: a transformers tokenizer: prompts and results may then be texts.
            name: that the model goes by; its class by default.
            memory: bytes of the cache, or "8GiB"; None: a share of what is free, and no more than could be used.
            max_sequences: texts at a time; None: the recipe's runtime.max_batch.
            max_queue: requests that may wait.
            prefill_tokens: tokens of prompts in one step; None: the recipe's runtime.prefill_chunk.
            prefix_cache: "auto": on where the layouts allow it; "on": or else refuse; "off".
            deterministic: a prefix that is found ends at a multiple of `prefill_tokens`, so that the rest is computed
                in the same pieces, and gives the same bits, as without the prefix cache.
            host_memory: bytes on the host for texts that give up their pages; 0: they are computed again.
            watermark: share of the pages that stays available when a request comes in beside others.
            overrides: of the recipe, as for `optimize`.

        Raises:
            PlanError: prefix_cache="on", and some layout cannot.
            LimitError: not one text fits the memory.
            KVCompileError: as `optimize`.
        """
        if not isinstance(model, CachedModel):
            from kvcompile.api import optimize

            model = optimize(model, Recipe.load("paged" if recipe is None else recipe, **overrides))
        elif recipe is not None or overrides:
            raise InputError(
                "recipe: this module is optimized already; give the original model, or no recipe"
            )
        if prefix_cache not in ("auto", "on", "off"):
            raise InputError(f"prefix_cache: expected auto, on or off, got {prefix_cache!r}")
        self.module = model
        self.tokenizer = tokenizer
        self.name = name or type(model.model).__name__
        plan, program, device = model.plan, model.program, model.device
        self._program = program
        limits = plan.limits
        self.max_tokens = limits.max_tokens
        self._max_queue = _positive("max_queue", max_queue)
        shape = model.cache.shape
        wanted = limits.max_batch if max_sequences is None else _positive("max_sequences", max_sequences)
        bytes_given = None if memory is None else parse_bytes(memory)
        room = capacity(plan, shape, device, wanted, bytes_given)
        chunk = (
            limits.prefill_chunk if prefill_tokens is None else _positive("prefill_tokens", prefill_tokens)
        )
        masked = any(decision.mask_rows for decision in plan.decisions)
        shared = sharing((decision.layout for decision in plan.decisions), bool(plan.states), masked)
        if prefix_cache == "on" and not shared.shares:
            raise PlanError(f"prefix_cache: on, and texts share nothing of this plan: {shared.reason}")
        self._until = shared.until if prefix_cache != "off" else 0
        self._prefix_cache = "on" if self._until != 0 else f"off: {shared.reason or 'asked for'}"
        self._scheduler = Scheduler(
            room.groups,
            Rules(
                rows=room.rows,
                chunk=chunk,
                whole=plan.whole_prompts,
                until=self._until,
                aligned=chunk if deterministic else 1,
                recomputes=shared.recomputes,
                watermark=watermark,
                page_bytes=room.page_bytes,
                row_bytes=room.row_bytes,
                host_bytes=0 if not host_memory else parse_bytes(host_memory),
            ),
        )
        self._rows = Rows(shape, device, room.rows, [group.pages for group in room.groups])
        self._bytes = room.bytes
        self._secret = secrets.token_bytes(32)
        self._apart = (
            program.takes_past_length or not program.ragged
        )  # texts of other lengths in other passes
        self._eos = _eos_ids(model.model, tokenizer)
        self._vocabulary = program.ids or (0, _vocabulary(model.model) - 1)
        self._texts: dict[int, LiveText] = {}
        self._requests: dict[str, LiveRequest] = {}
        self._on_host: dict[int, dict[str, Tensor]] = {}
        self._numbers = itertools.count(1)
        self._counts: dict[str, int] = dict.fromkeys(
            (
                "requests",
                "finished",
                "failed",
                "cancelled",
                "prompt_tokens",
                "completion_tokens",
                "cached_tokens",
            ),
            0,
        )
        self._steps = 0
        self._speed = Speed()
        self._inbox: list[Callable[[], None]] = []
        self._changed = threading.Condition()
        self._closing = self._closed = False
        self._thread: threading.Thread | None = None
        self._start()

    # ---- what callers do

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        return self._vocabulary[1] + 1

    @property
    def prefix_cache(self) -> str:
        """ "on", or "off: why"."""
        return self._prefix_cache

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
        ids = self._ids(prompt)
        room = None if self.max_tokens is None else self.max_tokens - len(ids) + 1
        if room is not None and room < 1:
            raise LimitError(
                f"a prompt of {len(ids):,} tokens, but the longest text has {self.max_tokens:,} (runtime.max_tokens)"
            )
        most = len(ids) + min(sampling.max_tokens, room or sampling.max_tokens) - 1
        self._scheduler.check(len(ids), most)
        name = id if id is not None else f"request-{next(self._numbers)}"
        handle = Handle(name, lambda: self._tell(lambda: self._cancel(name)))
        request = LiveRequest(handle, ids, sampling)
        start = root(self._secret, self.module.plan.digest(), self.module.plan.scales or "", salt)
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
            self._inbox.append(lambda: self._enter(request))
            self._changed.notify_all()
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
        for batch, tokens in ((1, 2), (1, 1), (2, 1)):
            if batch <= self._scheduler.rules.rows:
                self.module.prepare(batch, tokens)

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
                pages=sum(pages.group.pages for pages in scheduler.pages),
                pages_held=sum(pages.held for pages in scheduler.pages),
                pages_cached=sum(pages.cached for pages in scheduler.pages),
                bytes=self._bytes,
                tokens_per_second=self._speed.now(),
                prefix_cache=self._prefix_cache,
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

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        given: Any = prompt
        if isinstance(given, str):
            if self.tokenizer is None:
                raise InputError("prompt: a text, and the engine has no tokenizer: give it one, or token ids")
            given = self.tokenizer(given)["input_ids"]
        try:
            ids: tuple[Any, ...] = tuple(given.tolist() if isinstance(given, Tensor) else given)
        except TypeError:
            raise InputError(f"prompt: expected a text or token ids, got {type(given).__name__}") from None
        if not ids:
            raise InputError("prompt: expected at least one token, got none")
        least, most = self._vocabulary
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InputError(f"prompt: expected token ids, got {token!r}")
            if not least <= token <= most:
                raise InputError(f"prompt: expected ids from {least} to {most}, got {token}")
        return ids

    def _matcher(self, sampling: Sampling) -> Matcher | None:
        """What the request's structure allows at the beginning; None: it has none."""
        if sampling.structure is None:
            return None
        return matcher(sampling.structure, self.tokenizer, self.vocabulary, self._eos)

    def _tell(self, note: Callable[[], None]) -> None:
        with self._changed:
            self._inbox.append(note)
            self._changed.notify_all()

    # ---- the engine's thread

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvcompile engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or self._closed or self._scheduler.texts)
                if self._closed:
                    break
            self._turn()
        with self._changed:
            for request in list(self._requests.values()):
                self._over(request)
                request.handle.fail(ServeError("the engine was closed before this request had ended"))

    def _turn(self) -> None:
        """What came since the last step, and a step."""
        with self._changed:
            notes, self._inbox = self._inbox, []
        try:
            for note in notes:
                note()
            self._step()
        except BaseException as error:  # a defect of ours: nobody may wait for ever
            log.exception("the engine's step failed")
            self._fail(list(self._texts), error)

    def _enter(self, request: LiveRequest) -> None:
        with self._changed:
            for live in request.texts:
                self._texts[live.text.id] = live
                self._scheduler.add(live.text)

    def _cancel(self, name: str) -> None:
        request = self._requests.get(name)
        if request is None:
            return
        for live in request.texts:
            if live.finish is None:
                live.stop()
                self._leave(live)
        self._finished(request)

    def _step(self) -> None:
        """One step of the scheduler's plan."""
        plan = self._scheduler.plan()
        if not plan:
            return
        self._steps += 1
        now = time.monotonic()
        for id in plan.texts:
            request = self._texts[id].request
            request.began = request.began or now
        try:
            self._move(plan.moves)
        except Exception as error:
            self._fail([*plan.texts, *_moved(plan)], error)
            return
        for batch in [[id] for id in plan.decodes] if self._apart else [plan.decodes]:
            if batch:
                self._guarded(batch, partial(self._decode, batch))
        for chunk in plan.chunks:
            self._guarded([chunk.text], partial(self._prefill, chunk))

    def _guarded(self, texts: Sequence[int], run: Callable[[], None]) -> None:
        """A pass that fails takes the requests in it along, and no others."""
        try:
            run()
        except Exception as error:
            self._fail(texts, error)

    def _move(self, moves: Sequence[Move]) -> None:
        for move in moves:
            match move:
                case Copy():
                    self._rows.copy_pages([move])
                case Drop(text):
                    self._rows.drop(text)
                case Out(text, tables):
                    self._on_host[text] = self._rows.state(text, tables)
                case In(text, tables):
                    self._rows.restore(text, self._texts[text].text.computed, tables, self._on_host.pop(text))

    def _decode(self, batch: Sequence[int]) -> None:
        """The next token of every text of a batch, which stand in the first rows then."""
        if len(batch) == 1:
            order = list(batch)
            first = self._rows.place(order[0])
        else:
            order, first = self._rows.arrange(batch), 0
        texts = [self._texts[id].text for id in order]
        logits = self._pass(order, first, [text.tokens[text.computed :] for text in texts])
        for text in texts:
            self._computed(text, len(text.tokens))
        self._choose([self._texts[id] for id in order], logits)

    def _prefill(self, chunk: Chunk) -> None:
        """A piece of a prompt, and the first token after it."""
        live = self._texts[chunk.text]
        first = self._rows.place(chunk.text)
        logits = self._pass([chunk.text], first, [live.text.tokens[chunk.start : chunk.end]])
        self._computed(live.text, chunk.end)
        if not chunk.last:
            return
        lives = [live]
        for fork in self._scheduler.fork(chunk.text):
            self._rows.copy_pages(fork.copies)
            self._rows.fork(fork.source, fork.target)
            lives.append(self._texts[fork.target])
        self._choose(lives, logits.expand(len(lives), -1))

    def _pass(self, order: Sequence[int], first: int, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run tokens of texts in rows from `first` on; the logits [B, V] after the last of each."""
        rows, device = self._rows, self.module.device
        seen = [self._texts[id].text.computed for id in order]
        for id in order:
            rows.write_tables(id, self._texts[id].text.tables)
        ids = torch.tensor(tokens, dtype=torch.int64)
        lens = torch.tensor(seen, dtype=torch.int64)
        positions = lens[:, None] + torch.arange(ids.shape[1])
        end = first + len(order)
        with self.module.turns.alone():
            self.module.check_call()
            columns = max(seen)
            rows.hold(columns + ids.shape[1])
            flat = self.module.run_pass(
                ids.to(device),
                positions.to(device),
                lens.to(device),
                rows.inputs(first, end),
                columns=columns,
                kept=1,
                rows=[[0] * len(seen), seen],
                version=rows.version if first == 0 else None,
            )
            return flat[self._program.logits][:, -1].float()

    def _computed(self, text: Text, end: int) -> None:
        self._scheduler.computed(text.id, end)
        self._rows.note(text.id, end)

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
        now = time.monotonic()
        for live, token, logprob in zip(lives, picked.tokens, picked.logprobs, strict=True):
            request = live.request
            request.first = request.first or now
            self._scheduler.chosen(live.text.id, token)
            live.take(token, logprob)
            if live.finish is not None:
                self._leave(live)
                self._finished(request)
        self._speed.note(len(lives))

    # ---- ends

    def _leave(self, live: LiveText) -> None:
        with self._changed:
            if self._texts.pop(live.text.id, None) is not None:
                self._scheduler.end(live.text.id)
                self._rows.drop(live.text.id)
                self._on_host.pop(live.text.id, None)

    def _finished(self, request: LiveRequest) -> None:
        if not request.done or request.handle.id not in self._requests:
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


def _moved(plan: StepPlan) -> list[int]:
    return [move.text for move in plan.moves if isinstance(move, (Out, In))]


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: expected a whole number of at least 1, got {value!r}")
    return value


def _eos_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Ids that end a text, as the model's generation config, its config and the tokenizer say."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if isinstance(ids, (int, list, tuple)):
            found |= {ids} if isinstance(ids, int) else set(ids)
    return frozenset(found)


def _vocabulary(model: nn.Module) -> int:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(size, int):
        sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        size = max(sizes, default=1 << 31)
    return size
