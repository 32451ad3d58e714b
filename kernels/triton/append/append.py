"""Role append: new tokens into the cache, one launch a layer.

For every new token and head: RoPE on q and k, the Hadamard rotation of storages that turn, the encoding of the storage,
and the slot that the layout's address says. Padding (negative positions) is written nowhere; where it has a row in
an output, that is zeros.

| option | means |
|---|---|
| one | one token a sequence, else many: of a ring (and of rows in full) only those that stay are written |
| rope | q and k come before RoPE, which is done first, at their positions |
| rope_q | q alone comes before RoPE: keys are kept so |
| capped | q turns at min(position, budget - 1): its place in a cache that counts positions (`retention.in_cache`) |
| based | q turns at position - max(tokens before - budget, 0): the same for many tokens |
| q_out | q [B, Hq, S, D] is transformed: by RoPE, and as the keys' storage turns; float32 where that is `one` |
| k_out, v_out | k, v as they are kept and before they are encoded, in the model's dtype |
| arrivals | zeros are written to an array [B, Hq], by which programs of a decode step count themselves |
| prefixes | what sequences have in common is written to an array [B, 4], for bundles of block_m (`common_pages.py`) |
| full | rows in full are written as well: tokens that stay |
| only_full | nothing but the rows in full |
| staged | the slot of a token is its place in the call: an array of the call's tokens alone |
| packed | the tokens of all sequences stand in one row (`kernels/triton/packed.py`), those of that array as well |
| in_basis | k and v are k_out and v_out of another launch |
| interpreted | for Triton's interpreter |

Groups of tokens (a scale per channel) are written by role group; of them, this writes the rows in full.

Launch: grid(spec, batch, tokens); buffers as the layout has them (fp8 as uint8 where spec.fp8 is "bits"); `slots` int32
[B, Hs, S] for a retention by scores, -1: nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcompile.kernels.triton import packed
from kvcompile.kernels.triton.append import common_pages, slots, transform
from kvcompile.kernels.triton.append import residual as append_residual
from kvcompile.kernels.triton.append.encode import Tile, encoded
from kvcompile.kernels.triton.append.encode.tile import power_of_two
from kvcompile.kernels.triton.append.operands import Side, sides, store
from kvcompile.kernels.triton.attend.cascade import PREFIXES
from kvcompile.kernels.triton.helpers import module, stored
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.supports import unsupported
from kvcompile.specs import RotaryForm

OPTIONS = {
    *("one", "rope", "rope_q", "capped", "based", "q_out", "k_out", "v_out"),
    *("full", "only_full", "staged", "packed", "in_basis", "interpreted", "arrivals", "prefixes"),
}
_ELEMENTS = 2048  # of a tile of many tokens
_COMMON = "pages in common"


@dataclass(frozen=True)
class Branch:
    """What the programs of some heads do. heads: before its own; lines: where `head` counts from 0 among its own."""

    title: str
    before: int
    heads: int
    lines: tuple[str, ...]

    @property
    def end(self) -> int:
        return self.before + self.heads

    @property
    def condition(self) -> str:
        below = f"work < {self.end}"
        return f"(work >= {self.before}) & ({below})" if self.before else below


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of a spec of role append.

    Raises:
        ValueError: the spec has options that no append has, or a layout that none writes.
    """
    reason = unsupported(spec.layout, spec.torch_dtype)
    if reason is not None:
        raise ValueError(reason)
    if unknown := set(spec.options) - OPTIONS:
        raise ValueError(f"append knows no options {sorted(unknown)}")
    branches: list[Branch] = []
    for title, heads, lines in _branches(spec):
        branches.append(Branch(title, branches[-1].end if branches else 0, heads, tuple(lines)))
    lines = [line for branch in branches for line in branch.lines]
    params = _params(spec)
    text = rendered(
        "append.py.jinja",
        params=params,
        rows=spec.block_n,
        title=_title(spec, [branch.title for branch in branches if branch.title != _COMMON]),
        branches=branches,
        compare=common_pages.compare(spec) if _has(spec, "prefixes") else "",
        needs_last=any("last - " in line for line in lines),
        needs_start=_has(spec, "based"),
        counts=spec.num_qo_heads if _has(spec, "arrivals") else 0,
        wide=power_of_two(spec.num_qo_heads),
        packed=packed.prologue(params, f"tl.program_id(0) * {spec.block_n} >= tokens", of_row(spec))
        if _has(spec, packed.OPTION)
        else [],
    )
    return KernelSource("append", params, module(text))


def of_row(spec: KernelSpec) -> tuple[str, ...]:
    """Names of the parts that have a row of the call's tokens: of an array of these, but what is each sequence's."""
    if not _has(spec, "staged"):
        return ()
    dtype = spec.torch_dtype
    return tuple(
        f"{side.name}_{part.name}"
        for side in sides(spec)
        for part in side.storage.parts(side.dim, dtype)
        if not part.fixed
    )


