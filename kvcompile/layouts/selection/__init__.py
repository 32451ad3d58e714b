"""Selection: which of the tokens that are kept a decode step reads.

| selection | a query reads | file |
|---|---|---|
| AllTokens | every token that its retention keeps | `all_tokens.py` |
| TopPages | the pages of tokens that may matter most to it (Quest) | `top_pages.py` |

A retention forgets; a selection only does not look. So memory stays what it is, and what is read of it shrinks.
What a selection is asked is in `hooks.py`.
"""

from __future__ import annotations

from typing import Any

from kvcompile.layouts.selection.all_tokens import AllTokens
from kvcompile.layouts.selection.hooks import Hooks
from kvcompile.layouts.selection.top_pages import TopPages

Selection = Hooks
# A selection's class, by its `kind`.
SELECTIONS: list[type[Selection]] = [AllTokens, TopPages]


def selection_from(data: dict[str, Any]) -> Selection:
    """Rebuild a selection from `dataclasses.asdict`."""
    return next(cls for cls in SELECTIONS if cls.kind == data["kind"])(**data)


__all__ = ["SELECTIONS", "AllTokens", "Selection", "TopPages", "selection_from"]
