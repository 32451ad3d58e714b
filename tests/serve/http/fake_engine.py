"""An engine without a model: a thread that fills handles with words of a tiny tokenizer, as `Engine` would.

The text of a request is a function of its prompt, its seed and its place, so that tests know every word before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from kvcompile.errors import BusyError, InputError, LimitError, ServeError
from kvcompile.serve.request import Completion, Delta, Finish, Handle, Result, TokenLogprob, Usage
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.stats import Stats

WORDS = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, 61))]
EOS = 2
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and loop.first %}"
    "{{ raise_exception('the user begins') }}{% endif %}"
    "w3 {{ message['role'] }} {{ message['content'] }} w4 {% endfor %}{% if add_generation_prompt %}w5{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Words, one token each, with spaces between them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = template
    return made


def tokens_of(prompt: Sequence[int], sampling: Sampling, index: int) -> list[int]:
    """What the fake model says: no special token among it, but the end where the prompt has w60 in it."""
    start = sum(prompt) + (sampling.seed or 0) + 7 * index
    said = [3 + (start + place) % 57 for place in range(sampling.max_tokens)]
    return [*said[:2], EOS] if 60 in prompt and not sampling.ignore_eos else said


@dataclass
class _Running:
    handle: Handle
    prompt: list[int]
    sampling: Sampling
    salt: str
    began: float = field(default_factory=time.monotonic)
    said: list[list[int]] = field(default_factory=list)
    finish: list[Finish | None] = field(default_factory=list)
    first: float = 0.0


class FakeEngine:
    """What the server sees of an engine.

    held:      while it is set, no token comes
    fail_next: the next step fails the request that it is of, with this text
    seen:      every request that was taken: (ids, sampling, salt)
    cancelled: ids of handles whose requests were cancelled before they had ended
    """

    name = "fake"
    vocabulary = len(WORDS)

    def __init__(self, tokenizer: Any = None, max_tokens: int | None = 256, max_queue: int = 8):
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.max_queue = max_queue
        self.held = False
        self.fail_next: str | None = None
        self.seen: list[tuple[list[int], Sampling, str]] = []
        self.cancelled: list[str] = []
        self._finished = self._failed = self._prompt = self._completion = 0
        self._running: list[_Running] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        salt: str = "",
        id: str | None = None,
    ) -> Handle:
        sampling = sampling or Sampling()
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        if sampling.structure is not None and "broken" in sampling.structure.text:
            raise InputError("structure: this grammar cannot be read")
        if len(ids) > 200:
            raise LimitError(f"{len(ids)} tokens never fit the pages")
        with self._changed:
            if self._closed:
                raise ServeError("the engine is closed")
            if len(self._running) >= self.max_queue:
                raise BusyError(f"{self.max_queue} requests are waiting: try again later")
            assert id is not None
            handle = Handle(id, lambda: self._cancel(id))
            run = _Running(handle, ids, sampling, salt)
            run.said = [[] for _ in range(sampling.n)]
            run.finish = [None] * sampling.n
            self.seen.append((ids, sampling, salt))
            self._running.append(run)
            self._prompt += len(ids)
            self._changed.notify_all()
        return handle

    def slow_to_submit(self) -> tuple[threading.Event, threading.Event]:
        """From now on a request comes when the second event is set; the first one is when somebody waits for that."""
        busy, on = threading.Event(), threading.Event()
        submit = self.submit

        def slow(*args: Any, **more: Any) -> Handle:
            busy.set()
            assert on.wait(10)
            return submit(*args, **more)

        self.submit = slow  # type: ignore[method-assign]
        return busy, on

    def stats(self) -> Stats:
        with self._changed:
            return Stats(
                running=len(self._running),
                requests=len(self.seen),
                finished=self._finished,
                failed=self._failed,
                cancelled=len(self.cancelled),
                prompt_tokens=self._prompt,
                completion_tokens=self._completion,
                cached_tokens=self._finished,
                preemptions=3,
                pages=40,
                pages_held=10 if self._running else 0,
                pages_cached=5,
                bytes=1 << 20,
                prefix_cache="on",
            )

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self, drain: float = 0.0) -> None:
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running, drain)
            for run in self._running:
                run.handle.fail(ServeError("the engine was closed"))
            self._running.clear()
            self._changed.notify_all()
        self._thread.join()

    def wait_for(self, running: int, seconds: float = 10.0) -> bool:
        """Whether there are so many requests in time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._running) == running, seconds)

    def hold(self, held: bool = True) -> None:
        with self._changed:
            self.held = held
            self._changed.notify_all()

    def _cancel(self, id: str) -> None:
        with self._changed:
            for run in [run for run in self._running if run.handle.id == id]:
                self.cancelled.append(id)
                run.finish = [one or "cancelled" for one in run.finish]
                self._end(run)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._running and not self.held))
                if self._closed and not self._running:
                    return
                for run in list(self._running):
                    self._step(run)
                self._changed.notify_all()
            time.sleep(0.001)  # lets those who wait for the lock have it

    def _step(self, run: _Running) -> None:
        """One more token of every text of a request."""
        if self.fail_next is not None:
            run.handle.fail(ServeError(self.fail_next))
            self.fail_next = None
            self._failed += 1
            self._running.remove(run)
            return
        run.first = run.first or time.monotonic()
        for index in range(run.sampling.n):
            if run.finish[index] is None:
                run.handle.put(self._more(run, index))
        if all(run.finish):
            self._finished += 1
            self._end(run)

    def _more(self, run: _Running, index: int) -> Delta:
        said = run.said[index]
        token = tokens_of(run.prompt, run.sampling, index)[len(said)]
        text = self._shown([*said, token], run.sampling)[len(self._shown(said, run.sampling)) :]
        said.append(token)
        self._completion += 1
        if token in run.sampling.stop_token_ids or token == EOS or self._stopped(said, run.sampling):
            run.finish[index] = "stop"
        elif len(said) == run.sampling.max_tokens:
            run.finish[index] = "length"
        return Delta(index, (token,), text, self._logprobs([token], run.sampling), run.finish[index])

    def _words(self, tokens: Sequence[int]) -> str:
        return "" if self.tokenizer is None else " ".join(WORDS[token] for token in tokens if token != EOS)

    def _stopped(self, tokens: Sequence[int], sampling: Sampling) -> bool:
        return any(stop in self._words(tokens) for stop in sampling.stop)

    def _shown(self, tokens: Sequence[int], sampling: Sampling) -> str:
        text = self._words(tokens)
        places = [place for stop in sampling.stop if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def _logprobs(self, tokens: Sequence[int], sampling: Sampling) -> tuple[TokenLogprob, ...]:
        if sampling.logprobs is None:
            return ()
        return tuple(
            TokenLogprob(
                token,
                -0.5,
                tuple(
                    (3 + place, -1.0 - place if place < 2 else float("-inf"))
                    for place in range(sampling.logprobs)
                ),
            )
            for token in tokens
        )

    def _end(self, run: _Running) -> None:
        self._running.remove(run)
        now = time.monotonic()
        completions = tuple(
            Completion(
                index,
                tuple(said),
                self._shown(said, run.sampling),
                run.finish[index] or "cancelled",
                self._logprobs(said, run.sampling),
            )
            for index, said in enumerate(run.said)
        )
        usage = Usage(
            len(run.prompt),
            sum(map(len, run.said)),
            cached_tokens=1,
            first_token=(run.first or now) - run.began,
            total=now - run.began,
        )
        run.handle.finish(Result(run.handle.id, completions, usage))
        self._changed.notify_all()
