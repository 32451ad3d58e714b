"""Descriptors of warp-group products, by machine code as ptxas writes it, and by what it wrote once that failed."""

from __future__ import annotations

import pytest

from kvcompile.kernels.triton.tools.descriptors import lost
from kvcompile.kernels.triton.tools.sass import Instruction, instructions


def listing(*lines: str) -> tuple[Instruction, ...]:
    return instructions("\n".join(f"/*{16 * place:04x}*/ {line} ;" for place, line in enumerate(lines)))


PRODUCT = "HGMMA.64x32x16.F32 R24, R4, gdesc[UR36].tnspB, R24"
GOOD = {
    "a constant": ("UMOV UR38, UR33", "UMOV UR39, 0x80000020", PRODUCT),
    "of rows of 32 bytes": ("UMOV UR39, 0xc0000010", PRODUCT),
    "a sum with what is carried": (
        "UMOV UR7, URZ",
        "UIADD3 UR38, UP0, UR17, 0x2, URZ",
        "UIADD3.X UR39, UR7, 0x40000040, URZ, UP0, !UPT",
        PRODUCT,
    ),
    "a constant with a sign": ("UIADD3.X UR39, URZ, -0x7fffffe0, URZ, UP1, !UPT", PRODUCT),
    "a distance added to both words": ("UMOV UR35, 0x40000040", "UIADD3.64 UR38, UR34, 0x80, URZ", PRODUCT),
    "a distance in registers": (
        "UMOV UR35, 0x40000040",
        "UMOV UR9, URZ",
        "UIADD3.64 UR38, UR8, UR34, URZ",
        PRODUCT,
    ),
    "an address less a constant": (
        "UMOV UR29, URZ",
        "UMOV UR55, 0x7fffffdf",
        "UIADD3.64 UR38, UR28, -UR54, URZ",
        PRODUCT,
    ),
    "kept in a register of the threads": (
        "UMOV UR15, 0x80000020",
        "MOV R215, UR15",
        "UMOV UR15, UR4",
        "R2UR UR39, R215",
        PRODUCT,
    ),
    "kept on the stack": (
        "CS2R R16, SRZ",
        "IADD3.X R17, R17, 0x40000040, RZ, P1, !PT",
        "STL.64 [R1+0x18], R16",
        "LDL.64 R20, [R1+0x18]",
        "R2UR UR39, R21",
        PRODUCT,
    ),
    "both operands in shared memory": (
        "UMOV UR37, 0x40000040",
        "UMOV UR39, 0x40000040",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR36], R24",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_descriptors_are_followed(name: str) -> None:
    assert lost(listing(*GOOD[name])) == ()


@pytest.mark.parametrize("name", GOOD)
def test_without_its_constant_each_is_lost(name: str) -> None:
    """Whatever a register is copied through, what is no upper word of a descriptor is none."""
    constants = ("0x80000020", "0xc0000010", "-0x7fffffe0", "0x40000040", "0x7fffffdf")
    changed = []
    for line in GOOD[name]:
        for constant in constants:
            line = line.replace(constant, "0x40")
        changed.append(line)
    assert lost(listing(*changed))


def test_a_sum_with_an_address_is_lost() -> None:
    """As ptxas of Triton 3.6 to 3.7.1 has it of a prompt over int8 keys and int4 values: a pointer is there still."""
    found = lost(
        listing(
            "ULEA.HI.X UR11, UR23, UR25, UR22, 0x7, UP1",
            "UIADD3 UR30, UP0, UR45, UR12, URZ",
            "UIADD3 UR11, UP0, UR11, 0x40, URZ",
            "UIADD3.X UR30, UR30, -0x7fffffe0, URZ, UP0, !UPT",
            "UMOV UR35, UR30",
            "IMAD.U32 R215, RZ, RZ, UR35",
            "R2UR UR39, R215",
            PRODUCT,
        )
    )
    assert len(found) == 1 and "needs UR30, which is what 0x10 gives" in found[0]


def test_what_nobody_has_written_is_lost() -> None:
    (found,) = lost(listing("UMOV UR38, UR33", PRODUCT))
    assert "UR39, which is written nowhere before" in found


def test_other_code_has_no_descriptors() -> None:
    assert lost(listing("HMMA.16816.F32.BF16 R24, R4, R8, R24", "UMOV UR39, UR2")) == ()
