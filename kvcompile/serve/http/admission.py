"""From a checked request to handles of the engine: limits, sampling, and all prompts or none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from pydantic import ValidationError

from kvcompile.errors import KVCompileError
from kvcompile.serve.http.errors import Problem, at_submit, of_validation
from kvcompile.serve.http.prompts import Prompt
from kvcompile.serve.http.schemas.generation import NAMES, Generation
from kvcompile.serve.http.service import Service
from kvcompile.serve.request import Handle
from kvcompile.serve.sampling import Sampling
from kvcompile.serve.submitting import submitted
from kvcompile.util.console import shown


class Admissible(Protocol):
    """What is asked of the engine: `Job` of answer.py."""

    @property
    def service(self) -> Service: ...
    @property
    def asked(self) -> Generation: ...
    @property
    def prompts(self) -> Callable[[], list[Prompt]]: ...
    @property
    def logprobs(self) -> int | None: ...
    @property
    def default_tokens(self) -> int | None: ...


@asynccontextmanager
async def admitted(job: Admissible, id: str) -> AsyncIterator[tuple[list[Prompt], list[Handle]]]:
    """All prompts of a request in the engine; what has not ended when this is left is cancelled.

    Raises:
        Problem: the engine or the limits refuse it; no prompt is in the engine then.
    """
    service = job.service

    def submit(handles: list[Handle]) -> list[Prompt]:
        found = job.prompts()
        _check_texts(job, len(found))
        samplings = [_sampling(job, prompt) for prompt in found]
        for place, (prompt, sampling) in enumerate(zip(found, samplings, strict=True)):
            name = id if len(found) == 1 else f"{id}-{place}"
            handles.append(
                service.engine.submit(prompt.ids, sampling, salt=job.asked.cache_salt or "", id=name)
            )
        return found

    async with AsyncExitStack() as stack:
        try:
            entered = await stack.enter_async_context(submitted(submit, service.threads))
        except KVCompileError as error:
            raise at_submit(error) from error
        yield entered


def _check_texts(job: Admissible, prompts: int) -> None:
    asked, most = job.asked, job.service.limits.texts
    texts = prompts * asked.texts
    if texts > most:
        raise Problem(
            400,
            f"n: expected at most {most} texts in a request, got {prompts} prompts times n={asked.texts}",
            param="n",
            code="invalid_value",
        )


def _sampling(job: Admissible, prompt: Prompt) -> Sampling:
    """The sampling of one prompt, whose length decides how many tokens there is room for."""
    service, asked, limits = job.service, job.asked, job.service.limits
    size, whole = len(prompt.ids), service.engine.max_tokens
    if limits.prompt_tokens is not None and size > limits.prompt_tokens:
        raise _too_long(f"the prompt has {size} tokens, and {limits.prompt_tokens} are the most here")
    room = limits.completion_tokens
    if whole is not None:
        room = min(room, whole - size + 1)  # the last token is told, and no other attends to it
    if room < 1:
        raise _too_long(f"the prompt has {size} tokens, and the longest text has {whole}")
    wanted = job.asked.asked_tokens
    if wanted is not None and wanted > limits.completion_tokens:
        raise _too_long(
            f"{shown(wanted)} tokens are asked for, and {limits.completion_tokens} are the most here"
        )
    if wanted is not None and wanted > room:
        raise _too_long(
            f"the prompt has {size} tokens, which leaves room for {room}, and {wanted} are asked for"
        )
    given = wanted if wanted is not None else min(room, job.default_tokens or room)
    outside = [one for one in asked.stop_token_ids or () if one >= service.engine.vocabulary]
    if outside:
        raise Problem(
            400,
            f"stop_token_ids: expected ids below {service.engine.vocabulary}, got {shown(outside[0])}",
            param="stop_token_ids",
            code="invalid_value",
        )
    try:
        return asked.sampling(given, job.logprobs)
    except ValidationError as error:
        own = {"logprobs": "top_logprobs"} if hasattr(asked, "top_logprobs") else {}
        raise of_validation(error, {**NAMES, **own}) from None


def _too_long(message: str) -> Problem:
    return Problem(400, message, param="max_tokens", code="context_length_exceeded")
