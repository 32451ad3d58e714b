"""What is read of how programs hand over to each other."""

from __future__ import annotations

import pytest

from kvcompile.kernels.triton.tools.ptx import handovers

RIGHT = """
    @%p64 st.global.b32 [ %rd288 + 0 ], { %r1295 };
    bar.sync    0;
    @%p65 atom.global.gpu.acq_rel.add.u32 %r1305, [ %rd298 + 0 ], %r1306;
    bar.sync    0;
    @%p69 ld.global.b32 { %r1340 }, [ %rd332 + 0 ];
"""
COPY = "    cp.async.cg.shared.global [ %r732 + 0 ], [ %rd105 + 0 ], 0x10, %r331;\n"
BARRIER_AND_LOAD = RIGHT.partition("%r1306;\n")[2]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", ""),
        ("acq_rel", "relaxed", "does not acquire and release"),
        ("gpu", "cta", "does not acquire and release"),
        ("};\n    bar.sync    0;", "};", "between the stores and the atomic"),
        ("%r1306;\n    bar.sync    0;", "%r1306;", "between the atomic and the loads"),
        ("ld.global.b32", "ld.global.nc.b32", "not coherent"),
        (BARRIER_AND_LOAD, f"{COPY}{BARRIER_AND_LOAD}", "between the atomic and the loads"),
        (BARRIER_AND_LOAD, BARRIER_AND_LOAD + COPY, ""),
        ("st.global.b32", "st.shared.b32", "between the stores and the atomic"),
    ],
)
def test_what_is_wrong_with_a_handover(old: str, new: str, said: str) -> None:
    (found,) = handovers(RIGHT.replace(old, new, 1))
    assert said in found and bool(said) == bool(found)


def test_a_kernel_without_atomics_hands_nothing_over() -> None:
    assert handovers(RIGHT.replace("atom", "red")) == ()
