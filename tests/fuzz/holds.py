"""What a test of decoders says: each is exact or refused."""

from __future__ import annotations

from tests.fuzz.check import check
from tests.fuzz.draw import spec_from_seed
from tests.fuzz.spec import DecoderSpec

FAST, SLOW, FILES = 32, 5108, 4


def fast(number: int) -> range:
    """The seeds of one of the files; a file is what one worker takes."""
    size = FAST // FILES
    return range(number * size, (number + 1) * size)


def slow(number: int) -> range:
    size = SLOW // FILES
    return range(FAST + number * size, FAST + (number + 1) * size)


def holds(spec: DecoderSpec, verify: str = "off") -> None:
    outcome = check(spec, verify)
    assert outcome.good, f"{outcome.kind}: {outcome.told}\n{', '.join(spec.labels())}\n{spec}"


def seed_holds(seed: int) -> None:
    holds(spec_from_seed(seed))
