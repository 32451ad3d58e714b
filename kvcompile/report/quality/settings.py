"""What is measured: options of `quality`, with every problem in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

from kvcompile.recipe.schema import CompileConfig

METRICS = ("perplexity", "needle")
ASK = ("after", "before")
COMPILE = ("auto", *get_args(CompileConfig.model_fields["mode"].annotation))
CHUNK = 256  # tokens in one piece where pieces change nothing: the logits of a piece are the largest tensor


@dataclass(frozen=True)
class Settings:
    """See `kvcompile.quality` for the meaning of each."""

    metrics: tuple[str, ...] = METRICS
    prompt: int = 512
    tokens: int = 3072
    step: int | str = "auto"
    needle_tokens: tuple[int, ...] = (768,)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needles: int = 3
    ask: tuple[str, ...] = ASK
    seed: int = 0
    compile: str = "auto"

    def problems(self) -> list[str]:
        """What is wrong with these settings, a line each."""
        return list(self._problems())

    def needed(self) -> int:
        """Tokens that the text must have."""
        lengths = [self.prompt + self.tokens] if "perplexity" in self.metrics else []
        return max([*lengths, *(self.needle_tokens if "needle" in self.metrics else ())], default=0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()
        }

    def _problems(self) -> Iterator[str]:
        for name, allowed in (("metrics", METRICS), ("ask", ASK)):
            given = getattr(self, name)
            if not given or any(value not in allowed for value in given) or len(set(given)) < len(given):
                yield f"{name}: expected one or more of {', '.join(allowed)}, once each; got {_list(given)}"
        for name, least in (("prompt", 1), ("tokens", 1), ("needles", 1)):
            if not _whole(getattr(self, name), least):
                yield f"{name}: expected a whole number of at least {least}, got {getattr(self, name)!r}"
        if self.step != "auto" and not _whole(self.step, 1):
            yield f"step: expected auto or a whole number of tokens of at least 1, got {self.step!r}"
        if not _whole(self.seed, 0):
            yield f"seed: expected a whole number of at least 0, got {self.seed!r}"
        if not _unique(self.needle_tokens) or any(not _whole(n, 64) for n in self.needle_tokens):
            yield (
                "needle_tokens: expected different whole numbers of at least 64, room for a fact and a text around "
                f"it; got {_list(self.needle_tokens)}"
            )
        if not _unique(self.depths) or any(not _number(d) or not 0 <= d <= 1 for d in self.depths):
            yield (f"depths: expected different numbers from 0 (start) to 1 (end), got {_list(self.depths)}")
        if self.compile not in COMPILE:
            yield f"compile: expected one of {', '.join(COMPILE)}, got {self.compile!r}"


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _unique(values: tuple[object, ...]) -> bool:
    return 0 < len(values) == len(set(values))


def _list(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values)) or "none"
