"""What is asked of a case, and short ways to write one.

exact:   accepted, and equal to the original over the whole text
refused: refused for this reason, never accepted
held:    either of both, but never wrong
"""

from __future__ import annotations

import re
from typing import Any

from tests.fuzz.check import Outcome, check
from tests.fuzz.parts import Part
from tests.fuzz.spec import DecoderSpec, Layer

EAGER = Part("eager", ("masked_fill", float("-inf"), "matmul", "mask last"))
CAUSAL = Part("causal", ("i >= j",))
ROPE = Part("rope half, arange", ("arange", 10000.0))
# For learned tables and positions of tokens
BY_PLACES = {"forward": "position_ids", "position": ROPE}


def outcome_of(spec: DecoderSpec, verify: str = "off") -> Outcome:
    outcome = check(spec, verify)
    assert outcome.kind != "discarded", f"the original computes no numbers: {spec}"
    assert outcome.good, f"{outcome.kind}: {outcome.told}\n{spec}"
    return outcome


def exact(spec: DecoderSpec, verify: str = "off") -> None:
    outcome = outcome_of(spec, verify)
    assert outcome.kind == "exact", f"a cache can hold this: {outcome.told}\n{spec}"


def refused(spec: DecoderSpec, reason: str, verify: str = "off") -> None:
    """reason: a regular expression, loose, whatever the case of its letters."""
    outcome = outcome_of(spec, verify)
    assert outcome.kind == "refused", f"no cache can hold this, and yet the text tried came out equal\n{spec}"
    assert re.search(reason, outcome.told, re.IGNORECASE), f"expected {reason!r} in: {outcome.told}"


def held(spec: DecoderSpec, reason: str = ".", verify: str = "off") -> None:
    outcome = outcome_of(spec, verify)
    if outcome.kind == "refused":
        assert re.search(reason, outcome.told, re.IGNORECASE), f"expected {reason!r} in: {outcome.told}"


def decoder(*layers: Layer, **more: Any) -> DecoderSpec:
    return DecoderSpec(layers=layers or (Layer(),), **more)


def masked(condition: str, eager: bool = False, base: str = "i >= j", **more: Any) -> DecoderSpec:
    """One layer whose mask is `base` and the condition."""
    spelling = EAGER if eager else Part("sdpa bool")
    return decoder(Layer(mask=Part("written", (f"({base}) & ({condition})",)), spelling=spelling), **more)


def shown(text: str, **more: Any) -> DecoderSpec:
    """One layer whose mask is this text."""
    return decoder(Layer(mask=Part("written", (text,))), **more)


def biased(text: str, eager: bool = True, **more: Any) -> DecoderSpec:
    spelling = EAGER if eager else Part("sdpa float", (float("-inf"),))
    return decoder(Layer(bias=Part("written", (text,)), spelling=spelling), **more)


def scaled(text: str, where: str = "scores", **more: Any) -> DecoderSpec:
    spelling = EAGER if where == "scores" else Part("sdpa bool")
    return decoder(Layer(scale=Part("written", (text, where)), spelling=spelling), **more)


def weighed(text: str, again: bool = False, **more: Any) -> DecoderSpec:
    name = "written, again 1" if again else "written"
    return decoder(Layer(weights=Part(name, (text,)), spelling=EAGER), **more)


def mixed(name: str, *args: Any, in_block: bool = False, **more: Any) -> DecoderSpec:
    part = Part(name, args)
    return decoder(Layer(mixer=part), **more) if in_block else decoder(mixer=part, **more)


def placed(name: str, *args: Any, **more: Any) -> DecoderSpec:
    return decoder(position=Part(name, args), **more)
