"""Makes kvcompile importable from a bare checkout, with what a machine without a network lacks.

    python benchmarks/gpu_day_setup.py wheels   # with a network: fill wheels/ for CPython 3.12 on Linux x86_64
    python benchmarks/gpu_day_setup.py install  # without one: prints the PYTHONPATH to run with

`install` lays the four code folders out as one package of links, as an installed package is, and unpacks from wheels/
what Python does not find. What is installed already is never put there: PYTHONPATH comes before the installed packages,
so that another torch, triton or numpy would take their place. Only the standard library and pip are needed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "gpu_day"
WHEELS = Path(os.environ.get("WHEELS") or ROOT / "wheels")
LIMIT = 48 << 20  # bytes of all wheels: they travel with the checkout
PYTHON = "3.12"
# pip matches these exactly. glibc 2.35 and newer is what systems with Python 3.12 have.
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1)), "manylinux2014_x86_64")
# What kvcompile and its tests import that torch, triton and transformers do not bring, each with what it needs itself.
# A group is installed as a whole: pydantic wants one version of its core.
GROUPS = (
    ("pydantic", "pydantic_core", "annotated-types", "typing-inspection"),
    ("z3-solver",),
    ("psutil",),
    ("rich", "markdown-it-py", "mdurl", "Pygments"),
    ("typer", "click", "shellingham", "annotated-doc"),
    ("Jinja2", "MarkupSafe"),
    ("PyYAML",),
    ("safetensors",),
    ("pytest", "iniconfig", "pluggy", "packaging"),
    ("pytest-timeout",),
    ("pytest-xdist", "execnet"),
    ("hypothesis", "sortedcontainers"),
    ("accelerate",),
)
# Those that are not imported by their names.
MODULES = {"z3-solver": "z3", "PyYAML": "yaml", "pytest-xdist": "xdist"}
MISSING_IS_FINE = ("pytest-timeout", "pytest-xdist", "hypothesis", "accelerate")


def pins() -> dict[str, str]:
    """name -> name==version of constraints.txt, by lower-case name."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return {line.partition("==")[0].lower(): line.strip() for line in lines if "==" in line}


def installed(name: str) -> str | None:
    """The version that Python finds outside of what this script unpacked; "?" of a copy that does not say it."""
    own = [entry for entry in sys.path if Path(entry or ".").resolve() != (PLACE / "site").resolve()]
    found = next(iter(metadata.distributions(name=name, path=own)), None)
    if found is not None:
        return str(found.version)
    module = MODULES.get(name, name.lower().replace("-", "_"))
    return None if PathFinder.find_spec(module, own) is None else "?"


def download() -> int:
    """Fill wheels/ with the exact versions of constraints.txt."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    wanted = [pins()[name.lower()] for group in GROUPS for name in group]
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", *platforms, "--dest", str(WHEELS)]
    done = subprocess.run([*command, *wanted], check=False)
    if done.returncode:
        return done.returncode
    size = sum(file.stat().st_size for file in WHEELS.glob("*.whl"))
    print(f"{len(wanted)} wheels, {size / 2**20:.1f} MiB in {WHEELS}")
    if size > LIMIT:
        print(f"more than {LIMIT >> 20} MiB: empty the folder of older versions", file=sys.stderr)
    return int(size > LIMIT)


def install() -> int:
    """Links and missing packages; prints the folders for PYTHONPATH."""
    site, packages = PLACE / "site", PLACE / "packages"
    link(packages)
    missing = [group for group in GROUPS if installed(group[0]) is None]
    names = [name for group in missing for name in group if name == group[0] or installed(name) is None]
    if any(group[0] == "pydantic" for group in missing) and "pydantic_core" not in names:
        names.append("pydantic_core")  # whatever version is there is another one's
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    lacking = []
    for name in names:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
        ]
        command += ["--find-links", str(WHEELS), "--target", str(site), "--upgrade", pins()[name.lower()]]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            lacking.append(name)
    fatal = [name for name in lacking if name not in MISSING_IS_FINE]
    if lacking:
        said = "cannot go on without" if fatal else "going on without"
        print(f"{said}: {', '.join(lacking)} (neither installed nor in {WHEELS})", file=sys.stderr)
    print(os.pathsep.join([str(packages), str(site)]))
    return int(bool(fatal))


def link(packages: Path) -> None:
    """kvcompile as one package of links to the checkout; with `tests`, and what scripts here import of each other.

    The checkout itself is kept from Python's path (PYTHONSAFEPATH): there, `kvcompile` is a quarter of the package, and
    `kernels` another package's name. So is benchmarks/kernels.py.
    """
    shutil.rmtree(packages, ignore_errors=True)
    own = packages / "kvcompile"
    own.mkdir(parents=True)
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    folders: dict[str, str] = pyproject["tool"]["setuptools"]["package-dir"]
    for package, folder in folders.items():
        if package == "kvcompile":
            for entry in (ROOT / folder).iterdir():
                (own / entry.name).symlink_to(entry)
        else:
            (own / package.rpartition(".")[2]).symlink_to(ROOT / folder)
    # Generated kernels say which version made them.
    project = pyproject["project"]
    told = packages / f"kvcompile-{project['version']}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    (packages / "tests").symlink_to(ROOT / "tests")
    for script in (ROOT / "benchmarks").glob("*.py"):
        if script.stem != "kernels":
            (packages / script.name).symlink_to(script)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("wheels", "install"))
    return {"wheels": download, "install": install}[parser.parse_args(arguments).what]()


if __name__ == "__main__":
    sys.exit(main())
