"""Programs of a multiprocessor, against those that were worked out by hand, and pipes of instructions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcompile.kernels.triton.device import Device
from kvcompile.kernels.triton.predict.model import Model
from kvcompile.kernels.triton.predict.occupancy import ROOM, occupancy
from kvcompile.kernels.triton.predict.pipes import clocks, load_clocks, pipe_of, rates
from kvcompile.util.machines import MACHINES

H200 = Model(MACHINES["h200"])


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "programs", "by"),
    [
        (136, 71680, 4, 3, "registers"),
        (107, 71680, 4, 3, "shared memory"),
        (101, 38928, 4, 4, "registers"),
        (254, 27648, 4, 2, "registers"),
        (168, 23296, 4, 3, "registers"),
        (17, 0, 1, 32, "programs"),
        (32, 0, 8, 8, "registers"),
        (24, 0, 16, 4, "warps"),
        (255, 0, 16, 0, "registers"),
        (32, 230 * 1024, 4, 0, "shared memory"),
    ],
)
def test_programs_of_a_multiprocessor_of_an_h200(
    registers: int, shared: int, warps: int, programs: int, by: str
) -> None:
    found = occupancy(registers, shared, warps, 90)
    assert (found.programs, found.by) == (programs, by)


@given(
    st.integers(16, 255), st.integers(0, 230_000), st.sampled_from([1, 2, 4, 8]), st.sampled_from(list(ROOM))
)
def test_who_takes_more_leaves_room_for_no_more(registers: int, shared: int, warps: int, arch: int) -> None:
    here = occupancy(registers, shared, warps, arch).programs
    assert occupancy(min(registers + 8, 255), shared, warps, arch).programs <= here
    assert occupancy(registers, shared + 1024, warps, arch).programs <= here
    assert here * warps <= ROOM[arch].warps and here * shared <= ROOM[arch].shared


def test_every_device_of_the_table_has_room_and_rates() -> None:
    for machine in MACHINES.values():
        assert machine.arch in ROOM and set(rates(machine.arch)) == set(rates(90))
        assert Device("", machine.arch, 1).shared < ROOM[machine.arch].shared
        assert 0.5 < machine.copy < 1 and machine.copied < machine.bandwidth


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("HMMA.16816.F32", "products"),
        ("HGMMA.64x64x16.F32", "products"),
        ("FFMA.FTZ", "float"),
        ("HFMA2.BF16_V2", "half"),
        ("IMAD.WIDE", "multiply"),
        ("PRMT", "integer"),
        ("LOP3.LUT", "integer"),
        ("MUFU.EX2", "special"),
        ("LDGSTS.E.BYPASS.LTC128B.128", "loads"),
        ("UIADD3", ""),
        ("BAR.SYNC.DEFER_BLOCKING", ""),
    ],
)
def test_the_pipe_of_an_instruction(opcode: str, pipe: str) -> None:
    assert pipe_of(opcode) == pipe


def test_loads_take_as_long_as_their_bytes() -> None:
    assert load_clocks("LDS.U8") == load_clocks("LDS") == load_clocks("SHFL.BFLY") == 1
    assert load_clocks("LDS.64") == 2 and load_clocks("LDG.E.128") == 4
    assert load_clocks("LDSM.16.M88.4") == 4 and load_clocks("LDSM.16.MT88.2") == 2


def test_clocks_of_a_turn() -> None:
    """Four warps of ten instructions: ten clocks of all schedulers, and what is assumed to be lost."""
    found = clocks({"FFMA": 4, "LOP3.LUT": 4, "MUFU.EX2": 2}, 4, H200)
    assert found == pytest.approx(
        {"float": 4.0, "integer": 8.0, "special": 16.0, "issue": 10 / H200.assumed.issued}
    )
    products = clocks({"HMMA.16816.F32.BF16": 32}, 4, H200)["products"]
    per_clock = 989e12 * H200.assumed.single / (132 * 1.98e9)
    assert products == pytest.approx(128 * 2 * 16 * 8 * 16 / per_clock)
    # What warp groups multiply is not in their name: the tile's operations count.
    groups = clocks({"HGMMA.64x64x16.F32.BF16": 8}, 4, H200, 1e6)["products"]
    assert groups == pytest.approx(1e6 / (989e12 / (132 * 1.98e9)))
