"""Kernels ahead of time: to machine code for GPUs that are not there, and what that code says.

    KernelSpec -> source -> Triton -> cubin (sm_80 to sm_120) -> cuobjdump -> registers, spills, the main loop

Decode is a read of the cache, and an H200 at full bandwidth has 15.6, 7.8, 3.9 or 1.95 thread-instructions for each
element of 16, 8, 4 or 2 bits: `Assembled.per_element` is what a kernel takes of them. All tools are in Triton's wheel.
Triton decides at its import whether it interprets, so this always runs in a process of its own:

    python -m kvcompile.kernels.triton.tools.assemble --spec '{"role": ...}' --arch 90 [--sass]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompile.errors import KernelError
from kvcompile.kernels.triton.params import KernelSource, TensorParam
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tools import descriptors, ptx, sass, ttgir

if TYPE_CHECKING:
    from rich.table import Table

ARCHES = (80, 86, 89, 90, 100, 120)
_ALIGNED = [["tt.divisibility", 16]]
_WARP = 32


@dataclass(frozen=True)
class Request:
    """A kernel to assemble.

    arch:  90 for sm_90
    known: of its arguments, as `host/launch.known` says of a launch; None: of all addresses and strides that they are
           multiples of 16
    """

    spec: KernelSpec
    arch: int = 90
    num_warps: int = 4
    num_stages: int = 3
    known: tuple[tuple[str, int], ...] | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "spec": self.spec.to_json()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Request:
        told = data["known"]
        known = None if told is None else tuple((name, number) for name, number in told)
        return Request(**{**data, "spec": KernelSpec.from_json(data["spec"]), "known": known})


@dataclass(frozen=True)
class Assembled:
    """What the machine code of a kernel says.

    registers:    of a thread
    stack:        bytes of a thread's stack: what is spilled, and arrays that are indexed
    spills:       loads and stores of it
    loop_spills:  those of them in the main loop
    shared:       bytes of shared memory of a program
    instructions: of one thread, in one turn of the main loop (`sass.Loop.turn`); None: it has none
    per_element:  thread-instructions of the main loop per element of the cache that it reads; None where a role's loop
                  is not over slots
    products:     of the instructions, those that are matrix products
    loads:        bits of a load from global memory in the main loop (or, where there is none, in all of it) -> how many
    barriers:     in one turn of the main loop
    byte_loads:   of single bytes from shared memory, in one turn of the main loop
    handovers:    what is wrong with each atomic, by its PTX (`ptx.handovers`); "": nothing
    overtaken:    buffers that a copy may fill before they are read, by its TTGIR (`ttgir.overtaken`)
    lost:         products that read another tile than they were given, by its machine code (`descriptors.lost`)
    pipeline:     of the main loop, by its TTGIR (`ttgir.Pipeline`); None: it has no product
    opcodes:      with their modifiers, of a turn of the main loop (or, where there is none, of all of it) -> how many
    outside:      instructions that are in no loop
    waits:        for global memory, one after another, where the code runs straight through (`sass.waits`)
    """

    role: str
    key: str
    arch: int
    registers: int
    stack: int
    spills: int
    loop_spills: int
    shared: int
    instructions: int | None
    per_element: float | None
    products: int
    loads: dict[int, int]
    barriers: int = 0
    byte_loads: int = 0
    pipeline: ttgir.Pipeline | None = None
    opcodes: dict[str, int] = field(default_factory=dict)
    outside: int = 0
    waits: int = 0
    handovers: tuple[str, ...] = ()
    overtaken: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    main_loop: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Assembled:
        loads = {int(bits): count for bits, count in data["loads"].items()}
        pipeline = data["pipeline"] and ttgir.Pipeline(**data["pipeline"])
        return Assembled(
            **{
                **data,
                "loads": loads,
                "main_loop": tuple(data["main_loop"]),
                "handovers": tuple(data["handovers"]),
                "overtaken": tuple(data["overtaken"]),
                "lost": tuple(data["lost"]),
                "pipeline": pipeline,
            }
        )


def assemble(requests: Iterable[Request], listing: bool = False) -> list[Assembled]:
    """Assemble all of them in one process, in their order. listing: with the text of the main loop

    Raises:
        KernelError: one of them does not assemble; says which, and the compiler's words.
    """
    made = []
    for one in attempted(requests, listing):
        if isinstance(one, str):
            raise KernelError(f"a kernel does not assemble:\n{one[-4000:]}")
        made.append(one)
    return made


def attempted(requests: Iterable[Request], listing: bool = False) -> list[Assembled | str]:
    """As `assemble`; what does not assemble is the compiler's words, and which kernel it is.

    Raises:
        KernelError: the process that assembles has failed as a whole.
    """
    asked = json.dumps({"listing": listing, "requests": [request.to_json() for request in requests]})
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            __spec__.name if __name__ == "__main__" else __name__,
            "--batch",
        ],
        input=asked,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise KernelError(f"kernels cannot be assembled here:\n{done.stderr.strip()[-4000:]}")
    made = json.loads(done.stdout.splitlines()[-1])
    return [item if isinstance(item, str) else Assembled.from_json(item) for item in made]


def elements(spec: KernelSpec) -> int | None:
    """Elements of keys and values that a turn of the main loop reads, per KV head; None: the loop is not over slots."""
    if spec.role not in ("decode", "prefill", "columns"):
        return None
    keys_only = spec.layout.in_keys or spec.role == "columns"
    return spec.block_n * (spec.head_dim if keys_only else spec.head_dim + spec.v_head_dim)


def signature(
    source: KernelSource, known: tuple[tuple[str, int], ...] | None = None
) -> tuple[dict[str, str], dict[tuple[int], int], dict[tuple[int], list[list[Any]]]]:
    """Types of the arguments, those that are constants, and those that are multiples of 16; known: as `Request`'s."""
    if known is None:
        tensors = (param for param in source.params if isinstance(param, TensorParam))
        known = tuple((name, 16) for param in tensors for name in param.names)
    told, types = dict(known), source.signature
    ones = {name for name, number in told.items() if number == 1}
    places = {name: (place,) for place, name in enumerate(types)}
    return (
        {name: "constexpr" if name in ones else kind for name, kind in types.items()},
        {places[name]: 1 for name in types if name in ones},
        {places[name]: _ALIGNED for name in types if told.get(name) == 16},
    )


