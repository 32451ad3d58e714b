"""Log-probabilities as OpenAI's two interfaces write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcompile.serve.http.tokens import TokenTexts
from kvcompile.serve.request import TokenLogprob

LEAST = -9999.0  # JSON has no infinity: a token that cannot come


def of_completion(
    found: Sequence[TokenLogprob], texts: TokenTexts, offset: int
) -> tuple[dict[str, Any], int]:
    """Four parallel lists, and the offset behind them; `offset` is where the first token's text begins.

    Of tokens that have one text, the likeliest is told.
    """
    offsets, tops = [], []
    for one in found:
        offsets.append(offset)
        offset += len(texts.text(one.token))
        top: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):
            text = texts.text(token)
            top[text] = max(top.get(text, LEAST), _number(logprob))
        tops.append(top)
    return {
        "text_offset": offsets,
        "token_logprobs": [_number(one.logprob) for one in found],
        "tokens": [texts.text(one.token) for one in found],
        "top_logprobs": tops,
    }, offset


def of_chat(found: Sequence[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """One record for each token, with the likeliest ones in it."""
    return {
        "content": [
            _record(one.token, one.logprob, texts)
            | {"top_logprobs": [_record(token, logprob, texts) for token, logprob in one.top]}
            for one in found
        ],
        "refusal": None,
    }


def _record(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": _number(logprob), "bytes": texts.utf8(token)}


def _number(logprob: float) -> float:
    return LEAST if logprob < LEAST else logprob
