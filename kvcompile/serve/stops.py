"""Stop strings in a text that comes in pieces: what may become one is held back, and what did not is handed out.

Each string has the automaton of Knuth, Morris and Pratt (1977): a state is how much of it the text ends with, so what
is held back is the largest state, and a character costs a few steps however long the strings are.
"""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """The text ends before the stop string that is complete first (of two that end together, the longer)."""

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(dict.fromkeys(strings))
        self._borders = tuple(_borders(string) for string in self._strings)
        self._states = [0] * len(self._strings)
        self._held = ""

    def take(self, text: str) -> tuple[str, bool]:
        """(what can be shown by now, whether a stop string is complete: nothing after it is looked at)."""
        if not self._strings:
            return text, False
        text = self._held + text
        for place in range(len(self._held), len(text)):
            ended = max(self._step(which, text[place]) for which in range(len(self._strings)))
            if ended:
                self._held = ""
                return text[: place + 1 - ended], True
        shown = len(text) - max(self._states)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """What was held back, and is no stop string, as nothing follows."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._strings)
        return held

    def forked(self) -> Stops:
        """Of another text with the same past."""
        other = object.__new__(Stops)
        other.__dict__.update(self.__dict__)
        other._states = list(self._states)
        return other

    def _step(self, which: int, character: str) -> int:
        """Read one character; the length of the string where it is complete, else 0."""
        string, borders, state = self._strings[which], self._borders[which], self._states[which]
        while state and string[state] != character:
            state = borders[state - 1]
        state += string[state] == character
        self._states[which] = state if state < len(string) else 0
        return state if state == len(string) else 0


def _borders(string: str) -> list[int]:
    """Of each beginning of a string: how long the longest proper beginning is that it also ends with."""
    borders, state = [0] * len(string), 0
    for place in range(1, len(string)):
        while state and string[state] != string[place]:
            state = borders[state - 1]
        state += string[state] == string[place]
        borders[place] = state
    return borders
