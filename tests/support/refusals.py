"""What is refused, as data: every rule with a recipe that breaks it, and what the product of the axes leaves out.

docs/recipes.md has both as tables that are written from here (`python -m tests.support.refusals`), and the tests
hold them against what the code says.

- `RULES`: single keys and what goes with what, each with the smallest recipe that it refuses.
- `product()`: storage x placement x retention, one of each kind: which combinations `CacheLayout.check` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvcompile import layouts
from kvcompile.layouts import CacheLayout, Placement, Retention, Storage


@dataclass(frozen=True)
class Refusal:
    """A rule of a recipe.

    what:   what is refused, as the docs say it
    why:    the reason in a few words
    recipe: the smallest recipe that breaks it
    says:   a part of the message
    """

    what: str
    why: str
    recipe: Mapping[str, Any]
    says: str


def _cache(**axes: Any) -> dict[str, Any]:
    return {"cache": axes}


_H2O = {"kind": "h2o", "heavy": 8, "recent": 8}
RULES: tuple[Refusal, ...] = (
    Refusal("an unknown key", "a slip would otherwise be a silent default", {"cash": {}}, "unknown key"),
    Refusal("a value of another type, or out of range", "the same", {"verify": "maybe"}, "verify: expected"),
    Refusal(
        "`mode` with another dtype than int8",
        "it would have no effect",
        _cache(keys={"dtype": "int4", "mode": "symmetric"}),
        "mode is for dtype int8 only",
    ),
    Refusal(
        "`group` with another dtype than an asymmetric integer",
        "it would have no effect",
        _cache(keys={"dtype": "int8", "group": 32}),
        "group is for",
    ),
    Refusal(
        "`scale` with another dtype than fp8",
        "it would have no effect",
        _cache(keys={"dtype": "int8", "scale": "none"}),
        "scale is for fp8 dtypes only",
    ),
    Refusal(
        "`scale_dtype` without a scale per token",
        "it would have no effect",
        _cache(values={"dtype": "fp8_e4m3", "scale": "none", "scale_dtype": "float32"}),
        "scale_dtype is for",
    ),
    Refusal(
        "`rotate`, `residual` or `sinks` with a float",
        "nothing is rounded",
        _cache(keys={"dtype": "model", "rotate": "hadamard"}),
        "rotate is for quantized dtypes only",
    ),
    Refusal(
        "`rope: before` with a float",
        "nothing is rounded",
        _cache(keys={"dtype": "float16", "rope": "before"}),
        "rope: before is for quantized dtypes only",
    ),
    Refusal(
        "`axis: channel` with another dtype than an asymmetric integer",
        "its scales are of groups of integers",
        _cache(keys={"dtype": "int8", "axis": "channel", "residual": 32}),
        "axis: channel is for",
    ),
    Refusal(
        "`axis: channel` without a `group`",
        "somebody must say how many tokens share a scale",
        _cache(keys={"dtype": "int4", "axis": "channel", "residual": 32}),
        "axis: channel needs a group",
    ),
    Refusal(
        "`axis: channel` with a `residual` that is no multiple of its `group`",
        "tokens are rounded in whole groups",
        _cache(keys={"dtype": "int4", "axis": "channel", "group": 32, "residual": 48}),
        "axis: channel needs a residual that is a multiple",
    ),
    Refusal(
        "`scale: tensor` or `scale: head` without `scales`",
        "they must be known before the first token",
        _cache(keys={"dtype": "fp8_e4m3", "scale": "head"}),
        "is required for scale: tensor and scale: head",
    ),
    Refusal(
        "`page_size`, `pages` or `released` with another placement than `paged`",
        "it would have no effect",
        _cache(placement={"kind": "contiguous", "page_size": 16}),
        "for kind paged only",
    ),
    Refusal(
        "`released` without a window, or where scores choose",
        "no page is ever behind it",
        _cache(placement={"kind": "paged", "released": True}),
        "retention 'full' has not",
    ),
    Refusal(
        "`released` with a window that is no longer than what settles late",
        "its page would be gone by then",
        _cache(
            keys={"dtype": "int8", "residual": 64},
            placement={"kind": "paged", "released": True},
            retention={"kind": "window", "size": 64},
        ),
        "the newest 64 tokens come to their pages late",
    ),
    Refusal(
        "a `page_size` that is no multiple of the tokens that share a scale",
        "whole groups in a page",
        _cache(
            keys={"dtype": "int4", "axis": "channel", "group": 32, "residual": 32},
            placement={"kind": "paged", "page_size": 48},
        ),
        "must not lie across two pages",
    ),
    Refusal(
        "fewer `pages` than the budget of one sequence fills",
        "not one sequence would fit",
        _cache(placement={"kind": "paged", "page_size": 16, "pages": 1}, retention=_H2O | {"heavy": 64}),
        "the pool has 1",
    ),
    Refusal(
        "more `sinks` of keys or values than the retention keeps",
        "they would be in full and forgotten",
        _cache(keys={"dtype": "int8", "sinks": 4}, retention={"kind": "window", "size": 64}),
        "keeps tokens in full that retention",
    ),
    Refusal(
        "`rope: after` with `positions: in_cache`",
        "such keys are rotated when they are read",
        _cache(
            keys={"dtype": "int8", "rope": "after"},
            retention={"kind": "sink_window", "window": 64, "positions": "in_cache"},
        ),
        "always keeps keys before RoPE",
    ),
    Refusal(
        "`positions: in_cache` with `prefill: full`",
        "the table of positions ends behind the budget and one chunk",
        _cache(retention=_H2O | {"positions": "in_cache"}),
        "use prefill: bounded",
    ),
    Refusal(
        "`snapkv` with an even `smooth`",
        "as many neighbours on either side",
        _cache(retention={"kind": "snapkv", "heavy": 8, "smooth": 4}),
        "an odd number",
    ),
    Refusal(
        "`snapkv` with more `rows` than `recent`",
        "the queries that vote stay",
        _cache(retention={"kind": "snapkv", "heavy": 8, "recent": 8, "rows": 16}),
        "the queries that vote are the newest tokens",
    ),
    Refusal(
        "`tova` with a budget below 2",
        "the newest token and one other",
        _cache(retention={"kind": "tova", "budget": 1}),
        "at least 2 tokens",
    ),
    Refusal(
        "`auto` beside `cache`, `layers` or `scales`",
        "it chooses them",
        {"auto": {}, "cache": {}},
        "auto chooses a recipe",
    ),
    Refusal(
        "`where: {}`", "matches nothing", {"layers": [{"where": {}, "cache": {}}]}, "name at least one of"
    ),
    Refusal(
        "a `range` such as `[3, 1]`",
        "matches nothing",
        {"layers": [{"where": {"range": [3, 1]}, "cache": {}}]},
        "is empty",
    ),
)

# One of each kind; sizes that any head, window and page can have.
STORAGES: tuple[tuple[str, Storage], ...] = (
    ("a float, fp8, int8 or smaller by token", layouts.int8()),
    ("the same with `residual`", layouts.with_residual(layouts.int8(), 8)),
    ("the same with `sinks`", layouts.with_residual(layouts.int8(), 0, sinks=2)),
    ("any by `axis: channel`", layouts.per_channel(4, 32, 32)),
)
PLACEMENTS: tuple[tuple[str, Placement], ...] = (
    ("`contiguous`", layouts.Contiguous()),
    ("`ring`", layouts.Ring()),
    ("`slots`", layouts.Slots()),
    ("`paged`", layouts.Paged(32)),
    ("`paged`, `released`", layouts.Paged(32, released=True)),
)
RETENTIONS: tuple[tuple[str, Retention], ...] = (
    ("`full`", layouts.Full()),
    ("`window`", layouts.Window(64)),
    ("`sink_window`", layouts.SinkWindow(4, 60)),
    ("`h2o`, `tova`, `snapkv`", layouts.Scored(4, 30, 30)),
)


def product() -> Iterator[tuple[str, str, str, str | None]]:
    """(storage, placement, retention, why it is refused or None) of every combination."""
    for placement_name, placement in PLACEMENTS:
        for retention_name, retention in RETENTIONS:
            for storage_name, storage in STORAGES:
                problem = CacheLayout(storage, storage, placement, retention).check()
                yield storage_name, placement_name, retention_name, problem


def rules_table() -> str:
    """`RULES` as a Markdown table."""
    rows = [f"| {rule.what} | {rule.why} |" for rule in RULES]
    return "\n".join(("| refused when a recipe is read | why |", "|---|---|", *rows))


def product_table() -> str:
    """The product as a Markdown table: a row per placement, a column per retention."""
    lines = [f"| | {' | '.join(name for name, _ in RETENTIONS)} |", "|---" * (len(RETENTIONS) + 1) + "|"]
    for placement, of_placement in groupby(product(), key=lambda row: row[1]):
        cells = []
        for _, found in groupby(of_placement, key=lambda row: row[2]):
            refused = [storage for storage, _, _, problem in found if problem]
            if len(refused) == len(STORAGES):
                cells.append("no")
            else:
                cells.append("yes" if not refused else "all but " + ", ".join(refused))
        lines.append(f"| {placement} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(rules_table(), product_table(), sep="\n\n")
