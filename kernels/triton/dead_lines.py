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
    reads, assigned = _names(ast.parse(text))
    gone: set[ast.stmt] = set()
    while True:
        read = {name for name, statement in reads if statement not in gone}
        more = {
            statement
            for statement, name in assigned.items()
            if statement not in gone and (name is None or name not in read)
        }
        if not more:
            break
        gone |= more
    spare = {n for node in gone for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = text.splitlines(keepends=True)
    return "".join(line for number, line in enumerate(lines, 1) if number not in spare)


def _names(tree: ast.Module) -> tuple[list[tuple[str, ast.stmt | None]], dict[ast.stmt, str | None]]:
    """What is read, with the statement that could go and reads it; and those statements, with what each assigns.

    None: no such statement; a name that is assigned to itself
    """
    reads: list[tuple[str, ast.stmt | None]] = []
    assigned: dict[ast.stmt, str | None] = {}
    waiting: list[tuple[ast.AST, ast.stmt | None]] = [(tree, None)]
    while waiting:
        node, within = waiting.pop()
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                reads.append((name, within))
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if not _acts(value):
                itself = isinstance(value, ast.Name) and value.id == name
                assigned[node] = None if itself else name
                within = node
        waiting.extend((child, within) for child in ast.iter_child_nodes(node))
    return reads, assigned


def _acts(value: ast.expr) -> bool:
    """Whether more happens than that a value is computed."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "atomic" in node.func.attr
        for node in ast.walk(value)
    )
