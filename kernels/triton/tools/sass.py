"""What a cubin's machine code says: its loops, how wide it reads, what it spills. Text of `cuobjdump` in, numbers out.

A loop is what a backward branch closes; the main loop is the innermost one that has a matrix product, of several the
shortest (the tiles without masks), and in kernels without products the longest innermost one. Instructions are those of
one thread: a tile takes `instructions * threads / elements` of them per element that it reads. A turn of a loop steps
over what its branches ask for seldom, arithmetic alone, such as the sums that only a new largest score scales down
(`Loop.turn`): those instructions are in the loop, and are not counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_TARGET = re.compile(r"\b(?:BRA|BRX|JMP)\b.*?0x([0-9a-f]+)")
_RESOURCES = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")
_MATRIX = ("HMMA", "IMMA", "QMMA", "BMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA", "OMMA")
_GLOBAL = ("LDG", "LDGSTS", "LD")
_MEMORY = (*_GLOBAL, "STG", "ST", "LDS", "STS", "LDSM", "STSM", "ATOM", "ATOMG", "RED", "BAR", "LDL", "STL")
_BULK = ("UBLKCP", "UTMALDG")
_WIDTH = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


@dataclass(frozen=True)
class Instruction:
    """address: in bytes; opcode: with its modifiers, "LDG.E.128"; text: all of it, with the predicate"""

    address: int
    opcode: str
    text: str

    @property
    def bare(self) -> str:
        """The text without its predicate."""
        return _PREDICATE.sub("", self.text)

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> int | None:
        """Where it jumps to, if it is a jump to a fixed place."""
        found = _TARGET.search(self.text)
        return int(found[1], 16) if found else None

    @property
    def matrix(self) -> bool:
        return self.name in _MATRIX

    @property
    def load_bits(self) -> int | None:
        """Bits that a thread reads from global memory with it; None where it reads none, 0 for bulk copies."""
        if self.name in _BULK:
            return 0
        if self.name not in _GLOBAL:
            return None
        return self.bits

    @property
    def bits(self) -> int:
        """Of a load or store, what it says that a thread moves."""
        return next((_WIDTH[part] for part in self.opcode.split(".") if part in _WIDTH), 32)


@dataclass(frozen=True)
class Loop:
    """body: the instructions from its head to the branch back"""

    body: tuple[Instruction, ...]

    @property
    def turn(self) -> tuple[Instruction, ...]:
        """The body without what branches forward step over, where that is arithmetic: no memory, no matrix."""
        last = self.body[-1].address
        skipped: set[int] = set()
        for one in self.body:
            target = one.target
            if target is None or not one.address < target <= last:
                continue
            over = [i for i in self.body if one.address < i.address < target]
            if not any(i.matrix or i.name in _MEMORY for i in over):
                skipped |= {i.address for i in over}
        return tuple(i for i in self.body if i.address not in skipped)

    @property
    def instructions(self) -> int:
        return sum(instruction.name != "NOP" for instruction in self.turn)

    @property
    def products(self) -> int:
        """Matrix instructions."""
        return sum(instruction.matrix for instruction in self.body)

    @property
    def loads(self) -> dict[int, int]:
        """Bits of a load -> how many such loads from global memory."""
        found = Counter(i.load_bits for i in self.body if i.load_bits is not None)
        return dict(sorted((bits, count) for bits, count in found.items() if bits is not None))

    @property
    def barriers(self) -> int:
        """Barriers of all warps of a program."""
        return sum(instruction.name == "BAR" for instruction in self.body)

    @property
    def byte_loads(self) -> int:
        """Loads of single bytes from shared memory."""
        return sum(i.name == "LDS" and bool({"U8", "S8"} & {*i.opcode.split(".")}) for i in self.body)

    @property
    def opcodes(self) -> dict[str, int]:
        """Instructions by name, the most frequent first."""
        return dict(Counter(instruction.name for instruction in self.body).most_common())


def instructions(sass: str) -> tuple[Instruction, ...]:
    """The lines of `cuobjdump -sass` that are instructions, of one kernel."""
    found = []
    for line in sass.splitlines():
        match = _LINE.match(line)
        if match:
            text = match[2]
            opcode = _PREDICATE.sub("", text).split()[0]
            found.append(Instruction(int(match[1], 16), opcode, text))
    return tuple(found)


def loops(code: Sequence[Instruction]) -> tuple[Loop, ...]:
    """All loops, in the order of their ends; a branch to itself (the end of a kernel) is none."""
    found = []
    for index, instruction in enumerate(code):
        target = instruction.target
        if target is not None and target < instruction.address:
            body = tuple(i for i in code[: index + 1] if i.address >= target)
            found.append(Loop(body))
    return tuple(found)


def full_opcodes(code: Iterable[Instruction]) -> dict[str, int]:
    """Opcodes with their modifiers -> how many, without what does nothing."""
    return dict(sorted(Counter(one.opcode for one in code if one.name != "NOP").items()))


def waits(code: Iterable[Instruction]) -> int:
    """How often a thread waits for global memory, one load after another: of straight code, which is read as it stands.

    Loads that are all asked for before one of them is used are waited for once; so are copies to shared memory.
    """
    now, copied = 0, 0
    ready: dict[int, int] = {}  # when a register has what was loaded
    for one in code:
        operands = one.bare.partition(" ")[2]
        if one.name == "DEPBAR":
            now = max(now, copied)
        elif one.name == "LDGSTS" and not operands.endswith("!PT"):  # that one is never made
            now = max(now, _arrived(ready, operands))
            copied = now + 1
        elif one.name in ("LDG", "LD"):
            target, _, address = operands.partition(",")
            now = max(now, _arrived(ready, address))
            first = int(target.strip().removeprefix("R"))
            ready |= {first + word: now + 1 for word in range(max(1, one.bits // 32))}
        else:
            stored = one.name in ("STG", "STS", "ST")
            now = max(now, _arrived(ready, operands, one.bits // 32 if stored else 1))
    return now


def _arrived(ready: Mapping[int, int], operands: str, words: int = 1) -> int:
    """When the registers of operands have what was loaded; words: that the last operand has"""
    *others, last = operands.rpartition(",")
    found = 0
    for text, least in ((others[0], 1), (last, words)):
        for first, pair in _REGISTER.findall(text):
            found = max(found, *(ready.get(int(first) + word, 0) for word in range(2 if pair else least)), 0)
    return found


def outside(code: Sequence[Instruction], found: Sequence[Loop]) -> int:
    """Instructions that are in no loop, without what does nothing."""
    spans = [(loop.body[0].address, loop.body[-1].address) for loop in found]
    return sum(
        one.name != "NOP" and not any(first <= one.address <= last for first, last in spans) for one in code
    )


def main_loop(found: Sequence[Loop]) -> Loop | None:
    """The loop that the time goes to, see above; None where there is none."""
    inner = [loop for loop in found if not any(_within(other, loop) for other in found)]
    products = [loop for loop in inner if loop.products]
    if products:
        return min(products, key=lambda loop: loop.instructions)
    reading = [loop for loop in inner if loop.loads]
    return max(reading or inner, key=lambda loop: loop.instructions, default=None)


def resources(usage: str) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL of `cuobjdump -res-usage`, of one kernel; bytes, and registers of a thread."""
    return {name: int(value) for name, value in _RESOURCES.findall(usage)}


def spills(code: Iterable[Instruction]) -> int:
    """Loads and stores of local memory, where registers that are too many go."""
    return sum(instruction.name in ("LDL", "STL") for instruction in code)


def _within(inner: Loop, outer: Loop) -> bool:
    first, last = inner.body[0].address, inner.body[-1].address
    own = (outer.body[0].address, outer.body[-1].address)
    return own != (first, last) and own[0] <= first and last <= own[1]
