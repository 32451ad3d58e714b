"""The pages of one group of layers, shared by texts: references, and what is kept after the last one went.

A page is in one of four states:

    free      nobody's, holds nothing that anyone could look for
    cached    nobody's, found by its key; taken when nothing is free, the one that was left longest ago first
    held      of as many texts as it has references; found by its key, if it has one
    (page 0)  nobody's, ever

Taking a page forgets its key, and tells it: what the page holds until it is written may go elsewhere under it. Texts
give their pages back last page first, so that a prefix goes from its end.

In the table of a text, a page that was given back because the window has left it behind is a hole: page 0, of which
nobody has a reference.

Source: vLLM v1, whose list of free blocks is its LRU (docs: design/prefix_caching).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvcompile.layouts.pages import Released

Key = bytes
HOLE = 0  # stands in a table for a page that was given back


@dataclass(frozen=True)
class Group:
    """Layers whose texts have the same pages.

    page_size, slots: as `layouts.pages.PageGroup` has them
    sinks:  slots that are never written again, where the others are a ring; None: the slots are written once, in order
    scored: whether any slot may be written once all are taken, as scores decide
    pages:  that there are, without page 0
    unsettled: newest tokens of a text whose slots may be written when later ones come
    released: what of a text stays, where pages behind a window are given back; None: all that the slots hold
    """

    page_size: int
    slots: int
    pages: int
    sinks: int | None = None
    scored: bool = False
    unsettled: int = 0
    released: Released | None = None

    def pages_for(self, tokens: int) -> int:
        """Places in the table of a text that has so many tokens: its pages, and holes."""
        return -(-min(tokens, self.slots) // self.page_size)

    def behind(self, tokens: int) -> range:
        """The places that are holes once a text has so many tokens."""
        return range(0) if self.released is None else self.released.behind(tokens, self.page_size)

    def filled(self, tokens: int) -> list[int]:
        """The places of pages that a text of so many tokens has."""
        return self.read(tokens, self.pages_for(tokens))

    def read(self, tokens: int, places: int) -> list[int]:
        """Of the first places, those of pages that are read after so many tokens."""
        gone = self.behind(tokens)
        return [*range(min(gone.start, places)), *range(gone.stop, places)]

    def most(self, start: int, end: int, chunk: int, beside: int = 0) -> int:
        """Pages that a text of `start` tokens has for itself at a time until it has `end`, at most.

        chunk: tokens that come at once, at most; beside: pages that others have, too
        """
        ever = self.pages_for(end) - len(self.behind(start)) - beside
        return ever if self.released is None else min(ever, self.released.most(chunk, self.page_size))

    def findable(self, tokens: int) -> int:
        """The first pages of a text of so many tokens that are full, and a function of the tokens up to their end."""
        if self.scored or (self.sinks is not None and tokens > self.slots):
            return 0
        return max(tokens - self.unsettled, 0) // self.page_size

    def written(self, start: int, end: int) -> Iterator[int]:
        """The places in its table of the pages that tokens [start, end) of a text are written to, or those before that
        settle then."""
        if self.scored and end > self.slots:
            yield from range(self.pages_for(self.slots))
            return
        start = max(start - self.unsettled, 0)
        first, last = start // self.page_size, -(-min(end, self.slots) // self.page_size)
        yield from range(min(first, last), last)
        if self.sinks is None or end <= self.slots:
            return
        # What goes round: from the first token beyond the slots on, at most once around.
        ring = self.slots - self.sinks
        begin = max(start, self.slots, end - ring)
        seen = set(range(min(first, last), last))
        for position in range(begin, end):
            place = (self.sinks + (position - self.sinks) % ring) // self.page_size
            if place not in seen:
                seen.add(place)
                yield place


class Pages:
    """Who has which pages of one group, and which are found by a key."""

    def __init__(self, group: Group):
        self.group = group
        self.clear()

    def clear(self) -> None:
        """All pages are free, whoever had them."""
        group = self.group
        self._references = [0] * (group.pages + 1)
        # Nobody's pages, the next to be taken first: free ones before cached ones.
        self._nobodys: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, group.pages + 1))
        self._key: dict[int, Key] = {}
        self._page: dict[Key, int] = {}
        self.cached = 0  # nobody's pages that are found by a key

    @property
    def available(self) -> int:
        """Pages that can be taken: free or cached."""
        return len(self._nobodys)

    @property
    def held(self) -> int:
        return self.group.pages - len(self._nobodys)

    def references(self, page: int) -> int:
        return self._references[page]

    def key(self, page: int) -> Key | None:
        return self._key.get(page)

    def take(self) -> tuple[int, Key | None]:
        """A page for one text, which nothing finds any more, and by which key it was found until now; there must be
        one `available`."""
        page, _ = self._nobodys.popitem(last=False)
        key = self.forget(page)
        self.cached -= key is not None
        self._references[page] = 1
        return page, key

    def hold(self, page: int) -> None:
        """Another text has this page, which is cached or held; of a hole nothing is held."""
        if page == HOLE:
            return
        if not self._references[page]:
            del self._nobodys[page]
            self.cached -= page in self._key
        self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """A text gives these back, in the order of its table."""
        for page in reversed([page for page in pages if page != HOLE]):
            assert self._references[page] > 0, f"page {page} is nobody's"
            self._references[page] -= 1
            if not self._references[page]:
                self._nobodys[page] = None
                if page in self._key:
                    self.cached += 1
                else:
                    self._nobodys.move_to_end(page, last=False)

    def register(self, page: int, key: Key) -> None:
        """Let a page that a text holds be found by a key, unless another one is already."""
        assert self._references[page] > 0, f"page {page} is nobody's"
        if key not in self._page and page not in self._key:
            self._page[key], self._key[page] = page, key

    def find(self, key: Key) -> int | None:
        return self._page.get(key)

    def forget(self, page: int) -> Key | None:
        """Nothing finds this page any more: the text that holds it is going to write it; the key that it had."""
        key = self._key.pop(page, None)
        if key is not None:
            del self._page[key]
        return key

    def found(self) -> Iterator[tuple[int, Key]]:
        """Every page that is found by a key, those first that are taken first."""
        nobodys = [page for page in self._nobodys if page in self._key]
        held = [page for page in self._key if self._references[page]]
        for page in (*nobodys, *held):
            yield page, self._key[page]

    def check(self) -> None:
        """Refuse a state that cannot be: for tests."""
        for page, count in enumerate(self._references):
            assert page == 0 or (page in self._nobodys) == (count == 0), f"page {page}: {count} references"
        assert 0 not in self._nobodys and self._references[0] == 0
        assert {page: key for key, page in self._page.items()} == self._key
        assert self.cached == sum(page in self._key for page in self._nobodys)
        order = [page in self._key for page in self._nobodys]
        assert order == sorted(order), "a cached page would be taken before a free one"
