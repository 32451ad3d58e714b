"""Keys by which a page is found: a chain of hashes over the tokens up to its end.

    key(page i) = sha256(key(page i - 1) ‖ its tokens)      key(page -1) = the root

The root holds what the bytes of a page depend on besides tokens: this engine's own secret, the plan, its calibrated
scales, and the salt of whoever may share them. So no two engines, plans or salts ever have a key in common, and nobody
who does not know the secret can make one. Where pages outlive the engine, the secret is kept with them.

Things of other kinds have other keys: the same tokens are on a page in every group, and a snapshot may end where a page
does.

Source: vLLM's prefix caching (docs: design/prefix_caching), with sha256 and the salt in the root.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from kvcompile.serve.pages import Key


def root(*parts: str | bytes) -> Key:
    """The key before the first page; every part is tagged by its length, so that none runs into the next."""
    digest = hashlib.sha256(b"kvcompile prefix 1")
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def tagged(key: Key, what: str) -> Key:
    """The key of another thing that holds the same tokens."""
    return hashlib.sha256(b"kvcompile kind " + what.encode() + b"\0" + key).digest()


class Chain:
    """The keys of one text's full pages, made as its tokens come."""

    def __init__(self, start: Key, page_size: int):
        self.page_size = page_size
        self._start = start
        self._keys: list[Key] = []

    def upto(self, tokens: Sequence[int], pages: int) -> list[Key]:
        """The keys of the first `pages` pages of a text, which only ever goes on."""
        while len(self._keys) < pages:
            begin = len(self._keys) * self.page_size
            before = self._keys[-1] if self._keys else self._start
            own = array("q", tokens[begin : begin + self.page_size])
            assert len(own) == self.page_size, "only full pages have keys"
            self._keys.append(hashlib.sha256(before + own.tobytes()).digest())
        return self._keys[:pages]
