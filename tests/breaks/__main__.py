"""Makes each break in a copy of the tree and runs the quick tests that must notice: `python -m tests.breaks`.

    python -m tests.breaks                  all of them, one after another: about an hour and a half
    python -m tests.breaks -k onnx -k fuzz  those whose name or files have one of these words
    python -m tests.breaks --check          only whether every text is where the table says

Exit code 1 where a break is not caught, or where a text is not found once: then the table has to follow the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.breaks.attend import ATTEND
from tests.breaks.broken import Break
from tests.breaks.cpp import CPP
from tests.breaks.graphs import GRAPHS
from tests.breaks.http import HTTP
from tests.breaks.kernels import KERNELS
from tests.breaks.linear import LINEAR
from tests.breaks.packed import PACKED
from tests.breaks.parallel import PARALLEL
from tests.breaks.predict import PREDICT
from tests.breaks.product import PRODUCT
from tests.breaks.replicas import REPLICAS
from tests.breaks.serving import SERVING
from tests.breaks.texts import TEXTS
from tests.breaks.triton import TRITON

ROOT = Path(__file__).resolve().parents[2]
ALL = (
    *KERNELS,
    *ATTEND,
    *PREDICT,
    *LINEAR,
    *CPP,
    *GRAPHS,
    *PRODUCT,
    *HTTP,
    *SERVING,
    *PACKED,
    *PARALLEL,
    *REPLICAS,
    *TEXTS,
    *TRITON,
)
# An editable install finds these beside `kvcompile`; a copy has them inside, where Python looks first.
INSIDE = ("passes", "kernels", "recipes")
NO_TESTS = (4, 5)  # exit codes of pytest: a wrong path, nothing collected


def problem(item: Break, root: Path = ROOT) -> str:
    """Why a break cannot be made; empty: it can."""
    file = root / item.file
    if not file.is_file():
        return f"{item.file} does not exist: name the file that has this code now"
    count = file.read_text(encoding="utf-8").count(item.old)
    if count != 1:
        return f"expected this text once in {item.file}, found it {count} times: {item.old!r}"
    missing = [test for test in item.tests if not (root / test.partition("::")[0]).is_file()]
    return f"no such tests: {', '.join(missing)}" if missing else ""


def copied(root: Path, to: Path) -> None:
    """A copy of the tree as git sees it, that imports itself."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source = root / name
        if source.is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name)
    for name in INSIDE:
        (to / "kvcompile" / name).symlink_to(to / name)
    # Modules are compiled once: whether one has changed is seen by its text, and not by a time that a break can share.
    compiled = ["compileall", "-qq", "--invalidation-mode", "checked-hash", "kvcompile", *INSIDE]
    subprocess.run([sys.executable, "-m", *compiled], cwd=to, check=True)


def run(item: Break, tree: Path) -> tuple[bool, str]:
    """Whether the tests of a break fail by it, and what to tell of that."""
    file = tree / item.file
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace(item.old, item.new), encoding="utf-8")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *item.tests, "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    finally:
        file.write_text(whole, encoding="utf-8")
    if done.returncode in NO_TESTS:
        return False, "no test ran: " + done.stdout[-500:]
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1, (failed[0].partition(" - ")[0] if failed else done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.breaks", description=__doc__.splitlines()[0])
    parser.add_argument(
        "-k", action="append", default=[], help="only breaks whose name or files have this word"
    )
    parser.add_argument("--check", action="store_true", help="only look whether every text is there once")
    options = parser.parse_args(arguments)
    wanted = [
        item
        for item in ALL
        if not options.k or any(word in f"{item.name} {item.file} {item.tests}" for word in options.k)
    ]
    bad = [f"{item.name}: {text}" for item in wanted if (text := problem(item))]
    for line in bad:
        print(f"not found   {line}")
    if options.check or bad:
        return int(bool(bad))
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copied(ROOT, tree)
        for item in wanted:
            started = time.perf_counter()
            caught, told = run(item, tree)
            missed += not caught
            seconds = time.perf_counter() - started
            print(
                f"{'caught' if caught else 'NOT CAUGHT':<11} {seconds:5.0f} s  {item.name}: {told}",
                flush=True,
            )
    print(f"{len(wanted) - missed} of {len(wanted)} breaks are caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
