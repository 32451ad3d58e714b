"""An error in one line: its kind, its text, and the line of the model's own code that it came through."""

from __future__ import annotations

import traceback

from kvcompile.util.own_code import KVCOMPILE, TORCH

SPECIALISED = "the example's sizes were specialised: "


def first_line(error: Exception) -> str:
    """The first line of an error, and the innermost line of the model's own code it came through."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    detail = next((line.lstrip("- ") for line in lines[1:] if line.startswith("- ")), "")
    if "onstraints violated" in text and detail:
        # The first line of this one says nothing, the first item all.
        text = f"{SPECIALISED}{detail.split('. If')[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((TORCH, *KVCOMPILE, "<"))]
    where = f" ({own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {text[:300]}{where}"
