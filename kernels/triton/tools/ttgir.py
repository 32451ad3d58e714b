"""What a kernel's TTGIR says of its main loop: whether copies of the next tiles are on their way while one is computed.

`num_stages` asks for a pipeline, and does not tell whether there is one: Triton gives the stages to whatever a tile
loads, a page's number among it, and what it cannot copy in pieces of 4 bytes it loads at once. TTGIR is the last form
in which both show: buffers are `ttg.memdesc<2x64x128x..>`, copies that may be under way at the top of a turn are the
number of `ttg.async_wait`, and a `tt.load` of a tensor is one that is waited for. Text in, numbers out; as `sass.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FOR = re.compile(r"^(\s*)(?:%\S+ = )?scf\.for ")
_PRODUCT = re.compile(r"= (?:tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b|^\s*ttng\.tc_gen5_mma\b")
# An array of buffers: name, how many, and the shape of one.
_ALLOC = re.compile(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x((?:\d+x)*\d+)x")
_COPY = re.compile(r"ttg\.async_copy_global_to_local ")
_INDEX = re.compile(r"ttg\.memdesc_index (%[\w$.]+)")
_WAIT = re.compile(r"ttg\.async_wait\b.*?\bnum = (\d+)")
_LOAD = re.compile(r"= tt\.load .* : tensor<")
_USE = re.compile(r"%[\w$.]+")
# An element of an array of barriers, as products into tensor memory have: no tile stands there.
_BARRIER = re.compile(r"\bttng\.init_barrier (%[\w$.]+)")
_NAMED = re.compile(r"^\s*(%[\w$.]+)(?::\d+)? = ")
_VIEW = re.compile(r"= ttg\.memdesc_\w+ (%[\w$.]+)")
# A product that goes on while the program does, and what waits for all of them.
_STARTED = re.compile(r"= ttng\.warp_group_dot .*isAsync = true")
_ENDED = re.compile(r"= ttng\.warp_group_dot_wait .*pendings = 0\b")
_BY_BARRIER = re.compile(r"\bttng\.tc_gen5_mma\b")


@dataclass(frozen=True)
class Pipeline:
    """The main loop's.

    buffers:    of the array of which there are fewest, of those that copies fill; 0: nothing is copied
    wait:       copies that may be under way when a turn begins; None: it waits for none
    sync_loads: loads of tensors that are waited for
    """

    buffers: int
    wait: int | None
    sync_loads: int


def pipeline(ttgir: str) -> Pipeline | None:
    """Of the innermost loop with a matrix product, of several the shortest; None where there is none."""
    lines = ttgir.splitlines()
    bodies = [body for body in _loops(lines) if any(map(_PRODUCT.search, body))]
    inner = [body for body in bodies if not any(_FOR.match(line) for line in body[1:])]
    if not inner:
        return None
    body = min(inner, key=len)
    arrays = {found[1]: int(found[2]) for line in lines if (found := _ALLOC.search(line))}
    views = _views(lines, arrays)
    used = {found[1] for line in body for found in _INDEX.finditer(line)}
    used |= {name for line in body if (name := _filled(line, views))}  # of one buffer, found before the loop
    used -= {views[name] for line in lines for name in _BARRIER.findall(line) if name in views}
    used &= arrays.keys()
    copies = any(map(_COPY.search, body))
    waits = [int(found[1]) for line in body if (found := _WAIT.search(line))]
    return Pipeline(
        min((arrays[name] for name in used), default=0) if copies else 0,
        waits[0] if waits else None,
        sum(1 for line in body if _LOAD.search(line)),
    )


def overtaken(ttgir: str) -> tuple[str, ...]:
    """Arrays of buffers of which a copy may fill one that is still to be read: a race, by the names that TTGIR has.

    Of a loop before which `ahead` copies were made, a turn reads the buffer of that turn, and fills the one `ahead`
    turns later. Where it fills before it has read, one more buffer must be there. (Triton 3.5 counted without that one
    for reads in a branch, which are scheduled last: triton PR 8139.) Turns that stand before the loop, as those for
    tensor memory do, have read their copies. Nothing is said of arrays that products into tensor memory read by
    themselves: these reads end at barriers of another turn, which are not followed here.
    """
    lines = ttgir.splitlines()
    arrays = {found[1]: int(found[2]) for line in lines if (found := _ALLOC.search(line))}
    wrong = []
    for begin, body in _numbered_loops(lines):
        if any(_FOR.match(line) for line in body[1:]):
            continue
        before = _views(lines[:begin], arrays)
        inside = before | _views(body, arrays)
        for name, buffers in arrays.items():
            fills = [at for at, line in enumerate(body) if _filled(line, inside) == name]
            readers = [at for at, line in enumerate(body) if _reads(line, inside, name)]
            if not fills or any(_BY_BARRIER.search(body[at]) for at in readers):
                continue
            reads = [_read_until(body, at) for at in readers]
            turns = sum(_reads(line, before, name) for line in lines[:begin]) // max(1, len(reads))
            ahead = sum(_filled(line, before) == name for line in lines[:begin]) - turns
            if buffers < ahead + (fills[0] < max(reads, default=0)):
                wrong.append(name)
    return tuple(wrong)


def _views(lines: list[str], arrays: dict[str, int]) -> dict[str, str]:
    """Values that are a buffer of an array, or a view of one -> the array."""
    found: dict[str, str] = {}
    for line in lines:
        view = _VIEW.search(line)
        of = view and (view[1] if view[1] in arrays else found.get(view[1]))
        if of and (named := _NAMED.match(line)):
            found[named[1]] = of
    return found


def _filled(line: str, views: dict[str, str]) -> str | None:
    """The array of which a line fills a buffer by a copy."""
    if not _COPY.search(line):
        return None
    return next((views[name] for name in _USE.findall(line.partition("= ")[2]) if name in views), None)


def _reads(line: str, views: dict[str, str], name: str) -> bool:
    """Whether a line reads a buffer of the array, or hands it to the next turn."""
    if _COPY.search(line) or _VIEW.search(line):
        return False
    return any(views.get(used) == name for used in _USE.findall(line.partition("= ")[2] or line))


def _read_until(body: list[str], at: int) -> int:
    """The line of a loop at which a read that begins in line `at` has ended."""
    if "scf.yield" in body[at]:
        return len(body)
    if not _STARTED.search(body[at]):
        return at
    return next((end for end in range(at, len(body)) if _ENDED.search(body[end])), len(body))


def narrow_strides(ttir: str) -> tuple[str, ...]:
    """Strides, arguments `x_s0`, that are multiplied before they have 64 bits: an offset that may not fit."""
    found = set()
    for line in ttir.splitlines():
        if "arith.muli" not in line or not re.search(r": (?:tensor<[\dx]*)?i32\b", line):
            continue
        found |= {name[1:] for name in _USE.findall(line) if re.fullmatch(r"%\w+_s\d", name)}
    # A stride that meets a tensor is splat first.
    for name, source in re.findall(r"(%\S+) = tt\.splat (%\w+_s\d) : i32 ->", ttir):
        if re.search(rf"arith\.muli .*{re.escape(name)}\b.* : tensor<[\dx]*i32", ttir):
            found.add(source[1:])
    return tuple(sorted(found))


def _loops(lines: list[str]) -> list[list[str]]:
    """The lines of each loop, its head first."""
    return [body for _, body in _numbered_loops(lines)]


def _numbered_loops(lines: list[str]) -> list[tuple[int, list[str]]]:
    """The lines of each loop, its head first, and the number of that."""
    found = []
    for number, line in enumerate(lines):
        head = _FOR.match(line)
        if head:
            end = next(at for at in range(number + 1, len(lines)) if lines[at].startswith(head[1] + "}"))
            found.append((number, lines[number : end + 1]))
    return found
