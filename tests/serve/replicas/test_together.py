"""What several engines say, as one."""

from __future__ import annotations

from kvcompile.serve import Stats
from kvcompile.serve.replicas.remote import together


def test_numbers_are_sums_and_words_are_all_that_were_said() -> None:
    one = Stats(running=2, tokens_per_second=1.5, prefix_cache="on", packed="off: asked for")
    other = Stats(running=3, tokens_per_second=2.0, prefix_cache="off: asked for", packed="off: asked for")
    assert together([one, other]) == Stats(
        running=5, tokens_per_second=3.5, prefix_cache="on / off: asked for", packed="off: asked for"
    )
    assert together([]) == Stats()
