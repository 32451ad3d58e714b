"""Takes the lines out of a kernel's text that nothing reads.

Parts of a kernel name what another part may ask for: the position of a key, how long a sequence is. Which of the names
are asked for is seen best when the text is whole, so a part defines all of its own, and what is left over goes here.
"""

from __future__ import annotations

import ast


def tidy(text: str) -> str:
    """The module `text` without assignments to names that are never read, and without those of a name to itself.

    Only whole lines go, of one statement that assigns to one name. What is read through such a line alone goes too.
    """
    while spare := _spare(ast.parse(text)):
        lines = text.splitlines(keepends=True)
        text = "".join(line for number, line in enumerate(lines, 1) if number not in spare)
    return text


def _spare(tree: ast.Module) -> set[int]:
    """Numbers of the lines that can go."""
    read = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    found: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not _acts(value):
                itself = isinstance(value, ast.Name) and value.id == name
                if itself or name not in read:
                    found |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return found


def _acts(value: ast.expr) -> bool:
    """Whether more happens than that a value is computed."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "atomic" in node.func.attr
        for node in ast.walk(value)
    )
