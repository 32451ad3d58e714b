"""`kvcompile kernels --target cpp`: a recipe's generated C++ kernels, their files, and their machine code."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcompile.cli.common import stderr, waiting
from kvcompile.errors import InputError, KernelError

if TYPE_CHECKING:
    from rich.table import Table

    from kvcompile.kernels.cpp.host.source import KernelText
    from kvcompile.kernels.cpp.isa import Isa


@dataclass(frozen=True)
class Found:
    """A kernel of a recipe's layers. when: it runs for "a token" or "a prompt"."""

    when: str
    role: str
    text: KernelText
    options: str


def isa_named(name: str | None) -> Isa:
    """An instruction set by its name, or the best of this machine, or what KVCOMPILE_CPU_ISA names.

    Raises:
        InputError: there is none of that name.
    """
    from kvcompile.kernels.cpp.isa import ISAS, isa

    if name is None:
        try:
            return isa()
        except ValueError as error:
            raise InputError(str(error)) from error
    found = next((own for own in ISAS if own.name == name), None)
    if found is None:
        raise InputError(f"--isa: expected {', '.join(own.name for own in ISAS)}, got {name!r}")
    return found


def written(found: list[Found], folder: Path, own: Isa) -> None:
    """Write the kernels' sources, and the headers that they include.

    Raises:
        InputError: the folder cannot be written.
    """
    from kvcompile.kernels.cpp.host.compiler import INCLUDE

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for one in found:
            told = " ".join(one.text.flags(own)).replace(str(INCLUDE), ".").replace('"', '\\"')
            line = f"// g++ {one.text.name}.cpp -o {one.text.name}.so {told}\n"
            (folder / f"{one.text.name}.cpp").write_text(line + one.text.text, "utf-8")
        for header in sorted(INCLUDE.glob("*.h")):
            shutil.copyfile(header, folder / header.name)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error}") from error
    stderr().print(f"{folder}: {len(found)} kernels", style="dim", highlight=False, soft_wrap=True)


def listed(found: list[Found], own: Isa) -> Table:
    """A table of them."""
    from kvcompile.util.console import table

    shown = table("for", "role", "source", "instruction set", "options")
    for one in found:
        shown.add_row(one.when, one.role, one.text.name, own.name, one.options)
    return shown


def assembled(found: list[Found], own: Isa) -> Table:
    """A table of their machine code; the compiler of this machine makes it, for any instruction set of its kind.

    Raises:
        KernelError: there is no compiler, or nothing that reads machine code.
    """
    from kvcompile.kernels.cpp.host.source import compiled
    from kvcompile.kernels.cpp.tools import machine_code
    from kvcompile.util.console import table

    if (reason := machine_code.problem()) is not None:
        raise KernelError(f"--assemble: {reason}")
    right = ("instructions", "spills", "loop", "products", "loop spills")
    shown = table("role", "source", "instruction set", *right, right=right)
    with waiting(f"compiling {len(found)} kernels"):
        for one in found:
            code = machine_code.read(compiled(one.text, own))
            numbers = (code.size, code.spills, len(code.loop), code.products, code.loop_spills)
            shown.add_row(one.role, one.text.name, own.name, *(f"{n:,}" for n in numbers))
    return shown
