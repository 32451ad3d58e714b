"""What a C++ kernel's machine code says: its main loop and what that spills. Libraries in, numbers out, by `objdump`.

A loop is what a backward jump closes. The main loop is the innermost one with the most products; of several with as
many, the shortest. Only x86-64 is read.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcompile.errors import KernelError

_LINE = re.compile(r"^\s*([0-9a-f]+):\s+(?:data16 )*(\S+)\s*(.*?)\s*(?:#.*)?$")
_PRODUCT = re.compile(r"^v?(fn?m(add|sub)\w*[ps]s|dpbf16ps|mulps)$")
# A vector register goes to a fixed place of the frame: `vmovaps %zmm1,0x40(%rsp)`; with an index, it is an array.
_SPILL = re.compile(r"^%[xyz]mm\d+,-?(?:0x[0-9a-f]+)?\(%r[sb]p\)$")


@dataclass(frozen=True)
class Instruction:
    """address: in bytes; name: "vfmadd231ps"; operands: as objdump writes them"""

    address: int
    name: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where it jumps to, if it is a jump to a fixed place."""
        if not self.name.startswith("j"):
            return None
        place = self.operands.partition(" ")[0]
        return int(place, 16) if re.fullmatch("[0-9a-f]+", place) else None

    @property
    def product(self) -> bool:
        return bool(_PRODUCT.match(self.name))

    @property
    def spill(self) -> bool:
        return "mov" in self.name and bool(_SPILL.match(self.operands))


@dataclass(frozen=True)
class MachineCode:
    """size: instructions in all; spills: stores of vector registers to the frame, in all; loop: the main loop's."""

    size: int
    spills: int
    loop: tuple[Instruction, ...]

    @property
    def products(self) -> int:
        return sum(instruction.product for instruction in self.loop)

    @property
    def loop_spills(self) -> int:
        return sum(instruction.spill for instruction in self.loop)


def problem() -> str | None:
    """Why no machine code can be read here, or None."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"machine code is read for x86-64, and this is {platform.machine()}"
    if shutil.which("objdump") is None:
        return "there is no objdump, which reads machine code: install binutils"
    return None


def read(library: Path) -> MachineCode:
    """The machine code of a compiled kernel.

    Raises:
        KernelError: this machine cannot read it.
    """
    if (reason := problem()) is not None:
        raise KernelError(reason)
    command = ["objdump", "-d", "--no-show-raw-insn", "-j", ".text", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise KernelError(f"{library}: objdump cannot read it: {done.stderr.strip()[:400]}")
    return machine_code(done.stdout)


def machine_code(text: str) -> MachineCode:
    """What the text of `objdump -d` says."""
    code = [
        Instruction(int(found[1], 16), found[2], found[3])
        for found in map(_LINE.match, text.splitlines())
        if found and not found[2].startswith("nop")
    ]
    return MachineCode(len(code), sum(each.spill for each in code), main_loop(code))


def main_loop(code: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """The loop that the time goes to, see above; empty where nothing is a loop."""
    ends = [(each.target, each.address) for each in code if each.target is not None]
    spans = [(start, end) for start, end in ends if start <= end]
    inner = [
        (start, end)
        for start, end in spans
        if not any((a, b) != (start, end) and start <= a and b <= end for a, b in spans)
    ]
    bodies = [tuple(each for each in code if start <= each.address <= end) for start, end in inner]
    return max(bodies, key=lambda body: (sum(each.product for each in body), -len(body)), default=())
