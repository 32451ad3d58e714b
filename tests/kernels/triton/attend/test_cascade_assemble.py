"""Kernels that read common pages once, ahead of time, with no GPU: what they cost a step that has nothing in common."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from kvcompile.kernels.triton.attend import cascade, work_list
from kvcompile.kernels.triton.predict.occupancy import occupancy
from kvcompile.kernels.triton.tools.assemble import ARCHES, Assembled, Request, assemble
from kvcompile.layouts import CacheLayout, Paged, fp8, int8, uint
from tests.kernels.triton.attend.test_assemble import SPILLS, asked, pipeline_of, worse
from tests.support.kernel_specs import DEVICES, SHAPES

LAYOUTS = {
    "pages": CacheLayout(placement=Paged(16)),
    "pages of 64": CacheLayout(placement=Paged(64)),
    "int8 in pages": CacheLayout(int8(), int8(), Paged(16)),
    "int8 in pages of 64": CacheLayout(int8(), int8(), Paged(64)),
    "fp8 in pages of 64": CacheLayout(fp8(), fp8(), Paged(64)),
    "int4 in pages of 64": CacheLayout(uint(4), uint(4), Paged(64)),
}
# In pages of 64 a page's number is computed once more in each turn; what a step of the model's dtype has to spare.
MORE = 1.06


def requests(layout: str, shape: str, arch: int) -> list[Request]:
    """Decode and append in bundles, then decode of which each sequence reads its own."""
    found = []
    for within in (nullcontext(), cascade.alone()):
        with within:
            launches = SHAPES[shape].kernels(LAYOUTS[layout], DEVICES[arch], 1)
        found += [one for role in ("decode", "append") for one in launches if one.spec.role == role]
    assert [cascade.CASCADE in one.spec.options for one in found] == [True, False, False, False]
    return [asked(one, arch) for one in found[:3]]


def problems(asked_for: list[Request], made: list[Assembled]) -> list[str]:
    decode, append, plain = made
    wrong = []
    for one in (decode, append):
        if one.loop_spills or one.spills > (SPILLS if one is decode else 0):
            wrong.append(f"{one.role}: {one.spills} spills, {one.loop_spills} of them in the main loop")
    room, most = (occupancy(registers, append.shared, 1, append.arch) for registers in (append.registers, 32))
    if room.programs < most.programs:
        wrong.append(f"append: {room.programs} programs fit a multiprocessor, of {most.programs}")
    assert decode.per_element is not None and plain.per_element is not None
    fit = [occupancy(one.registers, one.shared, asked_for[0].num_warps, one.arch) for one in (decode, plain)]
    # Where the assembler takes fewer registers, so that more programs fit, it takes more instructions.
    if decode.per_element > plain.per_element * MORE and fit[0].programs <= fit[1].programs:
        wrong.append(f"{decode.per_element} instructions per element, {plain.per_element} of each its own")
    found, own = pipeline_of(decode), pipeline_of(plain)
    assert found is not None and own is not None
    wrong += worse(found, own)
    if fit[0].programs < fit[1].programs:
        wrong.append(f"{fit[0].programs} programs fit a multiprocessor, of {fit[1].programs}")
    joined = ("",) if work_list.JOINED in asked_for[0].spec.options else ()
    if decode.handovers != joined:
        wrong.append(f"programs hand over by {decode.handovers}, expected {joined}")
    if decode.lost:
        wrong.append(f"products read other tiles than theirs: {decode.lost}")
    if decode.overtaken:
        wrong.append(f"buffers are filled before they are read: {decode.overtaken}")
    return wrong


def wrong(*cases: tuple[str, str, int]) -> list[str]:
    """What is wrong with the kernels of sites; all are assembled in one process."""
    wanted = [requests(*case) for case in cases]
    made = iter(assemble(one for own in wanted for one in own))
    found = []
    for case, own in zip(cases, wanted, strict=True):
        found += [f"{case}: {problem}" for problem in problems(own, [next(made) for _ in own])]
    return found


def test_what_a_step_pays_for_it() -> None:
    found = wrong(
        ("pages of 64", "llama", 90),
        ("int8 in pages", "llama", 90),
        ("int8 in pages of 64", "llama", 90),
        ("fp8 in pages of 64", "llama", 80),
    )
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_on_every_architecture(layout: str, arch: int) -> None:
    found = wrong(*((layout, shape, arch) for shape in ("llama", "smollm2")))
    assert not found, "\n".join(found)
