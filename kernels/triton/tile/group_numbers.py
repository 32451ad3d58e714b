"""Rows of numbers of groups of channels: what a token has of scales, or of minima, as a power of two of columns.

Of two, four, eight groups such a row is loaded as it stands. Three groups (heads of 96 channels) are no block, and of
four columns of which one is masked Triton would load each number by itself: two bytes are not copied ahead, and every
turn of a loop would wait for them. So the words of four bytes that a row stands in are read, from a multiple of four
bytes on, and its numbers are taken out of those:

    words of tokens 2n and 2n + 1     | 2n: 0, 1 | 2n: 2, 2n + 1: 0 | 2n + 1: 1, 2 |
    those of 2n + 1, moved down       | 2n + 1: 0, 1 | 2n + 1: 2, nothing |

No word is read that has no byte of the row, and one that begins in a tensor ends in its memory, which is whole words.
"""

from __future__ import annotations

import math
from itertools import pairwise

from kvcompile.kernels.triton.tile.addressing import SlotArray
from kvcompile.layouts import Storage

_WORD = 4  # bytes


def columns(storage: Storage, dim: int) -> int:
    """Columns of a block of all groups' numbers: a power of two."""
    count, size = storage.groups(dim), storage.scale.torch_dtype.itemsize
    if _power(count) or size == _WORD:
        return _up(count)
    return _up(-(-count * size // _WORD)) * _WORD // size


def loaded(source: SlotArray, part: str, name: str, storage: Storage, dim: int, masked: bool) -> list[str]:
    """Lines that define `name`, [BLOCK_N, columns]: numbers of `part` as they are stored, and zeros beyond them."""
    count, size, rows = storage.groups(dim), storage.scale.torch_dtype.itemsize, source.block_n
    inside = ["inside[:, None]"] if masked else []
    if _power(count) or size == _WORD:
        column = f"tl.arange(0, {_up(count)})[None, :]"
        at = source.rows(part, count, column)
        return [f"{name} = tl.load({at}{_guard([*inside, *_beyond(column, count)])})"]
    row = count * size
    starts = row % _WORD
    lines = [f"{name}_byte = {source.row} * {row}"]
    guard = ", mask=inside, other=0" if masked else ""
    pointer = f"{source.prefix}{part}_ptr.to(tl.pointer_type(tl.uint32))"
    words = [f"{name}_{index}" for index in range(_words(row))]
    for index, word in enumerate(words):
        at = f"{name}_byte // {_WORD}" + (f" + {index}" if index else "")
        if _WORD * index >= row:  # a word that only some rows reach into
            at = f"({name}_byte + {row - 1}) // {_WORD}"
        lines.append(f"{word} = tl.load({pointer} + {at}{guard})")
    if starts:
        lines.append(f"{name}_bits = {name}_byte % {_WORD} * 8")
        lines += [f"{word} = moved_down({word}, {after}, {name}_bits)" for word, after in pairwise(words)]
        lines.append(f"{words[-1]} = {words[-1]} >> {name}_bits.to(tl.uint32)")
        last = words[row // _WORD]
        lines.append(f"{last} = {last} & {(1 << 8 * starts) - 1}")
        words = words[: row // _WORD + 1]
    words += [f"tl.zeros_like({words[0]})"] * (_up(len(words)) - len(words))
    lines.append(f"{name} = {_joined(words, rows)}")
    if size == 2:
        lines.append(f"{name} = halves_of({name}, {rows}, {2 * len(words)}).to(tl.float16, bitcast=True)")
    else:
        lines.append(f"{name} = bytes_of({name}, {rows}, {4 * len(words)})")
    return lines


def _joined(words: list[str], rows: int) -> str:
    """An expression: blocks [rows], a power of two of them, as the columns of one."""
    if len(words) == 1:
        return f"{words[0]}[:, None]"
    if len(words) == 2:
        return f"tl.join({words[0]}, {words[1]})"
    halves = [_joined(words[odd::2], rows) for odd in (0, 1)]
    return f"tl.reshape(tl.join({halves[0]}, {halves[1]}), [{rows}, {len(words)}])"


def _words(row: int) -> int:
    """Words that a row of so many bytes may stand in."""
    return -(-(row + _WORD - math.gcd(row, _WORD)) // _WORD)


def _beyond(column: str, count: int) -> list[str]:
    return [] if _power(count) else [f"({column} < {count})"]


def _guard(conditions: list[str]) -> str:
    return f", mask={' & '.join(conditions)}, other=0.0" if conditions else ""


def _power(count: int) -> bool:
    return count & (count - 1) == 0


def _up(count: int) -> int:
    return 1 << (count - 1).bit_length()
