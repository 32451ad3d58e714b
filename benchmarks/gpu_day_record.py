"""The file of a piece of `gpu_day.sh`: how it ended, beside what the piece itself wrote there.

Only the standard library, so that a piece whose imports fail is recorded too.

    OUT=folder python benchmarks/gpu_day_record.py kernels --code 0 --seconds 41
    OUT=folder python benchmarks/gpu_day_record.py kernels --is-done    # the exit code tells
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

STOPPED = (124, 130, 137)  # exit codes of timeout, of SIGINT, and of SIGKILL


def read(piece: str) -> dict[str, Any]:
    """What the piece's file has; {} where there is none, or half of one."""
    try:
        data = json.loads(path_of(piece).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def update(piece: str, /, **found: Any) -> None:
    """Put fields into the piece's file; a process that is stopped meanwhile leaves the old one."""
    path = path_of(piece)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(read(piece) | found, indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def path_of(piece: str) -> Path:
    return Path(os.environ["OUT"]) / f"{piece}.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("piece")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--is-done", action="store_true")
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=0)
    options = parser.parse_args(arguments)
    before = read(options.piece)
    if options.is_done:
        return int((before.get("status"), before.get("rehearsal")) != ("ok", options.rehearse))
    status = "ok" if options.code == 0 else "stopped" if options.code in STOPPED else "failed"
    spent = [*before.get("calls_s", []), options.seconds]
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    ended = {"piece": options.piece, "status": status, "exit_code": options.code, "calls_s": spent}
    update(options.piece, **ended, ended=now, rehearsal=options.rehearse)
    print(f"{options.piece}: {status}, {options.seconds} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
