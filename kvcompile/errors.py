"""Every error kvcompile raises on purpose.

A message says what was expected, what came, where, and what to do. Catch `KVCompileError` for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class KVCompileError(Exception):
    """Root of all errors that kvcompile raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Of the message, and not of what `__init__` takes: a process pool breaks on an error that it cannot read."""
        return _again, (type(self), self.args, dict(self.__dict__))


def _again(kind: type[KVCompileError], args: tuple[Any, ...], state: dict[str, Any]) -> KVCompileError:
    """An error as it was in another process."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class RecipeError(KVCompileError):
    """A recipe cannot be read, or holds unknown keys or impossible values.

    `problems` has one line per problem: all of them are reported at once.
    """

    def __init__(self, source: str, problems: Sequence[str]):
        self.source = source
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"{source}: {count} problem{'s' if count != 1 else ''}\n{lines}")


class ModelError(KVCompileError):
    """The model is missing, unreadable, or of a kind that has no KV cache to choose."""


class CaptureError(ModelError):
    """The model could not be traced into one graph with dynamic batch and sequence."""


class DetectionError(ModelError):
    """Some attention block (or all of them) was not recognised; carries the nearest misses."""

    def __init__(self, message: str, misses: Sequence[object] = ()):
        self.misses = tuple(misses)
        super().__init__(message)


class PlanError(KVCompileError):
    """The recipe asks of this model something that its sites cannot do."""


class VerificationError(KVCompileError):
    """The rewritten model disagrees with the original (or with the oracle of the same policy)."""

    def __init__(self, message: str, layer: int | None = None, error: float = float("nan")):
        self.layer = layer
        self.error = error
        super().__init__(message)


class RankError(KVCompileError):
    """Ranks of one model do not have the same, or one of them died or hangs; the group is of no use any more."""


class LimitError(KVCompileError):
    """More tokens or sequences than the recipe's limits; nothing was written to the cache."""


class InputError(KVCompileError):
    """A call's input has the wrong dtype, shape, device or padding; nothing was written to the cache."""


class ServeError(KVCompileError):
    """The engine could not finish a request, though it was a good one: a step failed, or the engine was closed."""


class LogitsError(ServeError):
    """A step gave logits of which no token can be chosen; `rows` are those of the step, and why.

    The other rows are good, and can be picked without these.
    """

    def __init__(self, rows: Mapping[int, str]):
        self.rows = dict(rows)
        told = "; ".join(f"row {row}: {why}" for row, why in self.rows.items())
        super().__init__(f"logits of which no token can be chosen: {told}")


class BusyError(ServeError):
    """The engine's queue is full; the same request may fit later."""


class MethodError(KVCompileError, AttributeError):
    """A method of the original model that an optimized module does not have, or of the caches of transformers that a
    handle does not have: `hasattr` says False."""


class QualityError(KVCompileError):
    """What `quality` was asked cannot be measured; found before anything is.

    `problems` has one line per problem: all of them are reported at once.
    """

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"quality: {self.problems[0]}" if len(self.problems) == 1 else f"quality:\n{lines}")


class CompileError(KVCompileError):
    """The backend refused the rewritten graph."""


class KernelError(KVCompileError):
    """A kernel cannot be written to the cache, assembled, measured or launched."""


class ExportError(KVCompileError):
    """A plan cannot be exported to a target, or its artifact cannot be written; what was there before is as it was."""


class ArtifactError(KVCompileError):
    """An artifact is missing, damaged, of another version, or does not fit the machine that shall run it."""
