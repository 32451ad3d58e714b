"""Role prefill: many queries a sequence against decoded keys and values; `templates/prefill.cpp.jinja`.

Blocks of queries meet blocks of keys: products in registers, a softmax so far for each query, as in FlashAttention-2
(Dao 2023). Blocks of which a query sees nothing are left out. What the layout says beyond who sees whom is not the
kernel's: one kernel is for many layouts.

With the option `columns` it also sums up what retention by scores needs (`kernels/reference/score_sums.py`): when the
sum below each query's probabilities is known, what its weights were is summed up key by key; where there is no room for
these, blocks of keys meet the queries that count once more. Where such a
retention keeps the newest tokens in full, keys are there once for each form in which a query may read them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvcompile.kernels.cpp.attend import expression
from kvcompile.kernels.cpp.attend.bias import bias_text
from kvcompile.kernels.cpp.attend.values import MODELS
from kvcompile.kernels.cpp.render import real, rendered
from kvcompile.kernels.cpp.spec import WIDE, CppSpec
from kvcompile.kernels.cpp.symbolic import printed
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, Contiguous, InKeys, Scored, SinkWindow, Slots, Storage
from kvcompile.layouts import symbols as sy

TENSORS = ("OUT", "Q", "K", "V", "PLACES", "POSITIONS", "SINKS", "BIAS", "ALLOWED")  # and more of some
COLUMNS = "columns"
_ROWS = 384  # of queries that meet a block of keys: packing it costs a few hundredths of their products
_SUMS = 1 << 16  # floats of their sums, at most: these stay in a core's second cache
_KEPT_ROWS = 192  # of queries whose weights are kept: over 4,000 keys they fit a core's second cache
_MOST_KEPT = 8 << 20  # bytes of a thread; of more keys, products are made twice
_MOST_KEPT_SUMS = 64 << 20  # bytes of all blocks of queries together


def site_of(site: SiteSpec) -> SiteSpec:
    """What of a site the kernel depends on."""
    retention = site.layout.retention
    keys, values = residuals(site.layout) if retention.by_score else (0, 0)
    layout = CacheLayout(
        Storage(residual=keys),
        Storage(residual=values),
        placement=Slots() if retention.by_score else Contiguous(),
        retention=retention,
        before_rope=site.layout.before_rope and retention.in_cache,
    )
    return replace(site, layout=layout, rotary=None, share="none", kernels="cpp")


def residuals(layout: CacheLayout) -> tuple[int, int]:
    """How many of the newest tokens are in full: of keys, and of values."""
    values = layout.keys if isinstance(layout.values, InKeys) else layout.values
    return layout.keys.residual, values.residual


def forms_of(layout: CacheLayout) -> tuple[int, ...]:
    """The forms in which keys are given to the role with `columns`: 2 where the key is in full, 1 where the value is.

    As `kernels/reference/residual_views.py` has them, one behind the other.
    """
    keys, values = residuals(layout)
    later = ((3, keys and values), (2, keys > values), (1, values > keys))
    return (0, *(form for form, there in later if there))


def places_matter(site: SiteSpec) -> bool:
    """Whether the role with `columns` asks where queries and keys stand, besides which tokens they are."""
    score, retention = site.score, site.layout.retention
    return retention.by_score and retention.in_cache and (score.bias is not None or score.mod is not None)


def generate(spec: CppSpec) -> str:
    """The kernel's text."""
    site = spec.site
    score, group = site.score, spec.num_qo_heads // spec.num_kv_heads
    rows = min(_ROWS, _SUMS // spec.v_head_dim)
    seen = _visible(site)
    columns, mod, near = COLUMNS in spec.options, score.mod, _near(site)
    return rendered(
        "prefill.cpp.jinja",
        spec=spec,
        columns=columns,
        wide=WIDE in spec.options,
        **(_sums(spec) if columns else {"keeps": False}),
        model=MODELS[spec.torch_dtype],
        sm_scale=real(float(np.float32(site.sm_scale))),
        tensors=(
            *TENSORS,
            *(("COLUMNS", "QUERY_PLACES", "KEY_PLACES") if columns else ("NEAR",)),
            *expression.leaves_of(mod),
        ),
        near=near,
        placed=columns and places_matter(site),
        forms=forms_of(site.layout) if columns else (0,),
        full_from=[printed(side.quantized_tokens, {sy.length: "length"}) for side in _sides(site.layout)],
        mod=None if mod is None else expression.printed(mod, near is not None),
        leaves=() if mod is None else sorted(expression.read(mod)),
        empty_rows=mod is not None and mod.empty_rows,
        tokens=max(1, rows // group),
        sees=" && ".join(sees for sees, _, _ in seen),
        all_seen=" && ".join(every for _, every, _ in seen),
        none_seen=" || ".join(none for _, _, none in seen),
        softcap=None if score.softcap is None else real(score.softcap),
        bias=None if score.bias is None else bias_text(score.bias, "of"),
        sinks=score.sinks,
    )


def _sides(layout: CacheLayout) -> tuple[Storage, Storage]:
    assert isinstance(layout.values, Storage)
    return layout.keys, layout.values


def _near(site: SiteSpec) -> SinkWindow | None:
    """The retention, where first tokens stand nearer to queries than their positions say."""
    retention = site.layout.retention
    return retention if isinstance(retention, SinkWindow) and retention.in_cache else None


def _sums(spec: CppSpec) -> dict[str, str | int]:
    """What probabilities are pooled by, and from which of the queries on."""
    retention = spec.layout.retention
    assert isinstance(retention, Scored)
    counted = "0"
    if retention.score == "last":
        counted = "queries - 1"
    elif retention.rows:
        counted = f"std::max<int64_t>(queries - {retention.rows}, 0)"
    shared = spec.num_qo_heads // spec.units
    factor = real(float(np.float32(1 / shared))) if retention.pooling == "mean" else "1.0f"
    # The largest share of heads of several KV heads is known where all of them are met together.
    keeps = retention.pooling != "max" or spec.units == spec.num_kv_heads
    kept = {"kept_rows": _KEPT_ROWS, "most_kept": _MOST_KEPT, "most_sums": _MOST_KEPT_SUMS}
    return {"pooling": retention.pooling, "factor": factor, "counted": counted, "keeps": keeps, **kept}


def _visible(site: SiteSpec) -> list[tuple[str, str, str]]:
    """What a query must meet to see a key, as `kernels/reference/visibility.py`; each in three forms.

    The first asks a query at `query` of a key at `key`. The second says whether it holds for all queries from `low` to
    `high` and all keys from `keys.least` to `keys.most`, the third whether it does for none.
    """
    mask, retention = site.mask, site.layout.retention
    found = [("key <= query", "keys.most <= low", "keys.least > high")]
    if mask.kind == "chunked":
        size = mask.window
        same = f"keys.least / {size} == high / {size} && keys.most / {size} == low / {size}"
        found.append((f"key / {size} == query / {size}", same, f"keys.most / {size} < low / {size}"))
    elif mask.window is not None:
        found.append(_window(mask.window, 0))
    if retention.window is not None:
        found.append(_window(retention.window, retention.sinks))
    found += [
        (printed(shown, {sy.query: "query", sy.key: "key"}), "false", "false") for shown in retention.shown
    ]
    return found


def _window(size: int, sinks: int) -> tuple[str, str, str]:
    recent, every, none = f"key > query - {size}", f"keys.least > high - {size}", f"keys.most <= low - {size}"
    if not sinks:
        return recent, every, none
    return (
        f"({recent} || key < {sinks})",
        f"({every} || keys.most < {sinks})",
        f"({none} && keys.least >= {sinks})",
    )
