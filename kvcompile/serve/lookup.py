"""What of a text is in the cache already, or in a store below it: the longest prefix of which all is there.

Pages are found one by one, each by its key. Of a group that gives back pages behind its window, a prefix needs those
that are read after it: of the sinks, and of its last tokens. Where a prefix is not all in pages, a snapshot must end
with it, too, which chunks of prompts leave at multiples of `unit` tokens: ends of chunks, and of pages of every group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcompile.serve.pages import HOLE, Group, Key, Pages
from kvcompile.serve.prefix import Chain, tagged
from kvcompile.serve.texts import Rules, Text
from kvcompile.serve.tiers import Below

Found = tuple[int | None, Key]  # a page, or None where it is in a store below, and its key there
_HOLE: Found = (HOLE, b"")  # a page that is not needed


@dataclass(frozen=True)
class Hit:
    """A prefix that is there.

    pages: by group, the first pages, and holes where the window has left them behind
    row, slots: keys of the snapshot that ends with it, as `Restore` has them; None: it needs none
    """

    tokens: int
    pages: tuple[tuple[Found, ...], ...]
    row: Key | None = None
    slots: tuple[Key, ...] = ()

    def held(self, group: int) -> list[int | None]:
        """Pages of a group that are there, and holes; None for those that come up."""
        return [page for page, _ in self.pages[group]]

    @property
    def up(self) -> tuple[Key, ...]:
        """Keys of pages that come up."""
        return tuple(key for own in self.pages for page, key in own if page is None)

    @property
    def snapshot(self) -> tuple[Key, ...]:
        """Keys of the snapshot, those first that should go last."""
        return () if self.row is None else (self.row, *reversed(self.slots))


class Lookup:
    """Looks for prefixes, and knows the keys of everything."""

    def __init__(self, pages: Sequence[Pages], rules: Rules, below: Below):
        self._pages, self._rules, self._below = pages, rules, below
        sizes = [own.group.page_size for own in pages]
        self.unit = math.lcm(rules.chunk, *sizes)
        self._step = self.unit if rules.until == 0 else math.lcm(rules.aligned, *sizes)

    def nothing(self, tokens: int = 0) -> Hit:
        """A prefix of which no page is there."""
        return Hit(tokens, tuple(() for _ in self._pages))

    def find(self, text: Text, below: bool) -> Hit:
        """The longest prefix of a text that is there, one token less than the text at most.

        below: whether to look there, too
        """
        rules = self._rules
        if not rules.shares or (not self._pages and not below):
            return self.nothing()
        most = len(text.tokens) - 1  # one is left, after which the next is chosen
        there = [_There(self, text, number, most, below) for number in range(len(self._pages))]
        tokens = most // self._step * self._step
        while tokens > 0:
            reach = [own.reach(tokens) for own in there]
            if min(reach, default=tokens) >= tokens:
                hit = self._hit(text, tokens, there, below)
                if hit is not None:
                    return hit
            tokens = min([tokens - self._step, *reach]) // self._step * self._step
        return self.nothing()

    def _hit(self, text: Text, tokens: int, there: Sequence[_There], below: bool) -> Hit | None:
        """A prefix of which all pages are there; None: it needs a snapshot, and there is none."""
        kept = tuple(own.pages(tokens) for own in there)
        if not self._rules.needs_snapshot(tokens):
            return Hit(tokens, kept)
        if below and tokens % self.unit == 0:
            row, slots = self.snapshot(text, tokens)
            if all(self._below.lookup(key) for key in (row, *slots)):
                return Hit(tokens, kept, row, slots)
        return None

    def page(self, number: int, key: Key, below: bool) -> Found | None:
        """The page of a group that goes by a key."""
        page = self._pages[number].find(key)
        if page is not None:
            return page, key
        key = self.key_below(number, key)
        return (None, key) if below and self._below.takes_pages and self._below.lookup(key) else None

    def group(self, number: int) -> Group:
        return self._pages[number].group

    def keys(self, text: Text, group: Group, pages: int) -> list[Key]:
        """The keys of the first pages of a text."""
        size = group.page_size
        return text.chains.setdefault(size, Chain(text.root, size)).upto(text.tokens, pages)

    def key_below(self, group: int, key: Key) -> Key:
        """The key of a group's page in a store below, which has those of all groups."""
        return tagged(key, f"page of group {group}")

    def snapshot(self, text: Text, tokens: int) -> tuple[Key, tuple[Key, ...]]:
        """The keys of a snapshot of a text's first tokens, and of its slots in the order of tokens."""
        if text.snapshots is None:
            text.snapshots = Chain(tagged(text.root, "snapshots"), self.unit)
        ends = text.snapshots.upto(text.tokens, tokens // self.unit)
        slots = tuple(tagged(end, "slots") for end in ends) if self._rules.in_order else ()
        return tagged(ends[-1], "row"), slots


class _There:
    """What is there of one group's pages of a text; each is looked for once."""

    def __init__(self, lookup: Lookup, text: Text, number: int, most: int, below: bool):
        """most: tokens of a prefix, at most"""
        self._lookup, self._number, self._below = lookup, number, below
        self._group = group = lookup.group(number)
        count = 0 if group.scored else min(most, group.slots) // group.page_size
        self._keys = lookup.keys(text, group, count)
        self._found: dict[int, Found | None] = {}
        self._first = 0  # pages that are all there, where all are needed

    def reach(self, tokens: int) -> int:
        """`tokens`, where all pages are there that a prefix of so many needs.

        Else fewer: what is longer than that, and no longer than this prefix, needs the first page that is not there.
        """
        lacks = self._lacks(tokens)
        if lacks is None:
            return tokens
        return (lacks + 1) * self._group.page_size - 1 + self._group.unsettled

    def _lacks(self, tokens: int) -> int | None:
        count = self._group.findable(tokens)
        if self._group.released is not None:
            places = self._group.read(tokens, count)
            return next((place for place in places if self._at(place) is None), None)
        while self._first < count and self._at(self._first) is not None:
            self._first += 1
        return self._first if self._first < count else None

    def _at(self, place: int) -> Found | None:
        if place not in self._found:
            self._found[place] = self._lookup.page(self._number, self._keys[place], self._below)
        return self._found[place]

    def pages(self, tokens: int) -> tuple[Found, ...]:
        """The first pages, all of which are there that are needed."""
        count = self._group.findable(tokens)
        needed = set(self._group.read(tokens, count))
        return tuple((place in needed and self._at(place)) or _HOLE for place in range(count))