def _assembled(request: Request, listing: bool) -> Assembled:
    """In a process whose Triton compiles."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.kernels.triton.host.source import kernel

    spec = request.spec
    made = kernel(spec)
    types, constants, attributes = signature(made.source, request.known)
    compiled = triton.compile(
        ASTSource(made.function, types, constants, attributes),
        target=GPUTarget("cuda", request.arch, _WARP),
        options={"num_warps": request.num_warps, "num_stages": request.num_stages},
    )
    text, usage = _dumped(compiled.asm["cubin"], "-sass"), _dumped(compiled.asm["cubin"], "-res-usage")
    code, used = sass.instructions(text), sass.resources(usage)
    loops = sass.loops(code)
    loop = sass.main_loop(loops)
    tile = elements(spec)
    per_element = None
    if loop is not None and tile is not None:
        per_element = round(loop.instructions * request.num_warps * _WARP / tile, 3)
    return Assembled(
        role=spec.role,
        key=spec.key,
        arch=request.arch,
        registers=used["REG"],
        stack=used["STACK"] + used["LOCAL"],
        spills=sass.spills(code),
        loop_spills=0 if loop is None else sass.spills(loop.body),
        shared=compiled.metadata.shared,
        instructions=None if loop is None else loop.instructions,
        per_element=per_element,
        products=sass.Loop(code).products if loop is None else loop.products,
        loads=sass.Loop(code).loads if loop is None else loop.loads,
        barriers=0 if loop is None else loop.barriers,
        byte_loads=0 if loop is None else loop.byte_loads,
        pipeline=ttgir.pipeline(compiled.asm["ttgir"]),
        opcodes=sass.full_opcodes(code if loop is None else loop.turn),
        outside=sass.outside(code, loops),
        waits=sass.waits(code),
        handovers=ptx.handovers(compiled.asm["ptx"]),
        overtaken=ttgir.overtaken(compiled.asm["ttgir"]),
        lost=descriptors.lost(code),
        main_loop=tuple(i.text for i in loop.body) if listing and loop is not None else (),
    )


def _dumped(cubin: bytes, *options: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def _batch() -> None:
    asked = json.load(sys.stdin)
    made: list[Any] = []
    for item in asked["requests"]:
        request = Request.from_json(item)
        try:
            made.append(_assembled(request, asked["listing"]).to_json())
        except Exception as error:
            spec = request.spec
            made.append(f"{error}\n\n{spec.role} for sm_{request.arch}: {spec.to_json()}")
    print(json.dumps(made))


def table(made: Sequence[Assembled]) -> Table:
    """A rich table of them."""
    from kvcompile.util.console import table as plain

    right = ("registers", "spills", "shared", "loop", "per element", "barriers")
    shown = plain("kernel", "arch", *right, "buffers, on their way", "loads (bits x count)", right=right)
    for item in made:
        shown.add_row(
            f"{item.role} {item.key}",
            f"sm_{item.arch}",
            str(item.registers),
            str(item.spills),
            f"{item.shared:,}",
            "" if item.instructions is None else str(item.instructions),
            "" if item.per_element is None else f"{item.per_element:.2f}",
            "" if item.instructions is None else str(item.barriers),
            "" if item.pipeline is None else _shown(item.pipeline),
            ", ".join(f"{bits or 'bulk'} x {count}" for bits, count in item.loads.items()),
        )
    return shown


def _shown(of: ttgir.Pipeline) -> str:
    waited = f", {of.sync_loads} waited for" if of.sync_loads else ""
    return f"{of.buffers}, {of.wait or 0}{waited}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Assemble kernels ahead of time and read their machine code."
    )
    parser.add_argument("--spec", action="append", default=[], help="a KernelSpec as JSON; repeatable")
    parser.add_argument(
        "--arch",
        action="append",
        type=int,
        default=[],
        help="80, 86, 89, 90, 100, 120; repeatable (default: all)",
    )
    parser.add_argument("--warps", type=int, default=4)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--sass", action="store_true", help="print the main loops")
    parser.add_argument("--batch", action="store_true", help="requests as JSON on stdin, results on stdout")
    options = parser.parse_args(arguments)
    if options.batch:
        _batch()
        return
    specs = [KernelSpec.from_json(text) for text in options.spec]
    asked = [
        Request(spec, arch, options.warps, options.stages)
        for spec in specs
        for arch in options.arch or ARCHES
    ]
    made = assemble(asked, options.sass)
    from kvcompile.util.console import render

    print(render(table(made)))
    for item in made:
        if options.sass:
            print(f"\n{item.role} {item.key} sm_{item.arch}", *item.main_loop, sep="\n  ")


if __name__ == "__main__":
    main()
