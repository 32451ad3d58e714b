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
    used = {found[1] for line in body for found in _INDEX.finditer(line)} & arrays.keys()
    copies = any(map(_COPY.search, body))
    waits = [int(found[1]) for line in body if (found := _WAIT.search(line))]
    return Pipeline(
        min((arrays[name] for name in used), default=0) if copies else 0,
        waits[0] if waits else None,
        sum(1 for line in body if _LOAD.search(line)),
    )


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
    found = []
    for number, line in enumerate(lines):
        head = _FOR.match(line)
        if head:
            end = next(at for at in range(number + 1, len(lines)) if lines[at].startswith(head[1] + "}"))
            found.append(lines[number : end + 1])
    return found
