"""Regular expressions as xgrammar reads them: what it would ignore, or read in another way, is refused."""

from __future__ import annotations

from collections.abc import Iterator

from kvcompile.errors import InputError

MOST_TEXT = 65_536
SPELLED = ("\\n", "\\r", "\\t", "\\f", "\\v", "\\x", "\\u")
_KNOWN = "dDwWsSnrtfvxu"


def regex_of(text: str) -> str:
    """The regular expression that xgrammar is given: `.` is no newline, as elsewhere.

    Raises:
        InputError: it holds what would be ignored or read in another way.
    """
    if len(text) > MOST_TEXT:
        raise InputError(f"structure: a regex of {len(text):,} characters; at most {MOST_TEXT:,}")
    parts = list(parts_of(text))
    problem = misread(text, parts)
    if problem:
        raise InputError(f"structure: regex {text!r}: {problem}")
    return "".join("[^\\n]" if part == "." and not inside else part for _, part, inside, _ in parts)


def parts_of(regex: str) -> Iterator[tuple[int, str, bool, bool]]:
    """(place, character with its backslash, whether it is in a class, whether that class is of others)."""
    place, inside, negated, first = 0, False, False, 0
    while place < len(regex):
        part = regex[place : place + 2] if regex[place] == "\\" else regex[place]
        if not inside and part == "[":
            inside, negated, first = True, regex[place + 1 : place + 2] == "^", place + 1
            first += negated
            yield place, part, False, False
        elif inside and part == "]" and place > first:
            inside = False
            yield place, part, False, False
        else:
            yield place, part, inside, negated
        place += len(part)


def misread(regex: str, parts: list[tuple[int, str, bool, bool]]) -> str | None:
    """What would be ignored in it, or read in another way."""
    for place, part, inside, _ in parts:
        if part[0] == "\\" and (part[1:] == "" or (part[1].isalnum() and part[1] not in _KNOWN)):
            return f"{part} is not known"
        if not inside and part == "^" and place > 0:
            return "^ must be at its beginning"
        if not inside and part == "$" and place + 1 < len(regex):
            return "$ must be at its end"
    return None
