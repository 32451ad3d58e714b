"""The table of a run: counts, refusals by reason, families by outcome, and every failure with its spec."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.fuzz import (
    biases,
    embeddings,
    masks,
    mixers,
    outputs,
    positions,
    scales,
    selects,
    softmaxes,
    spellings,
)
from tests.fuzz.parts import Room

KINDS = ("exact", "refused", "WRONG", "CRASH", "discarded")
ROOMS: dict[str, Room] = {
    "mask": masks.MASKS,
    "bias": biases.BIASES,
    "scale": scales.SCALES,
    "response": scales.RESPONSES,
    "softmax": softmaxes.SOFTMAXES,
    "weights": softmaxes.WEIGHTS,
    "select": selects.SELECTS,
    "keys": selects.KEYS,
    "mixer": mixers.MIXERS,
    "embedding": embeddings.EMBEDDINGS,
    "position": positions.POSITIONS,
    "output": outputs.OUTPUTS,
    "habit": outputs.HABITS,
    "spelling": spellings.SPELLINGS,
}


@dataclass(frozen=True)
class Row:
    """One decoder and what came of it."""

    seed: int
    kind: str
    told: str
    seconds: float
    labels: Sequence[str]
    spec: str


def holdable(labels: Iterable[str]) -> bool:
    """Whether every family of a decoder is one that a cache can hold exactly."""
    labels = tuple(labels)
    if (
        "dtype: float64" in labels
        or "recipe: paged" in labels
        or {"mask of positions", "forward: attention_mask"} <= set(labels)
    ):
        return False  # pages hold less; that counted positions are 0, 1, 2, .. may not be known
    for label in labels:
        room, _, name = label.partition(": ")
        rule = ROOMS.get(room, {}).get(name)
        if rule is not None and rule.held is not True:
            return False
    return True


def reason(told: str) -> str:
    """The refusal without its numbers and names."""
    line = " ".join(told.split())
    return re.sub(r"`[^`]*`|\(.*?\)|[\w.]+\.py:\d+|\d+(\.\d+)?", "_", line)[:150]


def print_table(rows: Sequence[Row]) -> None:
    count = Counter(row.kind for row in rows)
    print(f"\n{len(rows)} decoders: " + ", ".join(f"{kind} {count[kind]}" for kind in KINDS))
    print(f"{sum(row.seconds for row in rows) / max(len(rows), 1):.2f} s per decoder")
    held = [row for row in rows if holdable(row.labels)]
    print(
        f"of {len(held)} that a cache can hold: exact {sum(row.kind == 'exact' for row in held)}, "
        f"refused {sum(row.kind == 'refused' for row in held)}"
    )
    by_label: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for label in row.labels:
            by_label[label][row.kind] += 1
            if row.kind == "refused" and holdable(row.labels):
                by_label[label]["untrue"] += 1
    print("\nfamily | exact | refused | of these only holdable parts | WRONG | CRASH")
    for label, kinds in sorted(by_label.items()):
        numbers = " | ".join(str(kinds[kind]) for kind in ("exact", "refused", "untrue", "WRONG", "CRASH"))
        print(f"{label} | {numbers}")
    print("\nrefusals by reason")
    reasons = Counter(reason(row.told) for row in rows if row.kind == "refused")
    for told, times in reasons.most_common(40):
        print(f"{times:>5}  {told}")
    print("\nrefused though a cache can hold each part")
    for row in rows:
        if row.kind == "refused" and holdable(row.labels):
            print(f"  {row.seed}: {', '.join(row.labels)}: {' '.join(row.told.split())[:230]}")
    for kind in ("WRONG", "CRASH"):
        print(f"\n{kind}")
        for row in rows:
            if row.kind == kind:
                print(f"  {row.seed}: {', '.join(row.labels)}\n    {row.told}\n    {row.spec}")
