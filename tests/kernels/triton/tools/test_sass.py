"""Reading machine code: loops, widths and spills of a listing whose numbers are counted by hand."""

from __future__ import annotations

from kvcompile.kernels.triton.tools.sass import (
    full_opcodes,
    instructions,
    loops,
    main_loop,
    outside,
    resources,
    spills,
    waits,
)

# Two loops in a third: 0x20-0x70 without masks, 0x90-0xd0 with; then the branch to itself that ends every kernel.
LISTING = """
		Function : decode_attention
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                        /* 0x00000a00ff017b82 */
                                                                                 /* 0x000fe20000000800 */
        /*0010*/              @!P0 BRA 0x80 ;                                    /* 0x0 */
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.128 [R5], desc[UR4][R2.64] ;   /* 0x0 */
        /*0030*/                   LDG.E.U16 R7, desc[UR4][R2.64] ;              /* 0x0 */
        /*0040*/               @P1 LDG.E.64 R8, desc[UR4][R2.64+0x10] ;          /* 0x0 */
        /*0050*/                   HMMA.16816.F32.BF16 R24, R4, R8, R24 ;        /* 0x0 */
        /*0060*/                   NOP ;                                         /* 0x0 */
        /*0070*/               @P2 BRA 0x20 ;                                    /* 0x0 */
        /*0080*/                   LDG.E R3, desc[UR4][R2.64] ;                  /* 0x0 */
        /*0090*/                   LDL R6, [R1] ;                                /* 0x0 */
        /*00a0*/                   LDG.E.128 R8, desc[UR4][R2.64] ;              /* 0x0 */
        /*00b0*/                   HMMA.16816.F32.BF16 R24, R4, R8, R24 ;        /* 0x0 */
        /*00c0*/                   FSEL R4, R4, -INF , P0 ;                      /* 0x0 */
        /*00c8*/                   STL [R1], R6 ;                                /* 0x0 */
        /*00d0*/              @!P3 BRA `(.L_x_1) 0x90 ;                          /* 0x0 */
        /*00e0*/               @P4 BRA 0x10 ;                                    /* 0x0 */
        /*00f0*/                   EXIT ;                                        /* 0x0 */
        /*0100*/                   BRA 0x100;                                    /* 0xfffffffc00fc7947 */
"""


def test_loops_are_backward_branches() -> None:
    code = instructions(LISTING)
    assert len(code) == 18 and code[1].target == 0x80 and code[2].name == "LDGSTS"
    found = [(loop.body[0].address, loop.body[-1].address) for loop in loops(code)]
    assert found == [(0x20, 0x70), (0x90, 0xD0), (0x10, 0xE0)]


def test_the_main_loop_is_the_shortest_innermost_with_products() -> None:
    main = main_loop(loops(instructions(LISTING)))
    assert main is not None and main.body[0].address == 0x20
    assert main.instructions == 5 and main.products == 1  # the NOP is none
    assert main.loads == {16: 1, 64: 1, 128: 1}
    assert main.opcodes == {"LDG": 2, "LDGSTS": 1, "HMMA": 1, "NOP": 1, "BRA": 1}


def test_without_products_it_is_the_longest_innermost_that_reads() -> None:
    main = main_loop(loops(instructions(LISTING.replace("HMMA", "FFMA"))))
    assert main is not None and main.body[0].address == 0x90
    assert main_loop(loops(instructions("/*0000*/  EXIT ;\n/*0010*/  BRA 0x10 ;"))) is None


# In a loop, a branch steps over two products of numbers, another over a load, and a third over the loop's end.
SELDOM = """
        /*0000*/                   HMMA.16816.F32 R24, R4, R8, R24 ;
        /*0010*/              @!P2 BRA 0x40 ;
        /*0020*/                   FMUL R24, R24, R9 ;
        /*0030*/                   FMUL R25, R25, R9 ;
        /*0040*/               @P3 BRA 0x60 ;
        /*0050*/                   LDG.E R3, desc[UR4][R2.64] ;
        /*0060*/               @P4 BRA 0x90 ;
        /*0070*/                   FADD R6, R6, R3 ;
        /*0080*/               @P0 BRA 0x0 ;
        /*0090*/                   EXIT ;
"""


def test_arithmetic_that_a_branch_steps_over_is_no_part_of_a_turn() -> None:
    main = main_loop(loops(instructions(SELDOM)))
    assert main is not None and len(main.body) == 9
    assert [one.address for one in main.turn] == [0x0, 0x10, 0x40, 0x50, 0x60, 0x70, 0x80]
    assert main.instructions == 7 and main.loads == {32: 1} and main.opcodes["FMUL"] == 2


def test_opcodes_with_their_modifiers_and_what_is_in_no_loop() -> None:
    code = instructions(LISTING)
    main = main_loop(loops(code))
    assert main is not None
    assert full_opcodes(main.body) == {
        "LDGSTS.E.BYPASS.LTC128B.128": 1,
        "LDG.E.U16": 1,
        "LDG.E.64": 1,
        "HMMA.16816.F32.BF16": 1,
        "BRA": 1,
    }
    # Before the outer loop one, behind it two: the second is the branch to itself that ends every kernel.
    assert outside(code, loops(code)) == 3
    assert outside(code, loops(code)[:1]) == len(code) - 6 and outside(code, ()) == len(code) - 1


def test_local_memory_is_spilling() -> None:
    assert spills(instructions(LISTING)) == 2
    usage = (
        " Function f:\n  REG:136 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:632 TEXTURE:0 SURFACE:0 SAMPLER:0"
    )
    assert resources(usage) == {"REG": 136, "STACK": 16, "SHARED": 1024, "LOCAL": 0}


def test_loads_are_waited_for_where_they_are_used() -> None:
    """Once for those that are asked for together, pairs and stored words among them; copies never made are none."""
    together = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @!P0 LDG.E R8, desc[UR4][R2.64+0x10] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64] ;
        /*0030*/                   ISETP.GT.AND P1, PT, R7, R10, PT ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64], !PT ;
        /*0050*/                   DEPBAR.LE SB0, 0x0 ;
        /*0060*/                   STG.E desc[UR4][R12.64], R8 ;
"""
    assert waits(instructions(together)) == 1
    assert waits(instructions(together.replace(", !PT ;\n        /*0050", " ;\n        /*0050"))) == 2
    chain = """
        /*0000*/                   LDG.E.64 R4, desc[UR4][R2.64] ;
        /*0010*/                   LDG.E.128 R8, desc[UR4][R4.64] ;
        /*0020*/                   {use} ;
        /*0030*/                   LDG.E R14, desc[UR4][R2.64] ;
        /*0040*/                   FADD R1, R1, R14 ;
"""
    for use, wanted in (
        ("FADD R12, R7, R7", 2),
        ("FADD R12, R7, R11", 3),
        ("IMAD.WIDE R12, R1, 0x4, R10.64", 3),
        ("STG.E.64 desc[UR4][R2.64], R10", 3),
        ("STG.E desc[UR4][R2.64], R12", 2),
    ):
        assert waits(instructions(chain.format(use=use))) == wanted, use
    assert waits(instructions("/*0000*/  EXIT ;")) == 0
