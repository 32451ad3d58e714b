"""What of a text is in the cache already, or in a store below it: the longest prefix of which all is there.

Pages are found one by one, each by its key. Where a prefix is not all in pages, a snapshot must end with it, too, which
chunks of prompts leave at multiples of `unit` tokens: ends of chunks, and of pages of every group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcompile.serve.pages import Group, Key, Pages
from kvcompile.serve.prefix import Chain, tagged
from kvcompile.serve.texts import Rules, Text
from kvcompile.serve.tiers import Below

Found = tuple[int | None, Key]  # a page, or None where it is in a store below, and its key there


@dataclass(frozen=True)
class Hit:
    """A prefix that is there.

    pages: by group, the first pages
    row, slots: keys of the snapshot that ends with it, as `Restore` has them; None: it needs none
    """

    tokens: int
    pages: tuple[tuple[Found, ...], ...]
    row: Key | None = None
    slots: tuple[Key, ...] = ()

    def held(self, group: int) -> list[int | None]:
        """Pages of a group that are there; None for those that come up."""
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
        pages = [self._found(text, number, most, below) for number in range(len(self._pages))]
        for own, found in zip(self._pages, pages, strict=True):
            group = own.group
            if not group.scored and group.sinks is None:
                most = min(most, (len(found) + 1) * group.page_size - 1 + group.unsettled)
        for tokens in range(most // self._step * self._step, 0, -self._step):
            counts = [own.group.findable(tokens) for own in self._pages]
            if any(len(found) < count for found, count in zip(pages, counts, strict=True)):
                continue
            kept = tuple(tuple(found[:count]) for found, count in zip(pages, counts, strict=True))
            if not rules.needs_snapshot(tokens):
                return Hit(tokens, kept)
            if below and tokens % self.unit == 0:
                row, slots = self.snapshot(text, tokens)
                if all(self._below.lookup(key) for key in (row, *slots)):
                    return Hit(tokens, kept, row, slots)
        return self.nothing()

    def _found(self, text: Text, number: int, most: int, below: bool) -> list[Found]:
        """The first pages of a text that are there, of one group."""
        pages, found = self._pages[number], []
        for key in self.keys(text, pages.group, _in_order(pages.group, most)):
            page, kept = pages.find(key), key
            if page is None:
                kept = self.key_below(number, key)
                if not (below and self._below.takes_pages and self._below.lookup(kept)):
                    break
            found.append((page, kept))
        return found

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


def _in_order(group: Group, tokens: int) -> int:
    """How many of a text's first pages could be found while it had fewer tokens."""
    return 0 if group.scored else min(tokens, group.slots) // group.page_size
