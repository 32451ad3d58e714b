"""A second device where there is one CPU: `twin:0` and `twin:1`, in the memory of the host.

`second_device.cpp` gives PyTorch a device type of its own, as an accelerator's plugin does: tensors on it are not on
the CPU, and operators refuse tensors of different devices. A process keeps it until it ends, so tests use it in one of
their own (`over_devices.py`).
"""

from __future__ import annotations

import subprocess
import types
from pathlib import Path
from typing import Any

import torch

NAME = "twin"
SOURCE = Path(__file__).with_suffix(".cpp")


def build(folder: Path) -> Path:
    """Compile the device into a library of that folder: about 10 seconds."""
    root = Path(torch.__file__).parent
    library = folder / "second_device.so"
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    link = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    flags = ["-O0", "-shared", "-fPIC", "-std=c++20", "-DNDEBUG"]
    subprocess.run(["g++", *flags, *include, str(SOURCE), "-o", str(library), *link], check=True)
    return library


def register(library: Path) -> tuple[torch.device, torch.device]:
    """Let this process have the device; its two."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.ops.load_library(str(library))
    return torch.device(NAME, 0), torch.device(NAME, 1)


def _module() -> Any:
    """What Python asks of a device type: `torch.twin`."""
    made: Any = types.ModuleType(f"torch.{NAME}")
    made.current_device = lambda: 0
    made.device_count = lambda: 2
    made.is_available = made.is_initialized = lambda: True
    made._is_in_bad_fork = lambda: False
    made.manual_seed_all = made.set_device = made.synchronize = lambda *given: None
    made.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return made
