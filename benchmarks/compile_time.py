"""What a cold and a warm start of kvcompile cost, beside plain torch.compile of the same model.

Every start is a process of its own. A cold one has empty caches (Inductor's, with the precompiled headers that it keeps
with temporary files, and ours of kernels and converted models), the warm one runs after it with the same. Both sides
compile what generation needs: a prompt of any length and a decode step. Of ours, it is told when the first token came:
since `optimize` was called, and since the process was started, which imports and loads the model first.

    python benchmarks/compile_time.py                 # SmolLM2, int8; about 5 minutes on 2 cores
    python benchmarks/compile_time.py --only ours     # without plain torch.compile
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
STARTED = "KVCOMPILE_BENCH_STARTED"  # seconds since the epoch at which a worker's process was started
BEGAN = time.time()
PROMPT_TOKENS = 48  # of the prompt that plain torch.compile is compiled with; its length stays dynamic


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    import torch
    import transformers

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def start(side: str, options: argparse.Namespace, cache: str | None) -> dict[str, Any]:
    """One start of `side` ("ours" or "plain") in a process of its own; `cache`: the folder of its caches.

    Raises:
        RuntimeError: the process failed; the message has its last lines.
    """
    command = [sys.executable, __file__, "--worker", side, *_arguments(options)]
    environment = dict(os.environ) if cache is None else _cached_in(Path(cache))
    environment[STARTED] = str(time.time())
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"a start of {side!r} failed:\n" + "\n".join(done.stderr.splitlines()[-8:]))
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _cached_in(folder: Path) -> dict[str, str]:
    own = {
        "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
        "TRITON_CACHE_DIR": folder / "triton",
        "KVCOMPILE_CACHE_DIR": folder / "kvcompile",
        "TMPDIR": folder / "tmp",  # where Inductor keeps precompiled headers, whatever its own cache is
    }
    own["TMPDIR"].mkdir(exist_ok=True)
    return {**os.environ, **{name: str(path) for name, path in own.items()}}


def _arguments(options: argparse.Namespace) -> list[str]:
    listed = ["--model", options.model, "--recipe", options.recipe, "--device", options.device]
    if options.dtype:
        listed += ["--dtype", options.dtype]
    for setting in options.settings:
        listed += ["--set", setting]
    return listed


def since_start() -> float:
    """Seconds since this process was started, as who started it says; else, since it began to run this file."""
    return time.time() - float(os.environ.get(STARTED, BEGAN))


class _Clock:
    """A streamer that notes when each token comes; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _ours(options: argparse.Namespace) -> dict[str, Any]:
    """A whole start: capture, verify, compile, and the first tokens."""
    import torch

    import kvcompile
    from kvcompile.cli.common import overrides_from
    from kvcompile.models import load_model

    model = load_model(options.model, options.dtype, options.device).model
    loaded = since_start()
    cpu = _cpu_seconds()
    began = time.perf_counter()
    fast: Any = kvcompile.optimize(model, options.recipe, **overrides_from(options.settings))
    optimized = time.perf_counter()
    clock = _Clock()
    ids = torch.arange(3, 11, device=fast.device)[None]
    fast.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False, streamer=clock)
    _, first, second = clock.times
    verify = fast.report["verify_seconds"]
    return {
        "loaded": loaded,
        "capture": optimized - began - verify,
        "verify": verify,
        "compile": sum(fast.executor.compile_seconds.values()),
        "total": second - began,
        "first_token": first - began,
        "first_token_of_process": loaded + first - began,
        "cpu": _cpu_seconds() - cpu,
        "plan": fast.plan.digest(),
        **circumstances(),
    }


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended, compilers for instance."""
    return sum(os.times()[:4])


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    """torch.compile of the model with a StaticCache: a prompt of dynamic length, then a decode step.

    The seconds are those of the first calls less those of the same calls again, once compiled.
    """
    import torch
    from transformers import StaticCache

    from kvcompile.models import load_model

    model = load_model(options.model, options.dtype, options.device).model
    forward = torch.compile(model.forward, dynamic=True)
    cache = StaticCache(config=model.config, max_cache_len=2048)
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Any:
        ids = torch.randint(model.config.vocab_size, (1, count), generator=generator)
        return ids.to(model.device)

    def call(run: Any, count: int) -> float:
        ids = tokens(count)
        began = time.perf_counter()
        with torch.no_grad():
            logits = run(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            logits.sum().item()
        return time.perf_counter() - began

    stats = torch._dynamo.utils.counters["stats"]
    # torch.compile compiles a prompt twice if the cache has no tensors yet at the first: spare it that.
    call(model.forward, 2)
    cache.reset()
    first = [call(forward, PROMPT_TOKENS), call(forward, 1)]
    graphs = stats["unique_graphs"]
    cache.reset()
    again = [call(forward, PROMPT_TOKENS - 5), call(forward, 1)]
    if stats["unique_graphs"] != graphs:
        raise RuntimeError(f"torch.compile compiled again: {graphs} graphs, then {stats['unique_graphs']}")
    seconds = sum(first) - sum(again)
    return {
        "compile": seconds,
        "total": seconds,
        "graphs": graphs,
        "first_calls": first,
        "calls_again": again,
        **circumstances(),
    }


def circumstances() -> dict[str, Any]:
    """Threads and load of this process, and how many of its compiled graphs came from Inductor's cache."""
    import torch
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return {
        "cache_hits": inductor["fxgraph_cache_hit"],
        "cache_misses": inductor["fxgraph_cache_miss"],
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for kvcompile.models.load_model")
    parser.add_argument("--recipe", default="int8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--only", choices=("ours", "plain"), help="measure one side only")
    parser.add_argument("--out", default="compile_time", help="a name in benchmarks/results, or a path")
    parser.add_argument("--worker", choices=("ours", "plain"), help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    workers: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"ours": _ours, "plain": _plain}
    if options.worker:
        print(json.dumps(workers[options.worker](options)))
        return 0
    from rich.console import Console

    from kvcompile.util.console import render, table

    progress = Console(stderr=True)
    starts: dict[str, dict[str, Any]] = {}
    try:
        for side in workers:
            if options.only not in (None, side):
                continue
            # The same folder for both starts: the second finds what the first has left.
            with tempfile.TemporaryDirectory(prefix="kvcompile-bench-") as folder:
                for temperature in ("cold", "warm"):
                    with progress.status(f"{side}, {temperature} start"):
                        starts[f"{side} {temperature}"] = start(side, options, folder)
                    if not progress.is_terminal:
                        print(f"{side} {temperature}: {starts[f'{side} {temperature}']}", file=sys.stderr)
    except RuntimeError as error:
        progress.print(f"error: {error}", style="red", markup=False, highlight=False)
        return 1
    result = {
        "benchmark": "compile_time",
        "model": options.model,
        "recipe": options.recipe,
        "machine": machine(),
        "starts": starts,
    }
    path = write(result, options.out)
    columns = ("capture", "verify", "compile", "total", "first_token", "first_token_of_process")
    numbers = ("capture s", "verify s", "compile s", "in all s", "first token s", "since the process began s")
    made = table("start", *numbers, right=numbers)
    for name, row in starts.items():
        cells = [f"{row[key]:.1f}" if key in row else "" for key in columns]
        side, temperature = name.split()
        made.add_row(
            f"{f'kvcompile {options.recipe}' if side == 'ours' else 'torch.compile'}, {temperature}", *cells
        )
    print(render(made))
    print(f"written to {path}")
    return 0


def write(result: dict[str, Any], out: str) -> Path:
    """JSON to benchmarks/results/<out>.json, or to `out` itself where it is a path."""
    path = Path(out) if out.endswith(".json") or os.sep in out else RESULTS / f"{out}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
