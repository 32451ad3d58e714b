"""A request inside the engine: its texts, what each has given so far, and what its handle is told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvcompile.serve.ends import Ends
from kvcompile.serve.pick import Picker
from kvcompile.serve.request import Completion, Delta, Finish, Handle, Result, TokenLogprob, Usage
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.texts import Text


@dataclass
class LiveText:
    """One text: how its tokens are chosen and where it ends, and what came."""

    request: LiveRequest
    index: int
    text: Text
    picker: Picker
    ends: Ends
    tokens: list[int] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, token: int, logprob: TokenLogprob | None) -> None:
        """The next token, told to the handle."""
        piece = self.ends.take(token)
        self.picker.took(token)
        self.tokens.append(token)
        self.finish = piece.finish
        self._tell((token,), piece.text, () if logprob is None else (logprob,))

    def stop(self) -> None:
        """It ends where it is."""
        if self.finish is None:
            self.finish = "cancelled"
            self._tell((), self.ends.flush(), ())

    def _tell(self, tokens: tuple[int, ...], text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        self.shown.append(text)
        self.logprobs.extend(logprobs)
        self.request.handle.put(Delta(self.index, tokens, text, logprobs, self.finish))

    def completion(self) -> Completion:
        assert self.finish is not None
        text = "".join(self.shown)
        return Completion(self.index, tuple(self.tokens), text, self.finish, tuple(self.logprobs))


@dataclass
class LiveRequest:
    """All texts of one prompt."""

    handle: Handle
    prompt: tuple[int, ...]
    sampling: Sampling
    submitted: float = field(default_factory=time.monotonic)
    began: float | None = None  # when its first chunk did
    first: float | None = None  # when its first token came
    texts: list[LiveText] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(text.finish is not None for text in self.texts)

    @property
    def cancelled(self) -> bool:
        return any(text.finish == "cancelled" for text in self.texts)

    def usage(self) -> Usage:
        now = time.monotonic()
        began, first = self.began or now, self.first or now
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=sum(len(text.tokens) for text in self.texts),
            cached_tokens=self.texts[0].text.cached or 0,
            preemptions=sum(text.text.preemptions for text in self.texts),
            recomputed_tokens=sum(text.text.recomputed for text in self.texts),
            swapped_bytes=sum(text.text.swapped for text in self.texts),
            queued=began - self.submitted,
            first_token=first - self.submitted,
            total=now - self.submitted,
        )

    def result(self) -> Result:
        return Result(self.handle.id, tuple(text.completion() for text in self.texts), self.usage())