def grid(spec: KernelSpec, batch: int, tokens: int) -> tuple[int, int, int]:
    return -(-tokens // spec.block_n), sum(heads for _, heads, _ in _branches(spec)), batch


def block_n(head_dim: int, v_head_dim: int, one: bool) -> int:
    """Tokens of a tile: with wide vectors fewer."""
    return 1 if one else max(1, min(64, _ELEMENTS // power_of_two(max(head_dim, v_head_dim))))


def _has(spec: KernelSpec, *options: str) -> bool:
    return any(option in spec.options for option in options)


def _form(spec: KernelSpec) -> RotaryForm | None:
    if not _has(spec, "rope", "rope_q"):
        return None
    return spec.site.rotary or RotaryForm("half", 0, spec.head_dim)


def _title(spec: KernelSpec, work: list[str]) -> str:
    what = "Rows in full of new" if _has(spec, "only_full") else "New"
    return f"{what} {', '.join(work)}: {spec.layout}."


def _params(spec: KernelSpec) -> tuple[Param, ...]:
    """q, k, v, their outputs, the parts of the cache, and what says where tokens stand."""
    own = sides(spec)
    dtype = spec.torch_dtype
    found: list[Param] = []
    if _has(spec, "q_out"):
        out = torch.float32 if _wide_q(spec) else dtype
        found += [TensorParam("q", dtype, 4), TensorParam("q_out", out, 4)]
    for side in own:
        found.append(TensorParam(side.letter, dtype, 4))
        if _has(spec, f"{side.letter}_out"):
            found.append(TensorParam(f"{side.letter}_out", dtype, 4))
    for side in own:
        found += [part for part in side.params(spec) if _touched(spec, side, part)]
    found.append(TensorParam("positions", torch.int64, 2))
    found += transform.tables() if _form(spec) else ()
    found += [] if _has(spec, "only_full") else slots.params(spec)
    found += [TensorParam("arrivals", torch.int32)] if _has(spec, "arrivals") else []
    found += [PREFIXES] if _has(spec, "prefixes") else []
    if _has(spec, packed.OPTION):
        return (*found, packed.STARTS)
    return (*found, ScalarParam("tokens"))


def _touched(spec: KernelSpec, side: Side, part: TensorParam) -> bool:
    if part.name.endswith("_full"):
        return _has(spec, "full", "only_full")
    return not (side.grouped or _has(spec, "only_full"))


def _wide_q(spec: KernelSpec) -> bool:
    """A decode step attends in float32: queries that a rotation turned are not rounded before."""
    return _has(spec, "one") and spec.layout.keys.hadamard and not _has(spec, "rope_q")


def _branches(spec: KernelSpec) -> list[tuple[str, int, list[str]]]:
    """What programs do: title, how many heads do it, and the statements."""
    found = []
    if _has(spec, "q_out"):
        found.append(("queries", spec.num_qo_heads, _query(spec)))
    for side in sides(spec):
        lines = _new(spec, side)
        found.append((side.name, spec.num_kv_heads, lines))
    if _has(spec, "prefixes"):
        found.append((_COMMON, 1, [common_pages.call()]))
    return found


def _vectors(tile: Tile, name: str) -> list[str]:
    """Statements that read the new vectors called `name`; padding is zeros."""
    lines = [
        f"c = tl.arange(0, {tile.width})[None, :]",
        f"row = {name}_ptr + batch * {name}_s0 + head * {name}_s1 + token[:, None] * {name}_s2",
    ]
    guard = f"real[:, None] & (c < {tile.dim})" if tile.padded else "real[:, None]"
    return [*lines, f"x = tl.load(row + c, mask={guard}, other=0.0).to(tl.float32)"]


def _output(tile: Tile, name: str, value: str) -> list[str]:
    at = f"{name}_ptr + batch * {name}_s0 + head * {name}_s1 + token[:, None] * {name}_s2"
    guard = f"inside[:, None] & (c < {tile.dim})" if tile.padded else "inside[:, None]"
    return [f"out = {at}", f"tl.store(out + c, {value}, mask={guard})"]


def _query(spec: KernelSpec) -> list[str]:
    keys = sides(spec)[0]
    tile = keys.tile(spec, spec.block_n)
    lines = _vectors(tile, "q")
    if form := _form(spec):
        lines += [*transform.partners(form, tile), *transform.apply_rope(form, tile, "row", _place(spec))]
    # Keys that turn when they are read turn back before: queries meet them as the model has them.
    if keys.turned and not _has(spec, "rope_q"):
        lines.append(transform.apply_hadamard(tile))
    value = "x" if _wide_q(spec) else stored("x", tile.dtype, tile.interpreted)
    return [*lines, *_output(tile, "q_out", value)]


def _place(spec: KernelSpec) -> str:
    budget = spec.layout.retention.budget()
    if _has(spec, "capped"):
        return f"tl.minimum(pos, {int(budget) - 1})"
    if _has(spec, "based"):
        return f"pos - tl.maximum(start - {int(budget)}, 0)"
    return "pos"


def _new(spec: KernelSpec, side: Side) -> list[str]:
    """What is done with new keys, or values."""
    tile = side.tile(spec, spec.block_n)
    lines = _vectors(tile, side.letter)
    kept = tile
    if not _has(spec, "in_basis"):
        if side.letter == "k" and _has(spec, "rope") and (form := _form(spec)):
            lines += [*transform.partners(form, tile), *transform.apply_rope(form, tile, "row", "pos")]
        if side.turned:
            lines.append(transform.apply_hadamard(tile))
            if side.in_full or side.settled.code == "model":
                lines.append(f"x = {transform.rounded('x', tile)}")
            else:
                kept = replace(tile, dtype="float32")
    if _has(spec, f"{side.letter}_out"):
        lines += _output(tile, f"{side.letter}_out", stored("x", tile.dtype, tile.interpreted))
    parts = {part.name.removeprefix(f"{side.name}_"): part for part in side.params(spec)}
    one = _has(spec, "one")
    if _has(spec, "full", "only_full") and side.in_full:
        lines += append_residual.written(side, parts["full"], tile, one)
    if side.grouped or _has(spec, "only_full"):
        return lines
    becomes = encoded(side.settled, spec.dtype, kept)
    lines += [*slots.of_tokens(spec, one), *becomes.lines]
    where = slots.first(spec)
    for value in becomes.stores:
        lines += store(parts[value.part], value, where, "slot", "kept", tile.width)
    return lines
