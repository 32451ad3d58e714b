"""Texts that follow a JSON schema, a regular expression or a grammar, by xgrammar (extra `structure`).

A token is allowed where what it adds to the text goes on with the grammar; special tokens add nothing, and are not.
When the text may end, so may a token of `eos_ids`, and it does end there, also with `ignore_eos`. Grammars are compiled
once for a tokenizer, where a request is submitted, and the latest are kept.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from kvcompile.errors import InputError, ServeError
from kvcompile.serve.choose import Row
from kvcompile.serve.regexes import MOST_TEXT, regex_of
from kvcompile.serve.sampling import Structure
from kvcompile.serve.schema import schema_of
from kvcompile.serve.vocabulary import spellings

INSTALL = "pip install 'kvcompile[structure]'"
_ANY_OBJECT = '{"type": "object"}'
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_SPACES = 32  # between two parts of JSON; a model that likes spaces would write nothing else


def check(structure: Structure, tokenizer: Any | None, vocabulary: int, eos_ids: frozenset[int]) -> None:
    """Compile a structure, or say why not: what `matcher` gives is there at once afterwards.

    Raises:
        InputError: xgrammar, a tokenizer or an end of text is missing, or the structure cannot be read or kept.
    """
    matcher(structure, tokenizer, vocabulary, eos_ids)


def matcher(
    structure: Structure, tokenizer: Any | None, vocabulary: int, eos_ids: frozenset[int]
) -> GrammarMatcher:
    """What a structure allows at the beginning of a text.

    Args:
        vocabulary: ids of the model are below it
        eos_ids:    tokens that end a text

    Raises:
        InputError: as `check`.
    """
    if tokenizer is None:
        raise InputError("structure: the model has no tokenizer, so its tokens have no text")
    if not eos_ids:
        raise InputError("structure: the model has no token that ends a text")
    compiled = _compiled(structure, tokenizer, vocabulary, eos_ids)
    return GrammarMatcher(_xgrammar().GrammarMatcher(compiled), vocabulary)


class GrammarMatcher:
    """Where a text is in its grammar."""

    def __init__(self, state: Any, vocabulary: int):
        self._state = state
        self._allowed = _xgrammar().allocate_token_bitmask(1, vocabulary)
        self._vocabulary = vocabulary

    def mask(self, row: Row) -> None:
        """Set what is not allowed in a row [V] to -inf; V may be another size than the vocabulary."""
        row[self._vocabulary :] = -np.inf
        if self._state.is_terminated():
            raise ServeError("the text has followed its grammar to the end")
        if self._state.fill_next_token_bitmask(self._allowed):
            logits = torch.from_numpy(row)
            _xgrammar().apply_token_bitmask_inplace(
                logits, self._allowed[0], vocab_size=min(len(row), self._vocabulary)
            )

    def took(self, token: int) -> None:
        """Go on by a token."""
        if self._state.is_terminated() or not self._state.accept_token(token):
            raise ServeError(f"token {token} does not go on with the grammar of its text")

    def forked(self) -> GrammarMatcher:
        """Another text's, with the same past."""
        return GrammarMatcher(self._state.fork(), self._vocabulary)


@lru_cache(64)
def _compiled(structure: Structure, tokenizer: Any, vocabulary: int, eos_ids: frozenset[int]) -> Any:
    compiler = _compiler(tokenizer, vocabulary, eos_ids, structure.kind.startswith("json"))
    if len(structure.text) > MOST_TEXT:
        raise InputError(f"structure: {len(structure.text):,} characters; at most {MOST_TEXT:,}")
    try:
        match structure.kind:
            case "regex":
                compiled = compiler.compile_regex(regex_of(structure.text))
            case "grammar":
                compiled = compiler.compile_grammar(structure.text)
            case _:
                text = _ANY_OBJECT if structure.kind == "json" else schema_of(structure.text)
                _readable_patterns(text)
                compiled = compiler.compile_json_schema(
                    text, strict_mode=False, any_whitespace=True, max_whitespace_cnt=_SPACES
                )
    except RuntimeError as error:  # with the time and a line of C++ in front
        told = re.sub(r"^\[[\d:]+\] \S+ (Check failed: \(.*?\) is false: )?", "", str(error)).strip()
        raise InputError(f"structure: {structure.kind} cannot be read: {told}") from None
    allowed = _xgrammar().allocate_token_bitmask(1, vocabulary)
    _xgrammar().GrammarMatcher(compiled).fill_next_token_bitmask(allowed)
    if not allowed.any():
        raise InputError(f"structure: no token of the model begins a text that this {structure.kind} allows")
    return compiled


def _readable_patterns(schema: str) -> None:
    """Read patterns by themselves: within a schema, xgrammar drops what it cannot keep (a lookahead)."""

    def patterns(value: Any) -> list[str]:
        if isinstance(value, list):
            return [found for one in value for found in patterns(one)]
        if not isinstance(value, dict):
            return []
        own = [value["pattern"]] if isinstance(value.get("pattern"), str) else []
        keys = value.get("patternProperties")
        own += list(keys) if isinstance(keys, dict) else []
        return own + [found for one in value.values() for found in patterns(one)]

    for pattern in patterns(json.loads(schema)):
        _xgrammar().Grammar.from_regex(pattern)


@lru_cache(4)
def _compiler(tokenizer: Any, vocabulary: int, eos_ids: frozenset[int], as_json: bool) -> Any:
    """For texts of any kind, or for JSON: there no token has control characters but the ends of lines.

    JSON allows them nowhere (a tab between parts is not missed), but in strings of some length xgrammar does.
    """
    xgrammar = _xgrammar()
    texts = spellings(tokenizer, vocabulary)
    if as_json:
        texts = [b"" if _CONTROL.search(text) else text for text in texts]
    info = xgrammar.TokenizerInfo(
        texts, xgrammar.VocabType.RAW, vocab_size=vocabulary, stop_token_ids=sorted(eos_ids)
    )
    return xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)


def _xgrammar() -> Any:
    try:
        import xgrammar
    except ImportError:
        raise InputError(f"structure: needs the package xgrammar; run: {INSTALL}") from None
    return xgrammar
