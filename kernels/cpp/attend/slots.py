"""Which slots a query sees, where their tokens stand, and what becomes of their scores; `slots.cpp.jinja`."""

from __future__ import annotations

from kvcompile.kernels.cpp.attend import expression
from kvcompile.kernels.cpp.attend.bias import bias_text
from kvcompile.kernels.cpp.render import real, rendered
from kvcompile.kernels.cpp.spec import CppSpec
from kvcompile.kernels.cpp.symbolic import printed
from kvcompile.layouts import Scored
from kvcompile.layouts import symbols as sy


def slots_text(spec: CppSpec, places: bool, finishes: bool, query_place: str) -> str:
    """The functions. places: whether anything asks where tokens stand; query_place: in C++, where a query does."""
    site, layout = spec.site, spec.layout
    retention, mask = layout.retention, site.mask
    sees_all = layout.in_order and mask.window is None and retention.window is None and not retention.shown
    score = site.score
    return rendered(
        "slots.cpp.jinja",
        spec=spec,
        layout=layout,
        retention=retention,
        scored=retention.by_score,
        noted=notes_weights(spec),
        chosen="chosen" in spec.options,
        all=sees_all,
        token_at=""
        if retention.by_score
        else printed(layout.token_at, {sy.slot: "slot_", sy.length: "length"}),
        visible=_visible(spec),
        low=None if "chosen" in spec.options else lowest(spec, "query"),
        places=places,
        ranked=retention.by_score and retention.in_cache and places,
        in_cache=retention.in_cache,
        budget=int(retention.budget()) if retention.in_cache else 0,
        first=retention.sinks if retention.in_cache else 0,
        finishes=finishes,
        softcap=None if score.softcap is None else real(score.softcap),
        bias=None if score.bias is None else bias_text(score.bias, "head"),
        mod=None if score.mod is None else expression.printed(score.mod),
        leaves=() if score.mod is None else sorted(expression.read(score.mod)),
        query_place=query_place,
    )


def notes_weights(spec: CppSpec) -> bool:
    """Whether a step adds what its queries gave each slot to the slot's score; of votes only prompts do."""
    retention = spec.layout.retention
    return isinstance(retention, Scored) and retention.score != "vote"


def lowest(spec: CppSpec, query: str) -> str | None:
    """The first slot that a query sees besides those of the sinks, in C++; it may be negative.

    None: slots do not stand in the order of tokens, or no window hides the first.
    """
    mask, retention = spec.site.mask, spec.layout.retention
    if not spec.layout.in_order:
        return None
    found = [] if retention.window is None else [f"{query} - {retention.window - 1}"]
    if mask.window is not None and mask.kind == "chunked":
        found.append(f"{query} / {mask.window} * {mask.window}")
    elif mask.window is not None:
        found.append(f"{query} - {mask.window - 1}")
    if not found:
        return None
    return found[0] if len(found) == 1 else f"std::max<int64_t>({', '.join(found)})"


def _visible(spec: CppSpec) -> str:
    """Whether the query at `query` sees the token `key` in the slot `slot_`, as `kernels/reference/visibility.py`."""
    layout, mask = spec.layout, spec.site.mask
    retention = layout.retention
    # A slot that has not been written: its token is one to come, or, in a ring, that of another slot.
    found = ["key < length", f"key >= std::min<int64_t>(slot_, {retention.sinks})"]
    if mask.window is not None:
        if mask.kind == "chunked":
            found.append(f"key / {mask.window} == query / {mask.window}")
        else:
            found.append(f"key > query - {mask.window}")
    if retention.window is not None:
        recent = f"key > query - {retention.window}"
        found.append(f"({recent} || key < {retention.sinks})" if retention.sinks else recent)
    found += [printed(shown, {sy.query: "query", sy.key: "key"}) for shown in retention.shown]
    return " && ".join(found)
