"""Role decode: the new token of each sequence takes its slot, and its queries attend; `templates/decode.cpp.jinja`.

One parallel region does all of it. Workers take units of heads first (the token is rotated, encoded and written), then
pieces of a head's slots, of which each is a softmax so far and a weighed sum; who finishes a head's last piece joins
them. Options: "chosen": only the slots that a selection names are read.
"""

from __future__ import annotations

import numpy as np

from kvcompile.kernels.cpp.attend.expression import leaves_of
from kvcompile.kernels.cpp.attend.side import paired_sums, side_text
from kvcompile.kernels.cpp.attend.slots import lowest, notes_weights, slots_text
from kvcompile.kernels.cpp.attend.values import MODELS
from kvcompile.kernels.cpp.render import real, rendered
from kvcompile.kernels.cpp.spec import WIDE, CppSpec
from kvcompile.kernels.cpp.symbolic import printed
from kvcompile.layouts import symbols as sy
from kvcompile.layouts.storage.hadamard import block

# The tensors of a call, in order; behind them come those that the site's expression reads, and the parts of the cache.
TENSORS = ("OUT", "Q", "K", "V", "POSITIONS", "SINKS", "BIAS", "PAGE_TABLE", "COS", "SIN", "CHOSEN")


def weighed(spec: CppSpec) -> int:
    """Channels of what is weighed: those of a key, where values are the first channels of keys that are turned."""
    layout = spec.layout
    return spec.head_dim if layout.in_keys and layout.keys.hadamard else spec.v_head_dim


def generate(spec: CppSpec) -> str:
    """The kernel's text."""
    site, layout = spec.site, spec.layout
    rotary, retention = site.rotary, layout.retention
    on_read = rotary is not None and layout.rotates_on_read
    score = site.score
    places = score.bias is not None or score.mod is not None or on_read
    finishes = score.softcap is not None or score.bias is not None or score.mod is not None
    out_turned = spec.head_dim if layout.in_keys and layout.keys.hadamard else 0
    if not layout.in_keys and layout.values.hadamard:
        out_turned = spec.v_head_dim
    query_place = "state.query(at.batch)"
    if retention.in_cache:
        query_place = f"std::min<int64_t>({query_place}, {int(retention.budget()) - 1})"
    sides = [side_text(spec, "keys", on_read)]
    if not layout.in_keys:
        sides.append(side_text(spec, "values", on_read))
    return rendered(
        "decode.cpp.jinja",
        spec=spec,
        layout=layout,
        none=None,
        model=MODELS[spec.torch_dtype],
        weighed=weighed(spec),
        sm_scale=real(float(np.float32(site.sm_scale))),
        tensors=[*TENSORS, *leaves_of(score.mod), *parts_of(spec)],
        units=spec.units,
        together=spec.together,
        planes=2 if spec.dtype == "bfloat16" else 3,
        rotary=rotary,
        halves="true" if rotary is not None and rotary.style == "half" else "false",
        on_read=on_read,
        turns_now=site.rotates_on_append,
        scored=retention.by_score,
        noted=notes_weights(spec),
        wide=WIDE in spec.options,
        address=printed(layout.address, {sy.pos: "token"}) if not retention.by_score else "",
        query_place=query_place,
        hadamard_keys=block(spec.head_dim) if layout.keys.hadamard and not on_read else 0,
        hadamard_out=block(out_turned) if out_turned else 0,
        sinks=score.sinks,
        empty_rows=score.mod is not None and score.mod.empty_rows,
        expression=score.mod is not None,
        finishes=finishes,
        paired_sums=paired_sums(spec, on_read),
        writes=site.share in ("none", "first"),
        skips="chosen" not in spec.options and lowest(spec, "query") is not None,
        slots=slots_text(spec, places, finishes, query_place.replace("state.query(at.batch)", "length - 1")),
        sides=sides,
    )


def parts_of(spec: CppSpec) -> list[str]:
    """The names of the parts of the cache, as the kernel has them."""
    layout = spec.layout
    found = [f"KEYS_{part.name.upper()}" for part in layout.keys.parts(spec.head_dim, spec.torch_dtype)]
    if not layout.in_keys:
        found += [
            f"VALUES_{part.name.upper()}" for part in layout.values.parts(spec.v_head_dim, spec.torch_dtype)
        ]
    return [*found, *(["TOKEN", "SCORE"] if layout.retention.by_score else [])]
