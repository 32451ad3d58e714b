"""First look at a machine: versions, chip, tools, bandwidth, and every role of the generated kernels once.

Part of `gpu_day.sh`. Each look is by itself: what fails is written down with its traceback, and the next one is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_day_record import update
from gpu_day_setup import GROUPS

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "onnx",
    "onnxscript",
    "sympy",
    "flash_attn",
    "flashinfer-python",
)
TOOLS = (
    "gcc",
    "g++",
    "cc",
    "clang",
    "nvcc",
    "ninja",
    "make",
    "git",
    "compute-sanitizer",
    "ncu",
    "nvidia-smi",
)


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in (*PACKAGES, *(group[0] for group in GROUPS)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def tools() -> dict[str, Any]:
    """What compiles: Triton's launchers need a C compiler and Python.h, AOTInductor a C++ one."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return {name: shutil.which(name) for name in TOOLS} | {
        "Python.h": header.is_file(),
        "CC": os.environ.get("CC"),
    }


def chip() -> dict[str, Any]:
    import torch
    from compile_time import machine

    found = machine()
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        found |= {"capability": [about.major, about.minor], "memory_bytes": about.total_memory}
        found |= {"multiprocessors": about.multi_processor_count, "cuda": torch.version.cuda}
        asked = [
            "nvidia-smi",
            "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem",
            "--format=csv,noheader",
        ]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found["driver_clocks"] = subprocess.run(
                asked, capture_output=True, text=True, timeout=20, check=False
            ).stdout.strip()
    return found


def bandwidth(rehearse: bool) -> dict[str, float]:
    """GB/s that a copy reads and writes."""
    import torch

    from kvcompile.kernels.triton.tools.timing import copy_bandwidth

    device = torch.device("cpu" if rehearse else "cuda")
    return {"copy_gb_s": round(copy_bandwidth(device, (1 << 20) if rehearse else (2 << 30), 20) / 1e9, 1)}


def kernels(rehearse: bool) -> dict[str, Any]:
    """Every role once, small: whether a result is finite, by site."""
    import torch

    from tests.gpu import small

    rows = {}
    for name in small.NAMES[:1] if rehearse else small.NAMES:
        said, began = io.StringIO(), time.perf_counter()
        try:
            with contextlib.redirect_stdout(said):
                if rehearse:
                    small.main(torch.device("cpu"), (name,), (5, 1))
                else:
                    small.main(torch.device("cuda"), (name,))
            result = said.getvalue().strip().rpartition(": ")[2]
        except Exception as error:
            result = f"failed: {error!r}"[:2000]
        rows[name] = {"result": result, "seconds": round(time.perf_counter() - began, 1)}
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--again", action="store_true", help="ignored: this is always looked at anew")
    rehearse = parser.parse_args(arguments).rehearse
    looks: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "tools": tools,
        "machine": chip,
        "bandwidth": lambda: bandwidth(rehearse),
        "kernels": lambda: kernels(rehearse),
    }
    errors: dict[str, str] = {}
    for name, look in looks.items():
        began = time.perf_counter()
        try:
            found = look()
        except Exception:
            errors[name] = found = traceback.format_exc()[-3000:]
        if (
            name == "kernels"
            and isinstance(found, dict)
            and any(row["result"] != "finite" for row in found.values())
        ):
            errors[name] = "a site's result is not finite, or did not come"
        update("import", **{name: found})
        print(f"{name} ({time.perf_counter() - began:.0f} s): {found}")
    update("import", errors=errors)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
