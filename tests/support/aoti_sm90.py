"""Prints the C++ that AOTInductor makes of a tiny model whose layers have generated kernels, without a GPU.

As `inductor_sm90.py`: programs are printed, and not run. Run by `tests/targets/aoti/test_triton.py` with the names of
recipes, in a process where Triton compiles. Machine code of the kernels, which only a GPU's driver gives AOTInductor,
is stood in for by names of files; what is shown is how the program calls them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch._inductor.codecache import CpuTritonKernelCache
from torch._inductor.codegen.cpp_wrapper_cpu import DeferredCpuTritonCallWrapper
from torch._inductor.graph import GraphLowering

from kvcompile.compile import linear_forms
from kvcompile.errors import ExportError
from kvcompile.kernels.shared.dialect import AOTI
from kvcompile.kernels.triton import available
from kvcompile.targets.aoti.package import compiled, entries
from kvcompile.targets.functional import functional
from kvcompile.targets.source import source_of
from tests.support.exports import small, tiny
from tests.support.inductor_sm90 import act_as_sm90

SLOTS = 1088


def programs(recipe: str) -> dict[str, Any]:
    """Of each graph of a package its C++, and the names that its cache inputs have there."""
    wanted = small(recipe, max_tokens=SLOTS, compile={"kernels": "triton"})
    source = source_of(tiny(layers=1, head_dim=64), wanted, lambda *_: None, {}, "aoti")
    function = functional(source.front, source.plan, AOTI, in_place=True)
    found: dict[str, Any] = {}

    def printed(self: Any) -> Any:
        arguments = function.arguments(entry.one, entry.alone)
        names = self.graph_input_names[-len(arguments) :]  # weights come first
        found[entry.name] = {
            "caches": [name for name, of in zip(names, arguments, strict=True) if of.role == "cache"],
            "code": self.codegen()[0].value,
        }
        raise RuntimeError("printed")

    GraphLowering.codegen_with_cpp_wrapper = printed  # type: ignore[method-assign]
    for entry in entries(4):
        try:
            with TemporaryDirectory() as folder:
                compiled(function, entry, "default", "native", Path(folder))
        except ExportError as error:
            if "printed" not in str(error):
                raise
    return found


def stand_in_for_machine_code() -> None:
    """Every kernel has been compiled, to a file that is not there."""
    generate = DeferredCpuTritonCallWrapper.generate

    def with_code(self: Any, wrapper: Any) -> None:
        name = self.kernel_name
        CpuTritonKernelCache.cache[name] = {
            "signature": self.triton_meta["signature"],
            "kernel_so_path": f"{name}.so",
            "launcher_so_path": f"{name}_launcher.so",
            "kernel_symbol": name,
        }
        generate(self, wrapper)

    DeferredCpuTritonCallWrapper.generate = with_code  # type: ignore[method-assign]


def main(names: list[str]) -> None:
    act_as_sm90()
    stand_in_for_machine_code()
    available.problem = lambda device: None
    linear_forms.on_gpu = lambda device: True
    print(json.dumps({name: programs(name) for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
