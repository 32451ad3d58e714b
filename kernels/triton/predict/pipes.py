"""What instructions take of a multiprocessor: clocks of its schedulers, and of the pipe that each runs in.

Rates are instructions of a warp in a clock (CUDA C++ Programming Guide, "Throughput of Native Arithmetic
Instructions", results in a clock divided by 32). Loads and stores take as many clocks as their bytes need of shared
memory's 128 in a clock. Products are counted in operations, as `Machine.products` has them.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcompile.kernels.triton.predict import assumptions as a
from kvcompile.kernels.triton.predict.model import Model

_FLOAT = {"FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2"}
_HALF = {"HFMA2", "HMUL2", "HADD2", "HSETP2", "HSET2", "HMNMX2"}
_MULTIPLY = {"IMAD", "IMUL", "IDP", "VIMNMX3"}
_SPECIAL = {"MUFU", "F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV"}
_LOADS = {
    "LDS",
    "STS",
    "LDSM",
    "STSM",
    "LDG",
    "STG",
    "LDGSTS",
    "LDL",
    "STL",
    "LD",
    "ST",
    "ATOMG",
    "ATOM",
    "RED",
}
_LOADS |= {"ATOMS", "SHFL", "REDUX", "LDC", "LDCU"}
# Operations of an instruction of one warp: rows x columns x depth of the tile, a product and a sum each.
_TILES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "16832": 16 * 8 * 32, "16864": 16 * 8 * 64}
_SINGLE = ("HMMA", "IMMA", "QMMA", "BMMA", "OMMA")
_GROUPS = ("HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA")
# What has no pipe that could be full: control, barriers, uniform registers (a path of their own), the program's place.
_FREE = {
    "BAR",
    "BRA",
    "BSSY",
    "BSYNC",
    "EXIT",
    "DEPBAR",
    "LDGDEPBAR",
    "WARPSYNC",
    "MEMBAR",
    "ERRBAR",
    "CCTL",
    "S2R",
}
_FREE |= {
    "S2UR",
    "CS2R",
    "R2UR",
    "WARPGROUP",
    "YIELD",
    "NANOSLEEP",
    "SYNCS",
    "FENCE",
    "ELECT",
    "CALL",
    "RET",
    "BREAK",
}
_WITH_GROUPS = (90, 100)  # architectures whose products on the sheet are those of warp groups
_WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


def rates(arch: int) -> dict[str, float]:
    """Instructions of a warp that a multiprocessor finishes in a clock, by pipe."""
    narrow = arch == 80
    wide_halves = arch in (80, 90, 100)
    return {
        "float": 2.0 if narrow else 4.0,
        "half": 4.0 if wide_halves else 2.0,
        "multiply": 2.0,
        "integer": 2.0,
        "special": 0.5,
    }


def pipe_of(opcode: str) -> str:
    """The pipe of an opcode with its modifiers: a name of `rates`, "loads", "products", or "" for none."""
    name = opcode.partition(".")[0]
    if name in _SINGLE or name in _GROUPS:
        return "products"
    for pipe, names in (
        ("float", _FLOAT),
        ("half", _HALF),
        ("multiply", _MULTIPLY),
        ("special", _SPECIAL),
        ("loads", _LOADS),
    ):
        if name in names:
            return pipe
    return "" if name in _FREE or name.startswith("U") else "integer"


def load_clocks(opcode: str) -> float:
    """Clocks that a load or store of a warp takes of a multiprocessor's 128 bytes a clock: at least one."""
    name, *parts = opcode.split(".")
    if name in ("LDSM", "STSM"):  # matrices of 8 x 8 of two bytes
        return next((float(part) for part in parts if part in ("2", "4")), 1.0)
    wide = next((_WIDTH[part] for part in parts if part in _WIDTH), 4)
    return max(1.0, wide * a.WARP / a.SHARED_CLOCK)


def clocks(
    opcodes: Mapping[str, int], num_warps: int, model: Model, products: float = 0.0
) -> dict[str, float]:
    """Clocks of a multiprocessor that a program's turn takes of each pipe, and of "issue".

    opcodes: of one thread in a turn -> how many
    products: operations of a turn where instructions of warp groups do not say their shape; of others they are counted
    """
    found: dict[str, float] = {}
    machine = model.machine
    speed = rates(machine.arch)
    counted = 0.0
    single = True
    for opcode, count in opcodes.items():
        pipe = pipe_of(opcode)
        if pipe == "products":
            name, *parts = opcode.split(".")
            if name in _GROUPS:
                single = False
            else:
                shape = next((_TILES[part] for part in parts if part in _TILES), _TILES["16816"])
                counted += 2.0 * shape * count * num_warps
        elif pipe == "loads":
            found[pipe] = found.get(pipe, 0.0) + load_clocks(opcode) * count * num_warps
        elif pipe:
            found[pipe] = found.get(pipe, 0.0) + count * num_warps / speed[pipe]
    operations = counted if single else max(products, counted)
    if operations:
        share = model.assumed.single if single and machine.arch in _WITH_GROUPS else 1.0
        per_clock = machine.products * share / (machine.multiprocessors * machine.clock)
        found["products"] = operations / per_clock
    found["issue"] = sum(opcodes.values()) * num_warps / a.SCHEDULERS / model.assumed.issued
    return found
