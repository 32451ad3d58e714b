"""Breaks of replicas behind one interface."""

from __future__ import annotations

from tests.breaks.broken import broken

AFFINITY = "tests/serve/replicas/test_affinity.py"
FILE = "kvcompile/serve/replicas/affinity.py"

REPLICAS = (
    broken(
        "prompts of other salts go where one was found",
        FILE,
        'root("kvcompile affinity 1", salt)',
        'root("kvcompile affinity 1")',
        AFFINITY,
    ),
    broken(
        "a busy replica gets all that begins alike",
        FILE,
        "if loads[replica] < most]",
        "if loads[replica] < most or True]",
        AFFINITY,
    ),
    broken(
        "a talk goes where its first piece was last",
        FILE,
        "for name in reversed(names) if",
        "for name in names if",
        AFFINITY,
    ),
    broken(
        "prompts go to a replica that is gone",
        FILE,
        "if self._of.get(name) in loads)",
        "if name in self._of)",
        AFFINITY,
    ),
)
