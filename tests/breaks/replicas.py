"""Breaks of replicas behind one interface, and of an engine over ranks."""

from __future__ import annotations

from tests.breaks.broken import broken

AFFINITY = "tests/serve/replicas/test_affinity.py"
FILE = "kvcompile/serve/replicas/affinity.py"
RANKS, RANKS_FILE = "tests/serve/test_ranks.py", "kvcompile/serve/ranks.py"

GROUP, GROUP_FILE = "tests/serve/replicas/test_replica_ranks.py", "kvcompile/serve/replicas/ranks.py"

REMOTE, REMOTE_FILE = "tests/serve/replicas/test_remote.py", "kvcompile/serve/replicas/remote.py"
ROUTER, ROUTER_FILE = "tests/serve/replicas/test_router.py", "kvcompile/serve/replicas/router.py"
REPLICA_FILE = "kvcompile/serve/replicas/replica.py"

REPLICAS = (
    broken(
        "a replica that hangs keeps threads from other requests",
        REMOTE_FILE,
        "        return handle\n",
        "        handle._taken.exception(15)\n        return handle\n",
        REMOTE,
    ),
    broken(
        "a request that no replica takes is answered",
        "kvcompile/serve/submitting.py",
        "        await asyncio.gather(*(handle.taken() for handle in handles))",
        "        pass",
        REMOTE,
    ),
    broken(
        "a request goes to another replica by the name that it had",
        REMOTE_FILE,
        "handle.id if number == 1 else",
        "handle.id if True else",
        REMOTE,
    ),
    broken(
        "one replica that says nothing keeps all others' numbers",
        REMOTE_FILE,
        ", return_exceptions=True",
        "",
        REMOTE,
    ),
    broken(
        "a full queue of a replica is a defect",
        REPLICA_FILE,
        "    BusyError,\n    InputError,\n    LimitError,\n)",
        "    InputError,\n    LimitError,\n)",
        REMOTE,
    ),
    broken(
        "a grammar holds up a replica's other requests",
        REPLICA_FILE,
        "async with submitted(submit) as (_, (handle,)):",
        "submit(made := [])\n            async with submitted(lambda own: own.extend(made)) as (_, (handle,)):",
        REMOTE,
    ),
    broken(
        "a replica that hangs has no load",
        ROUTER_FILE,
        "        self._loads[str(replica_id)] += 1",
        "        pass",
        ROUTER,
    ),
    broken(
        "what could not be sent lowers a load for ever",
        ROUTER_FILE,
        "max(self._loads[name] - 1, 0)",
        "self._loads[name] - 1",
        ROUTER,
    ),
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
        "after half of a message comes the next one",
        RANKS_FILE,
        '            group.failed = group.failed or f"what rank 0 tells',
        '            _ = group.failed or f"what rank 0 tells',
        "tests/serve/test_rank_channel.py",
    ),
    broken(
        "ranks are told something while they compile",
        RANKS_FILE,
        "        with self._channel.alone:\n            self._channel.tell(what, *given)",
        "        if True:\n            self._channel.tell(what, *given)",
        "tests/serve/test_rank_channel.py",
    ),
    broken(
        "a sign of life waits for who compiles",
        RANKS_FILE,
        "self._channel.alone.acquire(blocking=False)",
        "self._channel.alone.acquire()",
        "tests/serve/test_rank_channel.py",
    ),
    broken(
        "a text cannot end where a rank is gone",
        RANKS_FILE,
        '        self._tell("limit", room)',
        '        self._channel.tell("limit", room)',
        "tests/serve/test_rank_channel.py",
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
