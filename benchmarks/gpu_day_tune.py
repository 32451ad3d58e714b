"""`kvcompile tune`, one recipe and role at a time, so that a stopped run keeps what was measured and goes on.

Part of `gpu_day.sh`. The table stands in OUT/tuned.json, and in kvcompile's cache, where the later pieces find it.

    OUT=folder python benchmarks/gpu_day_tune.py --recipes baseline,int8 --roles decode
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_day_record import read, update

LEAST = 45  # seconds under which no subject is begun
RECIPES, ROLES = "baseline,int8,fp8,int4,kivi4,paged,paged_int8", "decode,prefill"
HEADS, HEAD_DIM, BATCHES, CONTEXTS = "32/8", "128", "1,32", "4096,32768"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--roles", default=ROLES)
    parser.add_argument("--heads", default=HEADS)
    parser.add_argument("--head-dim", default=HEAD_DIM)
    parser.add_argument("--batch", default=BATCHES)
    parser.add_argument("--context", default=CONTEXTS)
    parser.add_argument("--rounds", default="5")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + float(os.environ.get("GPU_DAY_SECONDS", "570")) - 5
    if options.rehearse:
        return rehearse()
    table = Path(os.environ["OUT"]) / "tuned.json"
    subjects: dict[str, Any] = {} if options.again else read("tune").get("subjects", {})
    share(table)
    # Decode of all recipes first: it is what most of the time goes to.
    asked = [(recipe, role) for role in options.roles.split(",") for recipe in options.recipes.split(",")]
    for recipe, role in asked:
        name = f"{recipe} {role}"
        if subjects.get(name, {}).get("status") == "ok":
            continue
        left = ends - time.monotonic()
        if left < LEAST:
            print(f"{name}: no time left in this call")
            return 124
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "kvcompile.cli",
            "tune",
            "--recipes",
            recipe,
            "--roles",
            role,
        ]
        command += ["--heads", options.heads, "--head-dim", options.head_dim, "--batch", options.batch]
        command += ["--context", options.context, "--rounds", options.rounds, "--out", str(table)]
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
            said, status = done.stdout + done.stderr, "ok" if done.returncode == 0 else "failed"
        except subprocess.TimeoutExpired as stopped:
            said = "".join(
                part.decode("utf-8", "replace") if isinstance(part, bytes) else part or ""
                for part in (stopped.stdout, stopped.stderr)
            )
            status = "stopped"
        subjects[name] = {
            "status": status,
            "seconds": round(time.monotonic() - began, 1),
            "said": said[-3000:],
        }
        update("tune", subjects=subjects)
        share(table)
        print(f"{name}: {status}\n{said[-1500:]}")
    return int(any(row["status"] != "ok" for row in subjects.values()))


def share(table: Path) -> None:
    """Put the table where kvcompile looks for one of this GPU."""
    if not table.is_file():
        return
    import torch

    from kvcompile.kernels.triton.config import table_of
    from kvcompile.kernels.triton.device import device_of

    target = table_of(device_of(torch.device("cuda")))
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copyfile(table, target)


def rehearse() -> int:
    """What a GPU is not needed for: the candidates of a subject, and the message that says that it is."""
    command = [sys.executable, "-W", "ignore", "-m", "kvcompile.cli", "tune", "--recipes", "baseline"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    asks = "measures on an NVIDIA GPU" in done.stderr
    update(
        "tune",
        subjects={"baseline decode": {"status": "rehearsed", "seconds": 0, "said": done.stderr[-3000:]}},
    )
    print(done.stderr)
    return int(not asks)


if __name__ == "__main__":
    sys.exit(main())
