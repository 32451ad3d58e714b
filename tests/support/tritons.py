"""Releases of Triton beside the one that is installed, each in a folder of its own.

`python -m tests.support.tritons` puts those that torch brings into build/tritons (about 700 MB each), where slow tests
find them; `PYTHONPATH=build/tritons/3.7.1 kvcompile kernels ...` takes one as well.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What PyPI's CUDA builds of torch ask for -> which of them do. That of 2.15, 3.9, is installed.
RELEASES = {"3.6.0": "2.11", "3.7.0": "2.12.0", "3.7.1": "2.12.1 and 2.13", "3.8.0": "2.14"}
FOLDER = Path(__file__).parents[2] / "build" / "tritons"


def folder_of(release: str) -> Path | None:
    """Where a release stands; None: nowhere."""
    folder = FOLDER / release
    return folder if (folder / "triton" / "__init__.py").exists() else None


def main() -> None:
    for release in RELEASES:
        if folder_of(release) is None:
            asked = ("--no-deps", "--target", str(FOLDER / release), f"triton=={release}")
            subprocess.run([sys.executable, "-m", "pip", "install", *asked], check=True)


if __name__ == "__main__":
    main()
