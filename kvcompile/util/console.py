"""Text for people: bytes in and out, and rich tables rendered to plain text of a given width."""

from __future__ import annotations

import io
import re
import reprlib
from typing import TYPE_CHECKING

from kvcompile.errors import KVCompileError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 100
MOST_BYTES = 1 << 60
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000), ("", 1024))
}


def parse_bytes(text: str | int) -> int:
    """Bytes as an int: 512, "512 MiB", "24GiB", "24GB" (decimal), "24G" (binary).

    Raises:
        KVCompileError: not a positive size in one of these spellings.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise KVCompileError(
            f"memory: expected a size such as '24GiB' or a number of bytes, got {shown(text)}"
        )
    size: int
    if isinstance(text, int):
        size = text
    else:
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-zA-Z]*)\s*", text)
        factor = _FACTORS.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise KVCompileError(
                f"memory: expected a size such as '24GiB', '24GB' or '512MiB', got {shown(text)}"
            )
        number, _, fraction = match[1].partition(".")
        size = int(number + fraction) * factor // 10 ** len(fraction)
    if not 1 <= size < MOST_BYTES:
        raise KVCompileError(f"memory: expected at least one byte, and less than 1 EiB, got {shown(text)}")
    return size


def shown(value: object) -> str:
    """`repr(value)`, as short as a message wants it, whatever it is."""
    short = reprlib.Repr()
    short.maxstring, short.maxlong, short.maxother, short.maxlevel = 200, 60, 200, 3
    try:
        return short.repr(value)
    except ValueError:  # Python writes no number of so many digits
        return (
            f"a number of about {int(value).bit_length() * 3 // 10:,} digits"
            if isinstance(value, int)
            else "?"
        )


def format_bytes(count: int) -> str:
    """Bytes in the largest binary unit of which there is at least one: 131072 -> "128 KiB"."""
    power = min(max(int(count).bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    value = count / 1024**power
    digits = 0 if value == int(value) else 1 if value >= 100 else 2
    return f"{value:,.{digits}f} {_UNITS[power]}"


def format_layers(layers: tuple[int, ...]) -> str:
    """Layer numbers with runs as ranges: (0, 1, 2, 5) -> "0-2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def table(*columns: str, right: tuple[str, ...] = (), grow: tuple[str, ...] = ()) -> Table:
    """A light table; `right` columns are numbers, `grow` columns take the width that is left."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column in right,
            ratio=1 if column in grow else None,
            overflow="fold",
        )
    return made


def render(renderable: RenderableType, width: int = WIDTH) -> str:
    """What a terminal of `width` columns would show, without colours, no spaces at the ends of lines."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(renderable)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())
