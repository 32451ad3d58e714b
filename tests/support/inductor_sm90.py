"""A stand-in for a GPU of sm_90, on which Inductor prints programs that are not run.

A driver that only names its target lets torch find out what a Triton kernel writes. The tensors are on the CPU (a torch
without CUDA has no others to trace), so what stands around the kernels is C++. For processes where Triton compiles
(TRITON_INTERPRET=0), and of which nothing else is asked: the driver and the hooks stay.
"""

from __future__ import annotations

from typing import Any

import triton
from torch._dynamo.device_interface import CpuInterface
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch.fx import GraphModule
from triton.backends.compiler import GPUTarget

from kvcompile.compile.inductor import Tracer, compile_region
from kvcompile.errors import CompileError

_PROPERTIES = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
)


class Driver:
    """Names a target, and has no device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def act_as_sm90() -> None:
    """From here on Triton and Inductor take this machine to have such a GPU."""
    triton.runtime.driver.set_active(Driver())
    DeviceProperties.create = classmethod(lambda cls, device: _PROPERTIES)  # type: ignore[method-assign,assignment]
    # torch 2.14 asks it before it prints a kernel, of the device that the tensors have.
    CpuInterface.raise_if_triton_unavailable = staticmethod(lambda device=None: None)  # type: ignore[method-assign]


def program_of(region: GraphModule, inputs: list[Any], tracer: Tracer) -> dict[str, Any]:
    """What Inductor makes of a region: its graph, its code, and the sizes of the tracer that it fixed."""
    found: dict[str, Any] = {}

    def printed(self: Any) -> Any:
        found["graph"] = self.orig_gm.print_readable(print_output=False)
        found["code"] = self.codegen()[0].value
        raise RuntimeError("printed")

    GraphLowering.compile_to_module = printed  # type: ignore[method-assign]
    try:
        compile_region(region, inputs, tracer, "default")
    except CompileError as error:
        if "printed" not in str(error):
            raise
    found["fixed"] = sorted(str(symbol) for symbol in tracer.env.replacements if symbol in tracer.free)
    return found
