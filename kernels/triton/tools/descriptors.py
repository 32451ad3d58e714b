"""Whether warp-group products (sm_90) read the tiles that they were given: descriptors in the machine code.

`HGMMA` finds a tile in shared memory by a descriptor, two uniform registers. There are 63 of these, kernels of many
products need more, and the ptxas that comes with Triton 3.6 to 3.7.1 has then added to registers that held something
else: the product reads an address of nobody. On an H200 that was an illegal access; at worst it is another tile.

The upper word of a descriptor is a constant, for each of the three ways in which tiles are laid out: so what is in the
upper register is traced back over copies, and must be one of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvcompile.kernels.triton.tools.sass import Instruction

# PTX ISA, matrix-descriptor format: bits 62 to 63 say how rows of 128, 64 and 32 bytes are swizzled; below stands how
# far groups of eight rows are apart.
UPPER = frozenset({0x40000040, 0x80000020, 0xC0000010})
_PRODUCTS = ("HGMMA", "IGMMA", "QGMMA")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_COPIES = ("MOV", "UMOV", "R2UR", "IMAD.MOV.U32", "IMAD.U32")
# What puts the constant into a word.
_PUTS = ("UMOV", "MOV", "UIADD3.X", "IADD3.X", "ULOP3", "LOP3", "IMAD.MOV.U32")
_CARRIES = ("UIADD3.X", "IADD3.X", "IMAD.X")  # of one word: the word, and what is carried into it
_LONGEST = 32
_WORD = 0xFFFFFFFF
_SMALL = frozenset({0, _WORD})  # upper words of a small number, and of a small one below nought
_PAIRS = re.compile(r"\.64\b")


def lost(code: Sequence[Instruction]) -> tuple[str, ...]:
    """What is wrong with each product whose descriptor is no descriptor; nothing: ()."""
    found = []
    for place, one in enumerate(code):
        match = _DESCRIPTOR.search(one.text) if one.name in _PRODUCTS else None
        if match is None:
            continue
        first = int(match[1])
        # Four registers: of the left operand, which may stand in registers instead, and of the right one.
        uppers = [first + 3] if re.match(r"\S+ R\d+, R\d+", one.bare) else [first + 1, first + 3]
        for upper in uppers:
            said = _traced(code, place, f"UR{upper}")
            if said:
                found.append(f"{one.address:#x}: {one.text}: UR{upper} {said}")
    return tuple(found)


def _traced(code: Sequence[Instruction], place: int, register: str, wanted: frozenset[int] = UPPER) -> str:
    """Why `register` holds none of the `wanted` constants at `place`; "": it does, as far as can be told.

    The text before is taken for what ran before: code of products is straight, and what a loop brings itself is the
    same in its first turn.
    """
    for _ in range(_LONGEST):
        if register in ("URZ", "RZ"):
            return "" if 0 in wanted else "is nought"
        asked, place = register, _written(code, place, register)
        if place < 0:
            return f"needs {asked}, which is written nowhere before"
        text = code[place].bare
        opcode, _, rest = text.partition(" ")
        target, *operands = (part.strip().removesuffix(".reuse") for part in rest.split(","))
        named = [part for part in operands if re.fullmatch(r"-?U?R\d+", part)]
        constants = {int(part, 16) & _WORD for part in operands if re.fullmatch(r"-?0x[0-9a-f]+", part)}
        wrong = f"needs {asked}, which is what {code[place].address:#x} gives: {code[place].text}"
        if opcode == "CS2R":
            register = "RZ" if "SRZ" in operands else asked
        elif opcode.startswith("LDL"):
            kept = _kept(code, place, text)
            if kept is None:
                return wrong
            place, register = kept
            register = register if target == asked else _next(register)
        elif opcode.startswith("ULOP3") and "0x3c" in operands and len(named) == 2:
            return ""  # one of three exclusive ors that exchange two registers: not followed
        elif _PAIRS.search(opcode):  # of both words: a low word and what it carries
            if not opcode.startswith("UIADD3") or target == asked or len(named) > 2:
                return wrong
            if len(named) == 2:  # an address, and the constant or a distance, which may be taken away
                ways = [
                    _traced(
                        code, place, _next(one.removeprefix("-")), _taken(wanted) if one[0] == "-" else wanted
                    )
                    or _traced(code, place, _next(other.removeprefix("-")), _SMALL)
                    for one, other in (named, named[::-1])
                ]
                return "" if "" in ways else ways[0]
            register = _next(named[0]) if named else "URZ"
        elif constants & wanted and opcode.startswith(_PUTS):
            # The word that it is added to, or combined with, has no bits of its own.
            return next((said for part in named if (said := _traced(code, place, part, _SMALL))), "")
        elif not constants and opcode.startswith((*_COPIES, *_CARRIES)) and len(named) <= 1:
            register = named[0] if named else "URZ"
        else:
            return wrong
    return "is copied too often to follow"


def _taken(wanted: frozenset[int]) -> frozenset[int]:
    """Upper words of what is subtracted so that one of `wanted` is left, with a borrow and without one."""
    return frozenset(left & _WORD for one in wanted for left in (-one, ~one))


def _next(register: str) -> str:
    kind = register.rstrip("0123456789")
    return f"{kind}{int(register.removeprefix(kind)) + 1}"


def _kept(code: Sequence[Instruction], before: int, load: str) -> tuple[int, str] | None:
    """Which register was stored where a load of the stack reads, and by which instruction."""
    at = re.search(r"\[.*?\]", load)
    for place in range(before - 1, -1, -1):
        text = code[place].bare
        if at and text.startswith("STL") and at[0] in text:
            return place, text.rpartition(",")[2].strip().removesuffix(".reuse")
    return None


def _written(code: Sequence[Instruction], before: int, register: str) -> int:
    """The last instruction before one that writes the register; -1: none."""
    kind, number = re.fullmatch(r"(U?R)(\d+)", register).groups()  # type: ignore[union-attr]
    pair = f"{kind}{int(number) - 1}" if int(number) % 2 else ""
    for place in range(before - 1, -1, -1):
        text = code[place].bare
        opcode, _, rest = text.partition(" ")
        target = rest.partition(",")[0].strip()
        if target == register or (target == pair and (_PAIRS.search(opcode) or opcode == "CS2R")):
            return place
    return -1
