"""What `kernels.py` measures: attention of new tokens over caches of given lengths, and the goals it is held to.

A case is a cache (the `cache` section of a recipe), heads and lengths. What figures must reach stands in
`kernels/triton/predict/goals.py`, which the model of a machine is held to as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvcompile.kernels.triton.predict.goals import GOALS, Figure, Goal

__all__ = ["APPENDS", "CASES", "GOALS", "Case", "Figure", "Goal"]

INT8 = {"keys": {"dtype": "int8"}, "values": {"dtype": "int8"}}
FP8 = {"keys": {"dtype": "fp8_e4m3"}, "values": {"dtype": "fp8_e4m3"}}
INT4 = {"keys": {"dtype": "int4", "group": 32}, "values": {"dtype": "int4", "group": 32}}
KIVI4 = {
    "keys": {"dtype": "int4", "axis": "channel", "group": 32, "residual": 128},
    "values": {"dtype": "int4", "group": 32, "residual": 128},
}


def pages(size: int) -> dict[str, Any]:
    return {"placement": {"kind": "paged", "page_size": size}}


@dataclass(frozen=True)
class Case:
    """Attention of one new token a sequence.

    batch, context: sequences, and tokens that each has seen with the new one
    spread:   lengths rise evenly from the first of these to the second instead
    others:   all sequences but the first have this length instead
    new:      new tokens of each sequence, the last of `context`: of many, a prompt
    heads:    of queries and of keys
    cache:    as a recipe has it
    score:    softcap, "alibi" or "sinks"
    window:   of the model's own mask
    peers:    whether other implementations are measured beside
    append:   the new token's keys and values are written as well (else attention alone is measured)
    """

    name: str
    batch: int
    context: int
    heads: tuple[int, int] = (32, 8)
    dim: int = 128
    cache: Mapping[str, Any] = field(default_factory=dict)
    spread: tuple[int, int] | None = None
    others: int | None = None
    new: int = 1
    score: str = ""
    window: int | None = None
    peers: bool = False
    append: bool = False

    @property
    def lengths(self) -> list[int]:
        if self.others is not None:
            return [self.context, *[self.others] * (self.batch - 1)]
        if self.spread is None:
            return [self.context] * self.batch
        first, last = self.spread
        return [first + (last - first) * row // max(self.batch - 1, 1) for row in range(self.batch)]

    @property
    def flops(self) -> int:
        """Of both products, of the keys that each query sees; of a plain causal mask."""
        seen = sum(length * self.new - self.new * (self.new - 1) // 2 for length in self.lengths)
        return 4 * seen * self.heads[0] * self.dim

    def tiny(self) -> Case:
        """The same with sizes for Triton's interpreter."""
        group = self.heads[0] // self.heads[1]
        cache: dict[str, dict[str, Any]] = {key: dict(value) for key, value in self.cache.items()}
        for side in ("keys", "values"):
            if "residual" in cache.get(side, {}):
                cache[side] |= {"residual": 32}
        if "heavy" in cache.get("retention", {}):
            cache["retention"] |= {"sinks": 2, "heavy": 14, "recent": 16}
        elif "window" in cache.get("retention", {}):
            cache["retention"] |= {"sinks": 2, "window": 30}
        return replace(
            self,
            batch=min(self.batch, 2),
            context=72,
            heads=(2 * min(group, 2), 2),
            dim=32,
            cache=cache,
            spread=None if self.spread is None else (8, 72),
            others=None if self.others is None else 9,
            new=min(self.new, 24),
            window=None if self.window is None else 24,
        )


PLAIN = Case("bf16 B32 4k", 32, 4096, peers=True)
LONG = Case("bf16 B1 32k", 1, 32768, peers=True)
PAGED = replace(PLAIN, name="bf16 B32 4k pages of 128", cache=pages(128), peers=False)
BUDGET = 8192
STREAM = {"retention": {"kind": "sink_window", "sinks": 4, "window": BUDGET - 4}}
H2O = {"retention": {"kind": "h2o", "sinks": 4, "heavy": BUDGET // 2 - 4, "recent": BUDGET // 2}}
CASES = (
    PLAIN,
    LONG,
    Case("fp8 B1 256k 32/4", 1, 262144, (32, 4), cache=FP8),
    replace(PLAIN, name="int8 B32 4k", cache=INT8, peers=False),
    replace(PLAIN, name="fp8 B32 4k", cache=FP8, peers=False),
    Case("bf16 B32 32k", 32, 32768, peers=True),
    Case("int4 B32 32k", 32, 32768, cache=INT4),
    Case("kivi4 B32 32k", 32, 32768, cache=KIVI4),
    replace(PLAIN, name="bf16 B32 4k softcap", score="softcap", peers=False),
    replace(PLAIN, name="bf16 B32 4k alibi", score="alibi", peers=False),
    replace(PLAIN, name="bf16 B32 4k sinks", score="sinks", peers=False),
    replace(PLAIN, name="bf16 B32 4k window", window=4096, peers=False),
    PAGED,
    replace(PLAIN, name="bf16 B32 4k pages of 16", cache=pages(16), peers=False),
    Case("bf16 B16 8k slots", 16, 2 * BUDGET, cache=STREAM, append=True),
    Case("bf16 B16 8k slots h2o", 16, 2 * BUDGET, cache=H2O, append=True),
    Case("bf16 B64 1k-64k pages of 64", 64, 65536, cache=pages(64), spread=(1024, 65536)),
    Case("bf16 B64 one of 64k among 1k pages of 64", 64, 65536, cache=pages(64), others=1024),
    Case("int8 B64 one of 64k among 1k pages of 64", 64, 65536, cache=INT8 | pages(64), others=1024),
    Case("bf16 B1 prompt of 8k", 1, 8192, new=8192, append=True),
    Case("int8 B1 prompt of 8k", 1, 8192, cache=INT8, new=8192, append=True),
    Case("int4 B1 prompt of 8k", 1, 8192, cache=INT4, new=8192, append=True),
    Case("kivi4 B1 prompt of 8k", 1, 8192, cache=KIVI4, new=8192, append=True),
    Case("bf16 B1 2k after 30k pages of 64", 1, 32768, cache=pages(64), new=2048, append=True),
    Case("int8 B1 2k after 30k pages of 64", 1, 32768, cache=INT8 | pages(64), new=2048, append=True),
)
# RoPE, encoding and the write of one new token a sequence: the append kernel by itself.
APPENDS = tuple(Case(f"append int8 B{batch}", batch, 4096, cache=INT8) for batch in (1, 32, 256))
