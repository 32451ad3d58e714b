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
| decoded | k_out and v_out are what is read of the codes instead, once more in the model's dtype |
| arrivals | zeros are written to an array [B, Hq], by which programs of a decode step count themselves |
| prefixes | what sequences have in common is written to an array [B, 4], for bundles of block_m (`common_pages.py`) |
| full | rows in full are written as well: tokens that stay |
| only_full | nothing but the rows in full |
| staged | the slot of a token is its place in the call: an array of the call's tokens alone |
| packed | the tokens of all sequences stand in one row (`kernels/triton/packed.py`), and in one of that array |
| in_basis | k and v are k_out and v_out of another launch |
| interpreted | for Triton's interpreter |

Groups of tokens (a scale per channel) are written by role group; of them, this writes the rows in full.

Of a retention by scores, one token takes the slot that scores say (`retention/evict.py`): the program that finds it
writes there the keys and the values of all heads that share the slot, and notes the token. No other program of the
launch reads or writes the notes of these heads, or their slots.

spec.block_n: tokens of a program, all of one head; of one token, heads (of queries, of keys, of values).
spec.block_m: with option prefixes, sequences of a bundle; where a slot is found, slots that are looked at at once.
Launch: grid(spec, batch, tokens); buffers as the layout has them (fp8 as uint8 where spec.fp8 is "bits"); `slots` int32
[B, Hs, S] for many tokens of a retention by scores, -1: nowhere.
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
from kvcompile.kernels.triton.retention import evict
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.supports import unsupported
from kvcompile.specs import RotaryForm

OPTIONS = {
    *("one", "rope", "rope_q", "capped", "based", "q_out", "k_out", "v_out"),
    *("full", "only_full", "staged", "packed", "in_basis", "interpreted", "arrivals", "prefixes", "decoded"),
}
_ELEMENTS = 2048  # of a tile of many tokens
_MOST_HEADS, _OF_HEADS = 8, 1024  # of a tile of one token: heads, and elements
# Programs of one head each that a multiprocessor takes at once: of more, some would wait for others to end, and each
# waits for its position, then for cosines and sines, then for what it has read.
PLACES = 32
_COMMON = "pages in common"


