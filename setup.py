"""Lists the packages. All else is in pyproject.toml, which can map folders or find packages, but not both."""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

PYPROJECT = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]

setup(
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in (package, *(f"{package}.{child}" for child in find_packages(folder)))
    ]
)
