"""The package as users get it: what a wheel holds, what can be imported from where, who imports whom."""

from __future__ import annotations

import ast
import re
import shutil
import site
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]  # package -> folder

# specs <- layouts <- {recipe, kernels} <- plan <- passes <- {decide, compile} <- {pipeline, runtime} <- verify <- API.
# A module may import what has a lower level, or the same line; what is not listed counts as public API. Of two lines
# that a name begins with, the longer one counts. So nothing that compiles or runs a graph knows how it was found, and
# verification knows no export.
LEVELS = {
    "kvcompile.errors": 0,
    "kvcompile.recipes": 0,
    "kvcompile.expression": 0,
    "kvcompile.targets.registry": 0,
    "kvcompile.targets.seal": 0,
    "kvcompile.util": 1,
    "kvcompile.specs": 1,
    "kvcompile.original": 2,
    "kvcompile.layouts": 2,
    "kvcompile.recipe": 3,
    "kvcompile.kernels": 3,
    "kvcompile.plan": 4,
    "kvcompile.passes": 5,
    "kvcompile.runtime.cache_spec": 5,
    "kvcompile.decide": 6,
    "kvcompile.compile": 6,
    "kvcompile.targets.manifest": 6,  # what an export writes and a session reads
    "kvcompile.targets.folder": 7,
    "kvcompile.targets.machine": 7,
    "kvcompile.targets.cache_spec": 7,
    "kvcompile.pipeline": 8,
    "kvcompile.runtime": 9,  # calls what is compiled
    "kvcompile.verify": 10,
    "kvcompile": 11,  # the public API, export targets and reports
    "kvcompile.cli": 12,
    "kvcompile.__main__": 13,
}


def part_of(module: str) -> str:
    """The line of LEVELS that `module` (of kvcompile) belongs to: the longest that its name begins with."""
    parts = module.split(".")
    names = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next(name for name in names if name in LEVELS)


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the four folders, under the name that it is imported by."""
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


MODULES = dict(sources())


def imports(module: str) -> Iterator[tuple[str, int]]:
    """The absolute names that a module imports, wherever the statement stands, with their lines."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join((*base, *filter(None, [node.module])))
            for alias in node.names:  # `from kvcompile import plan` imports kvcompile.plan
                name = f"{source}.{alias.name}"
                yield (name if name in MODULES else source), node.lineno


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    here = part_of(module)
    below = {part for part, level in LEVELS.items() if level < LEVELS[here]}
    wrong = []
    for name, line in imports(module):
        top, where = name.partition(".")[0], f"{MODULES[module].relative_to(ROOT)}:{line} imports {name}"
        if top in FOLDERS.values() and top != "kvcompile":
            wrong.append(f"{where}: write kvcompile.{name}")
        elif top == "kvcompile" and part_of(name) not in {here, *below}:
            wrong.append(f"{where}, which LEVELS does not place below {here}")
    assert not wrong, "\n".join(wrong)


def test_nobody_knows_an_optional_backend() -> None:
    """They are found by their entry points: no other module has the name of one, in an import or in a text."""
    own = "kvcompile.backends"
    wrong = []
    for module, path in MODULES.items():
        if f"{module}.".startswith(f"{own}."):
            continue
        found = [name for name, _ in imports(module)]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
        named = {name for name in found if re.fullmatch(rf"{own}(\.\w+)*", name)}
        if module == "kvcompile.decide.backend":
            named -= {own}  # the group of entry points
        wrong += [f"{module} names {name}" for name in named]
    assert not wrong, "\n".join(wrong)


def test_entry_points_exist() -> None:
    """Those of pyproject.toml: each is a module here that has the functions of a backend."""
    points: dict[str, str] = PYPROJECT["project"]["entry-points"]["kvcompile.backends"]
    assert points
    for module in points.values():
        names = {
            node.name
            for node in ast.parse(MODULES[module].read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        assert {"unavailable", "describe", "compiler"} <= names


def test_kernels_init_is_empty() -> None:
    """Run from the repository's root, `import kernels` finds this folder: it must do no harm there."""
    assert (ROOT / "kernels" / "__init__.py").read_text(encoding="utf-8").strip() == ""


@pytest.mark.parametrize("name", [folder for folder in FOLDERS.values() if folder != "kvcompile"])
def test_folders_are_not_importable_by_their_bare_names(name: str, tmp_path: Path) -> None:
    """From a directory of the user's, `kernels` and the like are theirs (or Hugging Face's), never ours."""
    script = f"import importlib.util as u; s = u.find_spec({name!r}); print(s and s.origin)"
    origin = run("-c", script, cwd=tmp_path)
    assert not origin.startswith(str(ROOT)), f"import {name} finds {origin}"


def test_installed_package_imports_from_anywhere(tmp_path: Path) -> None:
    """And it is this checkout, not a copy that the environment was made for."""
    packages = {module: path for module, path in MODULES.items() if path.name == "__init__.py"}
    # By name: an attribute of kvcompile may be the function that a package of the same name is for.
    script = (
        f"import sys, {', '.join(packages)}\nfor name in {list(packages)}: print(sys.modules[name].__file__)"
    )
    assert run("-c", script, cwd=tmp_path).splitlines() == [str(path) for path in packages.values()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy, so that no old build/ folder can add to it."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "dist"), str(copy), cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


def test_wheel_holds_every_file(wheel: Path) -> None:
    expected = {
        "/".join((*package.split("."), *path.relative_to(ROOT / folder).parts))
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "kvcompile/py.typed" in expected
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


def test_wheel_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"kvcompile-{PYPROJECT['project']['version']}.dist-info"
    points = archive.read(f"{info}/entry_points.txt").decode()
    assert "kvcompile = kvcompile.cli:main" in points
    assert "[kvcompile.backends]\ntorch_tensorrt = kvcompile.backends.torch_tensorrt" in points
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert archive.read(f"{info}/top_level.txt").decode().split() == ["kvcompile"]


def test_wheel_imports_alone(wheel: Path, tmp_path: Path) -> None:
    """Unpacked, without the checkout: -S leaves out .pth files, and with them the editable install."""
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    script = f"""
import sys
sys.path += {[str(target), *site.getsitepackages()]!r}
import kvcompile.kernels, kvcompile.passes.rules, kvcompile.recipes
from importlib.resources import files
packages = (kvcompile, kvcompile.kernels, kvcompile.passes, kvcompile.passes.rules, kvcompile.recipes)
assert all(p.__file__.startswith({str(target)!r}) for p in packages), [p.__file__ for p in packages]
print(*sorted(p.name for p in files("kvcompile.recipes").iterdir() if p.name.endswith(".yaml")))
"""
    recipes = run("-I", "-S", "-c", script, cwd=tmp_path).split()
    assert recipes == sorted(path.name for path in (ROOT / "recipes").glob("*.yaml"))
    assert recipes


def run(*args: str, cwd: Path) -> str:
    """The output of this Python on `args`; fails with what it wrote to stderr."""
    done = subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return done.stdout.strip()
