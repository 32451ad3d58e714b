"""Who decides whether kernels are right: reference, oracle and generated kernels share what is listed here.

The oracle says what is right, the reference is compared with it, and the generated kernels are compared with both. So
a mistake in code that two of them use would show in neither: each such module is listed, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"

ROOMS = ("reference", "oracle", "triton", "cpp")
# What the rooms of a pair both import, directly or not, of kvcompile.kernels.
SHARED = {
    ("reference", "oracle"): {
        "spec",  # what a site is: data
        "shared.rope",  # the rotation of a vector by a table, which verification compares with the model's own
        "shared.expression",  # what a model does to its scores, which translation proves and tests hold against Python
        "shared.narrow",  # arithmetic of those expressions in dtypes that a target lacks
        "shared.dialect",  # which target speaks
    },
    ("reference", "triton"): {
        "spec",
        "inputs",  # what a call is given: data
        "shared.rope",  # tables, not the rotation: kernels have their own
        "shared.hadamard",  # the matrix
        "shared.retention",  # which tokens stay after many came: one sort by PyTorch, held against a loop over tokens
        "shared.stable_sort",
        "shared.page_summaries",  # of a prompt's keys, and the highest of bounds: the oracle says both again
        "shared.dialect",
    },
    ("reference", "cpp"): {"spec", "inputs"},
    ("oracle", "cpp"): {"spec"},
    ("oracle", "triton"): {"spec", "shared.rope", "shared.dialect"},
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(KERNELS.rglob("*.py")):
        name = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        yield name.removesuffix(".__init__").removesuffix("__init__"), path


MODULES = dict(modules())


def imported(name: str) -> set[str]:
    """The modules of kvcompile.kernels that a module imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for said in names:
            short = said.removeprefix("kvcompile.kernels.")
            if short != said and short in MODULES:
                found.add(short)
    return found


def reached(room: str) -> set[str]:
    """All modules that those of a room import, directly or not."""
    todo = [name for name in MODULES if name.split(".")[0] == room]
    assert todo, room
    seen = set(todo)
    while todo:
        for name in imported(todo.pop()) - seen:
            seen.add(name)
            todo.append(name)
    return {name for name in seen if name not in ROOMS and MODULES[name].name != "__init__.py"}


@pytest.mark.parametrize("pair", SHARED, ids="-".join)
def test_rooms_share_no_more_than_they_say(pair: tuple[str, str]) -> None:
    one, other = (reached(room) for room in pair)
    assert one & other == SHARED[pair]


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_reaches_into_another(room: str) -> None:
    others = {name for name in reached(room) if name.split(".")[0] in set(ROOMS) - {room}}
    assert not others, f"{room} imports {sorted(others)}"
