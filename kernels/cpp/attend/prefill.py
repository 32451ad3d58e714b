"""Role prefill: many queries a sequence against decoded keys and values; `templates/prefill.cpp.jinja`.

Blocks of queries meet blocks of keys: products in registers, a softmax so far for each query, as in FlashAttention-2
(Dao 2023). Blocks of which a query sees nothing are left out. What the layout says beyond who sees whom is not the
kernel's: one kernel is for many layouts.

With the option `columns` it also sums up what retention by scores needs (`kernels/reference/score_sums.py`): when the
sum below each query's probabilities is known, blocks of keys meet the queries that count once more.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvcompile.kernels.cpp.attend.bias import bias_text
from kvcompile.kernels.cpp.attend.values import MODELS
from kvcompile.kernels.cpp.render import real, rendered
from kvcompile.kernels.cpp.spec import CppSpec
from kvcompile.kernels.cpp.symbolic import printed
from kvcompile.kernels.spec import SiteSpec
from kvcompile.layouts import CacheLayout, Contiguous, Scored, SinkWindow, Slots
from kvcompile.layouts import symbols as sy

TENSORS = ("OUT", "Q", "K", "V", "PLACES", "POSITIONS", "SINKS", "BIAS", "ALLOWED")  # and one more of some
COLUMNS = "columns"
_ROWS = 384  # of queries that meet a block of keys: packing it costs a few hundredths of their products
_SUMS = 1 << 16  # floats of their sums, at most: these stay in a core's second cache


def site_of(site: SiteSpec) -> SiteSpec:
    """What of a site the kernel depends on."""
    retention = site.layout.retention
    layout = CacheLayout(
        placement=Slots() if retention.by_score else Contiguous(),
        retention=retention,
        before_rope=site.layout.before_rope and retention.in_cache,
    )
    return replace(site, layout=layout, rotary=None, share="none", kernels="cpp")


def generate(spec: CppSpec) -> str:
    """The kernel's text."""
    site = spec.site
    score, group = site.score, spec.num_qo_heads // spec.num_kv_heads
    rows = min(_ROWS, _SUMS // spec.v_head_dim)
    seen = _visible(site)
    columns = COLUMNS in spec.options
    return rendered(
        "prefill.cpp.jinja",
        spec=spec,
        columns=columns,
        **(_sums(spec) if columns else {}),
        model=MODELS[spec.torch_dtype],
        sm_scale=real(float(np.float32(site.sm_scale))),
        tensors=(*TENSORS, "COLUMNS" if columns else "NEAR"),
        near=_near(site),
        tokens=max(1, rows // group),
        sees=" && ".join(sees for sees, _, _ in seen),
        all_seen=" && ".join(every for _, every, _ in seen),
        none_seen=" || ".join(none for _, _, none in seen),
        softcap=None if score.softcap is None else real(score.softcap),
        bias=None if score.bias is None else bias_text(score.bias, "of"),
        sinks=score.sinks,
    )


def _near(site: SiteSpec) -> SinkWindow | None:
    """The retention, where first tokens stand nearer to queries than their positions say."""
    retention = site.layout.retention
    return retention if isinstance(retention, SinkWindow) and retention.in_cache else None


def _sums(spec: CppSpec) -> dict[str, str]:
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
    return {"pooling": retention.pooling, "factor": factor, "counted": counted}


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