@dataclass(frozen=True)
class Work:
    """What some programs do. rows: heads that each takes, of `heads`; lines: for the heads `head`"""

    title: str
    heads: int
    lines: tuple[str, ...]
    rows: int = 1

    @property
    def programs(self) -> int:
        return -(-self.heads // self.rows)


@dataclass(frozen=True)
class Branch:
    """The work of programs. before: programs of other work that come first"""

    work: Work
    before: int

    @property
    def title(self) -> str:
        return self.work.title

    @property
    def end(self) -> int:
        return self.before + self.work.programs

    @property
    def lines(self) -> tuple[str, ...]:
        own, rows = f"work - {self.before}" if self.before else "work", self.work.rows
        if rows == 1:
            return (f"head = {own}", *self.work.lines)
        own = f"({own})" if self.before else own
        there = (f"there = head < {self.work.heads}",) if self.work.heads % rows else ()
        return (f"head = {own} * {rows} + tl.arange(0, {rows})", *there, *self.work.lines)

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
    for work in works(spec):
        branches.append(Branch(work, branches[-1].end if branches else 0))
    lines = [line for branch in branches for line in branch.lines]
    params = _params(spec)
    text = rendered(
        "append.py.jinja",
        params=params,
        rows=1 if _has(spec, "one") else spec.block_n,
        heads=spec.block_n if _has(spec, "one") else 1,
        title=_title(spec, [branch.title for branch in branches if branch.title != _COMMON]),
        branches=branches,
        functions=_functions(spec),
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


def _functions(spec: KernelSpec) -> list[str]:
    """The functions of a kernel's file that the programs of append call."""
    found = [common_pages.compare(spec)] if _has(spec, "prefixes") else []
    return [*found, evict.function(spec)] if slots.evicts(spec) else found


def grid(spec: KernelSpec, batch: int, tokens: int) -> tuple[int, int, int]:
    tiles = 1 if _has(spec, "one") else -(-tokens // spec.block_n)
    return tiles, sum(work.programs for work in works(spec)), batch


def block_n(head_dim: int, v_head_dim: int, one: bool) -> int:
    """Tokens of a tile: with wide vectors fewer."""
    return 1 if one else max(1, min(64, _ELEMENTS // power_of_two(max(head_dim, v_head_dim))))


def heads(head_dim: int, v_head_dim: int) -> int:
    """Heads of a tile of one token, where it has several."""
    return max(1, min(_MOST_HEADS, _OF_HEADS // power_of_two(max(head_dim, v_head_dim))))


def elements(spec: KernelSpec) -> int:
    """Numbers that the warps of a program share out; of several heads half of them, as all turn by the same angles."""
    width = power_of_two(max(spec.head_dim, spec.v_head_dim))
    if not _has(spec, "one"):
        return spec.block_n * width
    rows = max(work.rows for work in works(spec))
    return max(rows * width // min(rows, 2), spec.block_m if slots.evicts(spec) else 0)


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


def works(spec: KernelSpec) -> list[Work]:
    """What programs do."""
    found = []
    if slots.evicts(spec):
        found.append(_evicting(spec))
    if _has(spec, "q_out"):
        rows = _rows(spec, spec.num_qo_heads)
        found.append(Work("queries", spec.num_qo_heads, tuple(_query(spec, rows)), rows))
    for side in () if slots.evicts(spec) else sides(spec):
        rows = _rows(spec, spec.num_kv_heads)
        lines = (*_new(spec, side, rows), *_written(spec, side, rows))
        found.append(Work(side.name, spec.num_kv_heads, lines, rows))
    if _has(spec, "prefixes"):
        found.append(Work(_COMMON, 1, (common_pages.call(),)))
    return found


def _rows(spec: KernelSpec, heads: int) -> int:
    """Of `heads`, how many a program takes."""
    return min(spec.block_n, power_of_two(heads)) if _has(spec, "one") else 1


def _evicting(spec: KernelSpec) -> Work:
    """Keys and values of the heads that share a slot, which is found between: new vectors do not wait for it."""
    shared = spec.num_kv_heads // spec.score_heads
    rows, own = power_of_two(shared), sides(spec)
    lines: list[str] = []
    for side in own:
        lines += [*_new(spec, side, rows), f"{side.name} = x"]
    lines += evict.call(spec)
    for side in own:
        lines += [f"x = {side.name}", f"c = tl.arange(0, {power_of_two(side.dim)})[None, :]"]
        lines += _written(spec, side, rows)
    return Work(" and ".join(side.name for side in own), spec.num_kv_heads, tuple(lines), rows)


def _vectors(tile: Tile, name: str, at_once: bool = False) -> list[str]:
    """Statements that read the new vectors called `name`; padding is zeros.

    at_once: before it is known what is padding, whose vectors are read as well
    """
    lines = [
        f"c = tl.arange(0, {tile.width})[None, :]",
        f"row = {tile.row(name)}",
    ]
    real = f"{tile.among('real')}[:, None]"
    if at_once:
        real = "there[:, None]" if tile.surplus else ""
    guard = " & ".join(part for part in (real, f"(c < {tile.dim})" if tile.padded else "") if part)
    mask = f", mask={guard}, other=0.0" if guard else ""
    return [*lines, f"x = tl.load(row + c{mask}).to(tl.float32)"]


def _output(tile: Tile, name: str, value: str) -> list[str]:
    inside = f"{tile.among('inside')}[:, None]"
    guard = f"{inside} & (c < {tile.dim})" if tile.padded else inside
    return [f"out = {tile.row(name)}", f"tl.store(out + c, {value}, mask={guard})"]


def _tile(spec: KernelSpec, side: Side, rows: int, heads: int) -> Tile:
    """A tile of tokens of one head, or of `rows` of the heads of one token."""
    if not _has(spec, "one"):
        return side.tile(spec, spec.block_n)
    return side.tile(spec, rows, heads if rows > 1 else 0)


def _query(spec: KernelSpec, rows: int) -> list[str]:
    keys = sides(spec)[0]
    tile = _tile(spec, keys, rows, spec.num_qo_heads)
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


def _new(spec: KernelSpec, side: Side, rows: int) -> list[str]:
    """Statements that make new keys, or values, as they are kept: `x`."""
    tile = _tile(spec, side, rows, spec.num_kv_heads)
    lines = _vectors(tile, side.letter, slots.evicts(spec) and not _has(spec, f"{side.letter}_out"))
    if not _has(spec, "in_basis"):
        if side.letter == "k" and _has(spec, "rope") and (form := _form(spec)):
            lines += [*transform.partners(form, tile), *transform.apply_rope(form, tile, "row", "pos")]
        if side.turned:
            lines.append(transform.apply_hadamard(tile))
            if not _wide(spec, side):
                lines.append(f"x = {transform.rounded('x', tile)}")
    if _has(spec, f"{side.letter}_out") and not _has(spec, "decoded"):
        lines += _output(tile, f"{side.letter}_out", stored("x", tile.dtype, tile.interpreted))
    return lines


def _wide(spec: KernelSpec, side: Side) -> bool:
    """Whether vectors that a rotation turned are encoded as they are: not rounded to the model's dtype before."""
    turned = side.turned and not _has(spec, "in_basis")
    return turned and not (side.in_full or side.settled.code == "model")


def _written(spec: KernelSpec, side: Side, rows: int) -> list[str]:
    """Statements that write `x` to the rows and slots of its tokens."""
    tile = _tile(spec, side, rows, spec.num_kv_heads)
    lines: list[str] = []
    parts = {part.name.removeprefix(f"{side.name}_"): part for part in side.params(spec)}
    one = _has(spec, "one")
    if _has(spec, "full", "only_full") and side.in_full:
        lines += append_residual.written(side, parts["full"], tile, one)
    if side.grouped or _has(spec, "only_full"):
        return lines
    kept = replace(tile, dtype="float32") if _wide(spec, side) else tile
    becomes = encoded(side.settled, spec.dtype, kept)
    lines += [*slots.of_tokens(spec, tile), *becomes.lines]
    if _has(spec, "decoded"):
        lines += _output(tile, f"{side.letter}_out", stored(becomes.decoded, tile.dtype, tile.interpreted))
    where = slots.first(spec)
    for value in becomes.stores:
        lines += store(parts[value.part], value, where, "slot", "kept", tile)
    return lines
