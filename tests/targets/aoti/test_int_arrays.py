"""Arrays of sizes stand where they are read, though methods that write a program live for one call only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

from kvcompile.targets.aoti.int_arrays import kept_apart, with_lasting_ids


class Part:
    """A part of a program, which is written to."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def writeline(self, line: str) -> None:
        self.lines.append(line)


class Wrapper:
    """Declares arrays as PyTorch 2.11 does: once for each id of a method."""

    def __init__(self) -> None:
        self.known: dict[Any, str] = {}

    def codegen_int_array_var(
        self, int_array: str, writeline: Callable[[str], None], known_statically: bool = False
    ) -> str:
        key = (int_array, id(writeline), known_statically)
        if key not in self.known:
            self.known[key] = f"int_array_{len(self.known)}"
            writeline(f"{self.known[key]} = {int_array}")
        return self.known[key]


def test_each_part_declares_what_it_reads() -> None:
    """A method that is gone leaves its id to the next one, of another part."""
    plain, mended = Wrapper(), Wrapper()
    own, lasting = Wrapper.codegen_int_array_var, with_lasting_ids(Wrapper.codegen_int_array_var)
    for wrapper, declare in ((plain, own), (mended, lasting)):
        parts = [Part() for _ in range(50)]
        for part in parts:
            for statically in (False, True, False):
                name = declare(wrapper, "{1L}", part.writeline, known_statically=statically)
                if wrapper is mended:
                    assert any(line.startswith(f"{name} ") for line in part.lines), "declared in another part"
        assert (sum(len(part.lines) for part in parts) == 100) == (wrapper is mended)


def test_functions_that_are_no_methods_are_told_apart() -> None:
    wrapper, declare = Wrapper(), with_lasting_ids(Wrapper.codegen_int_array_var)
    said: list[tuple[int, str]] = []
    for number in range(20):
        declare(wrapper, "{1L}", lambda line, number=number: said.append((number, line)))
    assert [number for number, _ in said] == list(range(20))


def test_pytorch_is_as_it_was_afterwards() -> None:
    before = CppWrapperCpu.codegen_int_array_var
    with kept_apart():
        pass
    assert CppWrapperCpu.codegen_int_array_var is before
