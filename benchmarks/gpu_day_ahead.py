"""Compiles what `numerics`, `kernels` and `tune` launch before there is a GPU, so that its time goes to running.

Tensors stand on the CPU and act as those of a chip; Triton's driver is replaced by one that compiles and launches
nothing. What Triton finds in its cache (TRITON_CACHE_DIR) on the chip's machine is what it would have compiled there,
if its release and its ptxas are the same: nothing else goes into a name there.

    python benchmarks/gpu_day_ahead.py --jobs 2                      # all
    python benchmarks/gpu_day_ahead.py --only "int8" --what kernels  # cases whose name has this
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcompile.kernels.triton.device import Device


class Compiling:
    """A driver of Triton that compiles for a chip and launches nothing."""

    def __init__(self, chip: Device) -> None:
        from triton.backends.compiler import GPUTarget

        self.chip, self.target = chip, GPUTarget("cuda", chip.arch, 32)
        self.utils = self
        self.kernels = 0

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.chip.shared}

    def load_binary(self, *about: Any) -> tuple[Any, ...]:
        self.kernels += 1
        return object(), None, 0, 0, 1024

    def unload_module(self, module: Any) -> None: ...

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None


@contextlib.contextmanager
def compiling() -> Iterator[Compiling]:
    """Within it devices are the chip; from here on nothing that this process launches runs."""
    from triton.runtime.driver import driver

    from kvcompile.kernels.triton.device import Device, acting_as

    chip = Device("NVIDIA H200", 90, 132)
    own = Compiling(chip)
    driver.set_active(own)  # type: ignore[arg-type]
    with acting_as(chip):
        yield own


def numerics(name: str) -> None:
    """What `tests/gpu/test_numerics.py` launches for a site, in the types that it asks for."""
    import torch

    from tests.gpu import small, test_numerics
    from tests.gpu.sites import EXACT_CODES, SITES, vectors
    from tests.support.runner import run

    device, sized, chunks = torch.device("cpu"), SITES[name], test_numerics.CHUNKS
    for kind in (torch.bfloat16, *(kind for kind, names in asked(test_numerics) if name in names)):
        given = vectors(sized, 3, sum(chunks), kind, device)
        run(sized.site(), given, chunks, torch.tensor(test_numerics.PADS), **sized.extra(device))
    if name in EXACT_CODES:
        given = vectors(sized, 3, 100, torch.bfloat16, device)
        run(sized.site(), given, (80, *[1] * 20), torch.zeros(3, dtype=torch.int64))
    if name in small.NAMES:
        small.main(device, (name,))


def asked(module: Any) -> Iterator[tuple[Any, list[str]]]:
    """The types beside bfloat16, and the sites that are tested in them."""
    import torch

    for kind, test in ((torch.float16, module.test_float16), (torch.float32, module.test_float32)):
        for mark in test.pytestmark:
            if mark.name == "parametrize":
                yield kind, list(mark.args[1])


def without_memory() -> None:
    """Caches and weights of samples from here on are memory that nobody touches, however large they are."""
    import kernel_linear
    import torch

    from kvcompile.kernels.triton.tools import synthetic_cache

    def untouched(spec: Any, rows: int, *rest: Any) -> torch.Tensor:
        return torch.empty((rows, *spec.shape), dtype=spec.dtype)

    synthetic_cache._filled = untouched
    kernel_linear.filled = lambda shape, dtype, random: torch.empty(shape, dtype=dtype)


def kernels(name: str) -> None:
    """What a case of the benchmark launches."""
    import kernel_linear
    import torch
    from kernel_cases import APPENDS, CASES
    from kernel_problem import append_of, call_of, problem_of

    without_memory()
    if (layers := linear_problem(name)) is not None:
        kernel_linear.call_of(layers)()
        return
    case = next(case for case in (*CASES, *APPENDS) if case.name == name)
    problem = problem_of(case, torch.device("cpu"), torch.bfloat16, 0)
    (append_of(problem) if case in APPENDS else call_of(problem))()


def tune(name: str) -> None:
    """What the tuner tries of a recipe and role, at each of its points."""
    import torch
    from gpu_day_tune import BATCHES, CONTEXTS, HEAD_DIM, HEADS

    from kvcompile.cli.tune import subject_of
    from kvcompile.kernels.triton.tools.tune import run_once

    without_memory()
    recipe, role = name.split()
    heads, dim = tuple(map(int, HEADS.split("/"))), int(HEAD_DIM)
    points = [tuple(map(int, text.split(","))) for text in (BATCHES, CONTEXTS)]
    of = subject_of(recipe, role, heads, dim, torch.bfloat16, *points, 1024)  # type: ignore[arg-type]
    run_once(of, torch.device("cpu"))


def configurations(name: str) -> None:
    """A case of the benchmark under every configuration that the tuner knows."""
    import kernel_linear
    import torch
    from kernel_cases import CASES
    from kernel_configurations import role_of, tried
    from kernel_problem import problem_of

    from kvcompile.kernels.triton.tools.tune import call_of, too_large

    without_memory()
    if (layers := linear_problem(name)) is not None:
        for form in kernel_linear.forms(layers):
            with contextlib.suppress(*too_large()):
                kernel_linear.call_in(form, layers)()
        return
    case = next(case for case in CASES if case.name == name)
    problem = problem_of(case, torch.device("cpu"), torch.bfloat16, 0)
    for one in tried(case, problem):
        with contextlib.suppress(*too_large()):  # it is left out when it is measured, too
            call_of(role_of(case), one, problem, 0)()


def linear_problem(name: str) -> Any:
    """A case of linear layers; None: it is another."""
    import torch
    from kernel_linear import LINEAR, SWEPT, problem_of

    every = (*LINEAR, *SWEPT)
    found = (problem_of(case, torch.device("cpu"), 0) for case in every if case.name == name)
    return next(found, None)


WHAT: dict[str, Callable[[str], None]] = {
    "numerics": numerics,
    "kernels": kernels,
    "tune": tune,
    "configurations": configurations,
}
USUAL = "numerics,kernels,tune"  # what is left out takes two cores an hour


def names_of(what: str) -> list[str]:
    if what == "numerics":
        from tests.gpu.sites import SITES

        return list(SITES)
    if what == "tune":
        from gpu_day_tune import RECIPES, ROLES

        return [f"{recipe} {role}" for role in ROLES.split(",") for recipe in RECIPES.split(",")]
    from kernel_cases import APPENDS, CASES
    from kernel_linear import LINEAR, SWEPT

    further = SWEPT if what == "configurations" else APPENDS
    return [case.name for case in (*CASES, *further, *LINEAR)]


def one(what: str, name: str) -> str:
    """A line of what was compiled."""
    began = time.perf_counter()
    with compiling() as own:
        try:
            WHAT[what](name)
            said = "ok"
        except Exception:  # the others are compiled all the same; the exit code tells
            said = traceback.format_exc()
    return f"{what}, {name}: {own.kernels} kernels, {time.perf_counter() - began:.0f} s, {said}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", default=USUAL, help=f"of {', '.join(WHAT)}; {USUAL} if not said")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    work = [
        (what, name)
        for what in options.what.split(",")
        for name in names_of(what)
        if not options.only or any(text in name for text in options.only)
    ]
    if not work:
        parser.error(f"no case has {' or '.join(options.only)} in its name")
    wrong = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for line in pool.map(one, *zip(*work, strict=True)):
            print(line, flush=True)
            wrong += not line.endswith("ok")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
