"""Breaks of replicas behind one interface, and of an engine over ranks."""

from __future__ import annotations

from tests.breaks.broken import broken

AFFINITY = "tests/serve/replicas/test_affinity.py"
FILE = "kvcompile/serve/replicas/affinity.py"
RANKS, RANKS_FILE = "tests/serve/test_ranks.py", "kvcompile/serve/ranks.py"

GROUP, GROUP_FILE = "tests/serve/replicas/test_replica_ranks.py", "kvcompile/serve/replicas/ranks.py"

REPLICAS = (
    broken(
        "a replica's own process is not told that it is rank 0",
        GROUP_FILE,
        'os.environ.update(common, RANK="0", LOCAL_RANK="0")',
        "os.environ.update(common)",
        GROUP,
    ),
    broken(
        "nobody looks whether the ranks of a replica live while it starts",
        GROUP_FILE,
        "if process.poll() is not None:",
        "if False:",
        GROUP,
    ),
    broken(
        "ranks stay behind a replica that does not start",
        GROUP_FILE,
        "        started.end()\n        raise",
        "        raise",
        GROUP,
    ),
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
    broken(
        "ranks forget nothing that rank 0 forgets",
        RANKS_FILE,
        'self._channel.tell("leave", text)',
        "pass",
        RANKS,
    ),
    broken(
        "ranks do not copy pages that rank 0 copies",
        RANKS_FILE,
        'with self._everywhere("move", tuple(moves), computed):',
        'with self._everywhere("move", (), computed):',
        RANKS,
    ),
    broken(
        "an idle rank 0 gives no sign of life",
        RANKS_FILE,
        'self._channel.tell("idle")',
        "pass",
        RANKS,
    ),
)
