"""Kernels ahead of time: to machine code for GPUs that are not there, and what that code says.

    KernelSpec -> source -> Triton -> cubin (sm_80, sm_90, sm_100) -> cuobjdump -> registers, spills, the main loop

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcompile.errors import KernelError
from kvcompile.kernels.triton.params import KernelSource, TensorParam
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.tools import sass

if TYPE_CHECKING:
    from rich.table import Table

ARCHES = (80, 90, 100)
_ALIGNED = [["tt.divisibility", 16]]  # addresses of tensors, and their strides, as launches find them
_WARP = 32


@dataclass(frozen=True)
class Request:
    """A kernel to assemble. arch: 90 for sm_90"""

    spec: KernelSpec
    arch: int = 90
    num_warps: int = 4
    num_stages: int = 3

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "spec": self.spec.to_json()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Request:
        return Request(**{**data, "spec": KernelSpec.from_json(data["spec"])})


@dataclass(frozen=True)
class Assembled:
    """What the machine code of a kernel says.

    registers:    of a thread
    stack:        bytes of a thread's stack: what is spilled, and arrays that are indexed
    spills:       loads and stores of it
    loop_spills:  those of them in the main loop
    shared:       bytes of shared memory of a program
    instructions: of one thread, in one turn of the main loop; None: it has none
    per_element:  thread-instructions of the main loop per element of the cache that it reads; None where a role's loop
                  is not over slots
    products:     of the instructions, those that are matrix products
    loads:        bits of a load from global memory in the main loop (or, where there is none, in all of it) -> how many
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
    main_loop: tuple[str, ...] = ()

    @staticmethod
    def from_json(data: dict[str, Any]) -> Assembled:
        loads = {int(bits): count for bits, count in data["loads"].items()}
        return Assembled(**{**data, "loads": loads, "main_loop": tuple(data["main_loop"])})


def assemble(requests: Iterable[Request], listing: bool = False) -> list[Assembled]:
    """Assemble all of them in one process, in their order. listing: with the text of the main loop

    Raises:
        KernelError: one of them does not assemble; says which, and the compiler's words.
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
        raise KernelError(f"a kernel does not assemble:\n{done.stderr.strip()[-4000:]}")
    return [Assembled.from_json(item) for item in json.loads(done.stdout.splitlines()[-1])]


def elements(spec: KernelSpec) -> int | None:
    """Elements of keys and values that a turn of the main loop reads, per KV head; None: the loop is not over slots."""
    if spec.role not in ("decode", "prefill", "columns"):
        return None
    keys_only = spec.layout.in_keys or spec.role == "columns"
    return spec.block_n * (spec.head_dim if keys_only else spec.head_dim + spec.v_head_dim)


def signature(source: KernelSource) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """Types of the arguments, and what is known of them: addresses and strides are multiples of 16."""
    aligned = {name for param in source.params if isinstance(param, TensorParam) for name in param.names}
    types = source.signature
    return types, {(place,): _ALIGNED for place, name in enumerate(types) if name in aligned}


def _assembled(request: Request, listing: bool) -> Assembled:
    """In a process whose Triton compiles."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcompile.kernels.triton.host.source import kernel

    spec = request.spec
    made = kernel(spec)
    types, attributes = signature(made.source)
    compiled = triton.compile(
        ASTSource(made.function, types, {}, attributes),
        target=GPUTarget("cuda", request.arch, _WARP),
        options={"num_warps": request.num_warps, "num_stages": request.num_stages},
    )
    text, usage = _dumped(compiled.asm["cubin"], "-sass"), _dumped(compiled.asm["cubin"], "-res-usage")
    code, used = sass.instructions(text), sass.resources(usage)
    loop = sass.main_loop(sass.loops(code))
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
    made = []
    for item in asked["requests"]:
        request = Request.from_json(item)
        try:
            made.append(asdict(_assembled(request, asked["listing"])))
        except Exception as error:
            spec = request.spec
            print(f"{error}\n\n{spec.role} for sm_{request.arch}: {spec.to_json()}", file=sys.stderr)
            raise SystemExit(1) from None
    print(json.dumps(made))


def table(made: Sequence[Assembled]) -> Table:
    """A rich table of them."""
    from kvcompile.util.console import table as plain

    right = ("registers", "spills", "shared", "loop", "per element")
    shown = plain("kernel", "arch", *right, "loads (bits x count)", right=right)
    for item in made:
        shown.add_row(
            f"{item.role} {item.key}",
            f"sm_{item.arch}",
            str(item.registers),
            str(item.spills),
            f"{item.shared:,}",
            "" if item.instructions is None else str(item.instructions),
            "" if item.per_element is None else f"{item.per_element:.2f}",
            ", ".join(f"{bits or 'bulk'} x {count}" for bits, count in item.loads.items()),
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Assemble kernels ahead of time and read their machine code."
    )
    parser.add_argument("--spec", action="append", default=[], help="a KernelSpec as JSON; repeatable")
    parser.add_argument(
        "--arch", action="append", type=int, default=[], help="80, 90, 100; repeatable (default: all)"
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
