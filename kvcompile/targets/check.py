"""What was written is run before it gets its name, over all that the plan counts by, against the oracle of the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from kvcompile.errors import ArtifactError, ExportError
from kvcompile.runtime.load import openers
from kvcompile.targets.manifest import CheckInfo, Manifest
from kvcompile.targets.source import Source
from kvcompile.targets.verify import check_session
from kvcompile.verify.long import program_chunks

log = logging.getLogger(__name__)
_CHUNKS = (9, 1, 1, 6, 1)  # the first pieces; more follow, over the plan's groups, pages and windows


def checked(source: Source, folder: Path, tell: Callable[[str, int, int], None]) -> tuple[CheckInfo, ...]:
    """Run the artifact in `folder` on what can run it here; nothing where the recipe says `verify: off`.

    A session that this machine has no package or GPU for is left out: `kvcompile verify` runs it elsewhere.

    Raises:
        ExportError: it does not run, though all that it needs is here.
        VerificationError: it disagrees.
    """
    if source.recipe.verify == "off":
        return ()
    found = []
    for name, opened in openers(Manifest.read(folder)):
        try:
            session = opened(folder, check=False)
        except ArtifactError as error:
            if not opened.may_fail(source.plan.dtype):
                raise ExportError(f"what was written does not run: {error}") from error
            log.warning("the artifact was not run with %s: %s", name, error)
            continue
        tell(f"verify ({session.name})", 0, 1)
        check = check_session(session, source, program_chunks(source.front, source.plan, _CHUNKS))
        tell(f"verify ({session.name})", 1, 1)
        found.append(
            CheckInfo(session=session.name, error=check.error, budget=check.budget, tokens=check.tokens)
        )
    return tuple(found)
