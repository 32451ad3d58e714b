"""Attention over slots: the roles decode (one query per sequence, a share of the slots) and prefill (many queries).

    s = f(q k)    p = 2^(s - top)    total = sum p    acc = sum p v      over tiles of slots, top the running maximum

The query heads of a group are rows of one product with a key (GQA-packed); of many queries, all of a tile's. Decode is
split over programs (flash decoding, Dao et al. 2023): each writes acc, top and total of its share of the tiles, and
`combine` joins them. Its grid depends on no length: a program reads its sequence's length and takes its share.

Options of the two roles
    logits        decode: scores in base 2 are stored, [B, Hkv, group, slots] float32, for `score`
    lse           prefill: the log-sum-exp in base 2 of each query is stored, [B, Hq, tokens] float32, for `columns`
    new           prefill: the new tokens are not in the slots; they come as a source of their own
    interpreted   see `dots.py`
    one_bias      the site's bias has one head
    q_fp32        queries come in float32

Keys that are stored before RoPE (`layout.rotates_on_read`) turn when they are read; queries come turned, and once more
as `q_sinks` where they turn at other places toward sinks (`places.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompile.kernels.triton import dots, helpers, places, scores, seen
from kvcompile.kernels.triton.combine import weighed
from kvcompile.kernels.triton.full import InFull
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.pieces import between, in_pairs, paired
from kvcompile.kernels.triton.read import Reader, edges, reader, settled
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.rows import Source
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.kernels.triton.symbolic import printed
from kvcompile.kernels.triton.tidy import tidy
from kvcompile.kernels.triton.values import Values
from kvcompile.layouts import Contiguous, InKeys, Paged, PerChannel, Ring, Scored
from kvcompile.layouts import symbols as sy
from kvcompile.types import RotaryForm


@dataclass(frozen=True)
class Attend:
    """What both roles are made of."""

    spec: KernelSpec

    # ---- who

    @property
    def many(self) -> bool:
        return self.spec.role != "decode"

    @property
    def has(self) -> frozenset[str]:
        return frozenset(self.spec.options)

    @property
    def logical(self) -> Contiguous | Ring | object:
        placement = self.spec.layout.placement
        if isinstance(placement, Paged):
            return placement.logical(self.spec.layout.retention)
        return placement

    @property
    def ordered(self) -> bool:
        return isinstance(self.logical, Contiguous)

    @property
    def rotary(self) -> RotaryForm | None:
        """How keys turn when they are read, or None."""
        return self.spec.site.rotary if self.spec.layout.rotates_on_read else None

    @property
    def two_queries(self) -> bool:
        return self.rotary is not None and places.two_queries(self.spec, self.many)

    @property
    def keys(self) -> Reader:
        spec, form = self.spec, self.rotary
        if form:
            pieces = in_pairs(spec.head_dim, form.start, form.rotary_dim, form.style == "interleaved")
            return reader(spec, "keys", pieces, elementwise=True)
        if not isinstance(spec.layout.values, InKeys):
            return reader(spec, "keys")
        kept = settled(spec.layout.keys)
        pieces = between(spec.head_dim, [*edges(kept, spec.head_dim), weighed(spec)])
        # What a scale per channel is folded into would be the queries, not the probabilities.
        return reader(spec, "keys", pieces, elementwise=isinstance(kept, PerChannel))

    @property
    def values(self) -> Values:
        in_keys = isinstance(self.spec.layout.values, InKeys)
        own = None if in_keys else reader(self.spec, "values")
        return Values(self.keys, own, weighed(self.spec))

    def full(self, side: str) -> InFull | None:
        """K's or V's rows in full; of values in the keys, the keys' (their own are the keys')."""
        layout = self.spec.layout
        storage = layout.keys if side == "keys" else layout.values
        if isinstance(storage, InKeys) or not (storage.residual or storage.sinks):
            return None
        of = self.keys if side == "keys" else self.values.of
        return InFull(self.spec, side, of.dim, of.pieces, self.many)

    @property
    def mixed(self) -> bool:
        return self.full("keys") is not None or self.full("values") is not None

    # ---- sources

    @property
    def cache(self) -> Source:
        placement, layout = self.spec.layout.placement, self.spec.layout
        size = placement.page_size if isinstance(placement, Paged) else 0
        slots = "slots" if self.ordered else str(layout.slots(None))
        return Source("", slots, self.spec.num_kv_heads, self.spec.block_n, size)

    @property
    def new(self) -> Source:
        return Source("new_", "tokens", self.spec.num_kv_heads, self.spec.block_n)

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.cache, self.new) if "new" in self.has else (self.cache,)

    @property
    def readers(self) -> tuple[Reader, ...]:
        own = self.values.reader
        return (self.keys,) if own is None else (self.keys, own)

    # ---- arguments

    def params(self) -> tuple[Param, ...]:
        spec = self.spec
        found: list[Param] = [TensorParam("q", self.q_dtype, 4)]
        for source in self.sources:
            found += source.params
            for part in self.readers:
                found += part.params(source)
        found.append(TensorParam("positions", torch.int64, 2))
        for side in ("keys", "values"):
            rows = self.full(side)
            found += rows.params if rows else ()
        found += scores.params(spec)
        if self.many:
            found += [TensorParam("sinks", torch.float32)] if spec.site.score.sinks else []
            found += [TensorParam("out", spec.torch_dtype), ScalarParam("tokens")]
            found += [TensorParam("lse", torch.float32)] if "lse" in self.has else []
        else:
            found += [TensorParam("partial", torch.float32), TensorParam("sums", torch.float32)]
            found += [TensorParam("logits", torch.float32)] if "logits" in self.has else []
        if self.needs_token:
            found.append(TensorParam("slots_token", torch.int32))
        if self.needs_place and isinstance(spec.layout.retention, Scored):
            found.append(TensorParam("slots_place", torch.int32))
        if self.two_queries:
            found.append(TensorParam("q_sinks", self.q_dtype, 4))
        if self.rotary:
            tables = [TensorParam(name, torch.float32) for name in ("cos", "sin")]
            found += [*tables, ScalarParam("table_rows")]
        unique: dict[str, Param] = {param.names[0]: param for param in found}
        return tuple(unique.values())

    @property
    def q_dtype(self) -> torch.dtype:
        return torch.float32 if "q_fp32" in self.has else self.spec.torch_dtype

    @property
    def needs_token(self) -> bool:
        return isinstance(self.spec.layout.retention, Scored) and (self.mixed or self.needs_key)

    @property
    def needs_key(self) -> bool:
        """Whether more than a mask asks where a key is."""
        return self.spec.site.score.bias is not None or self.rotary is not None

    @property
    def needs_place(self) -> bool:
        return self.needs_key and self.spec.layout.retention.in_cache

    # ---- before the loops

    def constants(self) -> list[str]:
        """Lines that define what no query and no tile changes."""
        lines = [line for part in self.readers for line in part.constants()]
        return [*lines, *places.prologue(self.spec, self.many)]

    def queries(self) -> list[str]:
        """Lines that load the queries' pieces and what belongs to them."""
        spec, keys = self.spec, self.keys
        lines: list[str] = []
        at = "batch * q_s0 + heads[:, None] * q_s1"
        at += " + token[:, None] * q_s2" if self.many else ""
        code = f"tl.{keys.dot}"
        normal = self.normalized
        rows = self.full("keys")
        loaded = []
        for index, piece in enumerate(keys.pieces):
            guard = "real[:, None]" + ("" if piece.whole else f" & (kc{index} < {piece.stop})")
            loaded.append(f"q{index} = tl.load(q_ptr + {at} + kc{index}, mask={guard}, other=0.0)")
            if self.two_queries:
                own = at.replace("q_s", "q_sinks_s")
                loaded.append(
                    f"q{index}_sinks = tl.load(q_sinks_ptr + {own} + kc{index}, mask={guard}, other=0.0)"
                )
        lines += loaded
        kind = f"tl.{dots.of_model(spec)}"
        if self.two_queries:
            lines += [f"q{index}_sinks = q{index}_sinks.to({kind})" for index in range(len(keys.pieces))]
        if rows:
            lines += [f"q{index}_full = q{index}.to({kind})" for index in range(len(keys.pieces))]
        every = range(len(keys.pieces))
        if normal:
            lines += [f"q{index} = q{index}.to(tl.float32)" for index in every]
            largest = "tl.max(tl.abs(q0), 1)"
            for index in every[1:]:
                largest = f"tl.maximum({largest}, tl.max(tl.abs(q{index}), 1))"
            lines.append(f"norm = tl.maximum({largest}, 1e-30)")
            lines += [f"q{index} = q{index} / norm[:, None]" for index in every]
            lines.append(f"row_scale = norm * {scores.factor(spec)!r}")
        for index, group in enumerate(keys.scales()):
            if group.minimum is not None:
                wide = "" if normal else ".to(tl.float32)"
                total = " + ".join(f"tl.sum(q{i}{wide}, 1)" for i in group.pieces)
                lines.append(f"q_sum{index} = {total}")
        if keys.folded:
            lines += [] if normal else [f"q{index} = q{index}.to(tl.float32)" for index in every]
        else:
            alike = str(self.q_dtype) == f"torch.{keys.dot}"
            lines += [f"q{index} = q{index}.to({code})" for index in every if normal or not alike]
        lines += scores.prologue(spec, self.names)
        return lines

    def fixed_scale(self, part: Reader) -> list[str]:
        """The line that loads the calibrated scale of a head's vectors, where there is one."""
        if not part.fixed_scale:
            return []
        return [
            f"{part.side}_scale = tl.load({part.side}_scale_ptr + batch * {self.spec.num_kv_heads} + head)"
        ]

    @property
    def normalized(self) -> bool:
        """Whether queries are divided by their largest channel, since float16 may not hold them."""
        return self.keys.dot == "float16" and self.q_dtype != torch.float16

    @property
    def names(self) -> dict[str, str]:
        return {"heads": "heads", "real": "real", **places.names(self.spec, self.many)}

    # ---- the tiles

    def bounds(self, source: Source) -> seen.Bounds:
        spec = self.spec
        if source.prefix:
            return seen.ordered(spec, "first", "tokens", self.mixed)
        if self.ordered:
            return seen.ordered(spec, "0", "", self.mixed)
        slots = spec.layout.slots(None)
        before = "tl.maximum(first, 0)" if self.many else "tl.maximum(length, 0)"
        return seen.unordered(
            spec, f"tl.minimum({before}, {slots})", not self._position_masks(source) and not self.mixed
        )

    def _position_masks(self, source: Source) -> list[str]:
        query = "position[:, None]" if self.many else "position"
        key = "key[None, :]" if self.many else "key"
        spec = self.spec
        is_scored = isinstance(spec.layout.retention, Scored)
        if not self.ordered and not source.prefix and not self.many and spec.site.mask.window is None:
            return []  # a ring holds what its retention shows, once the new token is in it
        return seen.conditions(spec, query, key, causal=self.many and not (is_scored and not source.prefix))

    def tile(self, source: Source, masked: bool) -> list[str]:
        """Lines of one tile, `start` its first slot. masked: some slots are not seen, or read in full."""
        lines: list[str] = []
        mixed = masked and self.mixed
        if masked:
            lines.append(self.inside(source))
        if masked or self.needs_key:
            lines += self.key(source, masked)
        if self.needs_place:
            lines += places.of_keys(self.spec, bool(source.prefix), masked)
        lines += source.located([part.group for part in self.readers], masked)
        if mixed:
            for side in ("keys", "values"):
                rows = self.full(side)
                lines += [*rows.flags(), *rows.row_flags()] if rows else []
        lines += self.load(source, "keys", masked)
        lines += self.products(source, masked)
        lines += scores.after(self.spec, self.names, masked)
        if masked:
            lines.append(f's = tl.where({self.visible(source)}, s, float("-inf"))')
        if "logits" in self.has:
            row = f"((batch * {self.spec.num_kv_heads} + head) * {self.spec.group} + m[:, None]) * {source.slots}"
            guard = f"real[:, None] & (start + n < {source.slots})[None, :]"
            lines.append(f"tl.store(logits_ptr + {row} + (start + n)[None, :], s, mask={guard})")
        if self.values.reader is not None:
            lines += self.load(source, "values", masked)
        lines += self._softmax(masked)
        lines += self._weigh(masked)
        return lines

    def inside(self, source: Source) -> str:
        """The line that defines which slots of a tile hold tokens; new ones may begin with padding."""
        if source.prefix:
            return "inside = (start + n < end) & (start + n >= -first)"
        return "inside = start + n < end"

    def visible(self, source: Source) -> str:
        """An expression: which keys which queries see, broadcasts against [BLOCK_M, BLOCK_N]."""
        found = self._position_masks(source)
        if self.many:
            return " & ".join(["inside[None, :]", *found])
        return f"({' & '.join(['inside', *found])})[None, :]" if found else "inside[None, :]"

    def key(self, source: Source, masked: bool) -> list[str]:
        """Lines that define `key` [BLOCK_N], the positions of the tokens in the slots."""
        spec = self.spec
        if source.prefix:
            return ["key = first + start + n"]
        if self.ordered:
            return ["key = start + n"]
        if isinstance(spec.layout.retention, Scored):
            if not self.needs_token:
                return []
            heads = 1 if spec.layout.retention.granularity == "layer" else spec.num_kv_heads
            row = f"(batch * {heads} + {'0' if heads == 1 else 'head'}) * {spec.layout.slots(None)}"
            guard = ", mask=inside, other=-1" if masked else ""
            return [f"key = tl.load(slots_token_ptr + {row} + start + n{guard})"]
        length = "tl.maximum(first, 0)" if self.many else "length"
        return [f"key = {printed(spec.layout.token_at, {sy.slot: '(start + n)', sy.length: length})}"]

    def load(self, source: Source, side: str, masked: bool) -> list[str]:
        part = self.keys if side == "keys" else self.values.of
        rows = self.full(side) if masked else None
        lines: list[str] = []
        if rows:
            # The settled form of what is read in full may not be there yet.
            lines = ["every = inside", f"inside = {rows.settled_flag()}"]
        lines += part.load_scales(source, masked)
        if part.folded:
            lines += part.channel_scales(source)
        lines += part.load(source, masked)
        if rows:
            lines += ["inside = every", *rows.load()]
        if side == "keys" and self.rotary:
            lines += self._turned(self.rotary, ["", "_full"] if rows else [""], masked)
        return lines

    def _turned(self, form: RotaryForm, kinds: list[str], masked: bool) -> list[str]:
        """Lines that turn the keys, of all `kinds`, to their place (kernels/rope.py)."""
        place = "place" if self.spec.layout.retention.in_cache else "key"
        lines = [f"turn = (tl.minimum(tl.maximum({place}, 0), table_rows - 1) * {form.rotary_dim})[:, None]"]
        kind = f"tl.{self.keys.dot}"
        for a in range(0, paired(form.rotary_dim), 2):
            for index in (a, a + 1):
                channel = f"kc{index} - {form.start}" if form.start else f"kc{index}"
                whole = self.keys.pieces[index].whole
                guard = "" if whole else f", mask=kc{index} < {self.keys.pieces[index].stop}, other=0.0"
                lines += [f"{t}{index} = tl.load({t}_ptr + turn + {channel}{guard})" for t in ("cos", "sin")]
            for kept in kinds:
                one, other = f"k{a}{kept}", f"k{a + 1}{kept}"
                lines += [
                    f"a, b = {one}.to(tl.float32), {other}.to(tl.float32)",
                    f"{one} = (a * cos{a} - b * sin{a}).to({kind})",
                    f"{other} = (b * cos{a + 1} + a * sin{a + 1}).to({kind})",
                ]
        return lines

    def products(self, source: Source, masked: bool) -> list[str]:
        spec, keys = self.spec, self.keys
        lines: list[str] = []
        rows = self.full("keys") if masked else None
        precision = ', input_precision="ieee"' if keys.dot == "float32" else ""

        def dot(left: str, right: str, onto: str | None, precision: str = precision) -> str:
            return f"tl.dot({left}, tl.trans({right}){'' if onto is None else f', {onto}'}{precision})"

        for place, group in enumerate(keys.scales()):
            name = "s" if place == 0 else "t"
            for count, index in enumerate(group.pieces):
                left = f"q{index}"
                if keys.folded:
                    left = f"(q{index} * k_scale{index}).to(tl.{keys.dot})"
                lines.append(f"{name} = {dot(left, f'k{index}', name if count else None)}")
            if group.scale:
                lines.append(f"{name} = {name} * {group.scale}[None, :]")
            if group.minimum:
                lines.append(f"{name} = {name} + q_sum{place}[:, None] * {group.minimum}[None, :]")
            if place:
                lines.append("s = s + t")
        if keys.folded:
            zero = " + ".join(f"tl.sum(q{i} * k_minimum{i}, 1)" for i in range(len(keys.pieces)))
            lines.append(f"s = s + ({zero})[:, None]")
        factor = f"{scores.factor(spec)!r}"
        if keys.late_scale:
            factor = f"({factor} * keys_scale)"
        lines.append(
            f"s = s * row_scale[:, None]{' * keys_scale' if keys.late_scale else ''}"
            if self.normalized
            else f"s = s * {factor}"
        )
        if rows:
            kind = dots.of_model(spec)
            ieee = ', input_precision="ieee"' if kind == "float32" else ""
            for index in range(len(keys.pieces)):
                lines.append(f"f = {dot(f'q{index}_full', f'k{index}_full', 'f' if index else None, ieee)}")
            flag = rows.flag if self.many else f"{rows.flag}[None, :]"
            lines.append(f"s = tl.where({flag}, f * {scores.factor(spec)!r}, s)")
        if masked and self.two_queries:
            lines += self._toward_sinks(rows)
        return lines

    def _toward_sinks(self, rows: InFull | None) -> list[str]:
        """Lines that replace the scores of sinks by those of queries that turned at their place toward sinks."""
        ieee = ', input_precision="ieee"' if self.keys.dot == "float32" else ""
        lines = []
        for name, kind in (("f", ""), ("g", "_full"))[: 2 if rows else 1]:
            for index in range(len(self.keys.pieces)):
                onto = f", {name}" if index else ""
                lines.append(f"{name} = tl.dot(q{index}_sinks, tl.trans(k{index}{kind}){onto}{ieee})")
        if rows:
            lines.append(f"f = tl.where({rows.flag}, g, f)")
        sinks = self.spec.layout.retention.sinks
        lines.append(f"s = tl.where((key < {sinks})[None, :], f * {scores.factor(self.spec)!r}, s)")
        return lines

    def _softmax(self, masked: bool) -> list[str]:
        values = self.values
        lines = [
            "highest = tl.maximum(top, tl.max(s, 1))",
            "alpha = tl.exp2(top - highest)",
            "p = tl.exp2(s - highest[:, None])",
            "total = total * alpha + tl.sum(p, 1)",
            "top = highest",
        ]
        for place, group in enumerate(values.scales):
            if group.minimum:
                lines.append(f"minima{place} = minima{place} * alpha")
        if values.normalized:
            largest = f"tl.max({values.scales[0].scale}, 0)"
            for group in values.scales[1:]:
                largest = f"tl.maximum({largest}, tl.max({group.scale}, 0))"
            lines += [
                f"larger = tl.maximum(largest, {largest})",
                "alpha = alpha * (largest / larger)",
                "largest = larger",
                "unit = 1.0 / largest",
            ]
        lines += [f"acc{i} = acc{i} * alpha[:, None]" for i in values.indices]
        return lines

    def _weigh(self, masked: bool) -> list[str]:
        values = self.values
        rows = None
        if masked:
            rows = self.full("values") if values.reader else self.full("keys")
        lines: list[str] = []
        p = "p"
        if rows:
            flag = rows.flag if self.many else f"{rows.flag}[None, :]"
            lines += [f"p_full = tl.where({flag}, p, 0.0)", f"p = tl.where({flag}, 0.0, p)"]
        precision = ', input_precision="ieee"' if values.dot == "float32" else ""
        for place, group in enumerate(values.scales):
            if group.minimum:
                lines.append(f"minima{place} = minima{place} + tl.sum(p * {group.minimum}[None, :], 1)")
            weights = p
            if group.scale:
                scale = f"({group.scale} * unit)" if values.normalized else group.scale
                weights = f"(p * {scale}[None, :])"
            lines.append(f"w = {weights}.to(tl.{values.dot})")
            lines += [f"acc{i} = tl.dot(w, {values.name(i)}, acc{i}{precision})" for i in group.pieces]
        if rows:
            kind = dots.of_model(self.spec)
            ieee = ', input_precision="ieee"' if kind == "float32" else ""
            lines.append(f"w = p_full.to(tl.{kind})")
            for i in values.indices:
                unit = " * unit" if values.normalized else ""
                # What is scaled at the end must not scale these.
                unit += f" / {values.of.side}_scale" if values.of.late_scale else ""
                lines.append(f"acc{i} = acc{i} + tl.dot(w, {values.of.letter}{i}_full{ieee}){unit}")
        return lines

    # ---- after the loops

    def finish(self) -> list[str]:
        """Lines that make `acc*` the sums of p v, in true units."""
        values, lines = self.values, []
        for place, group in enumerate(values.scales):
            for i in group.pieces:
                own = f"acc{i}"
                if values.normalized:
                    own = f"{own} * largest"
                if group.minimum:
                    own = f"{own} + minima{place}[:, None]"
                if values.of.late_scale:
                    own = f"{own} * {values.of.side}_scale"
                if own != f"acc{i}":
                    lines.append(f"acc{i} = {own}")
        return lines

    def accumulators(self) -> list[str]:
        values, m = self.values, self.spec.block_m
        lines = [f"top = tl.full([{m}], -1.0e30, tl.float32)", f"total = tl.zeros([{m}], tl.float32)"]
        lines += [
            f"acc{i} = tl.zeros([{m}, {values.of.pieces[i].block}], tl.float32)" for i in values.indices
        ]
        lines += [
            f"minima{p} = tl.zeros([{m}], tl.float32)" for p, g in enumerate(values.scales) if g.minimum
        ]
        return [*lines, "largest = 1.0e-30"] if values.normalized else lines

    def stores(self, pointer: str, value: str) -> list[str]:
        """Lines that store each piece of the result; `value` is a template of what is stored."""
        values = self.values
        letter = values.of.letter
        lines = []
        for i in values.indices:
            piece = values.of.pieces[i]
            guard = "real[:, None]" + ("" if piece.whole else f" & ({letter}c{i} < {piece.stop})")
            lines.append(f"tl.store({pointer} + {letter}c{i}, {value.format(f'acc{i}')}, mask={guard})")
        return lines


def row_tiles(spec: KernelSpec) -> int:
    """Into how many tiles of rows decode cuts the query heads of a group."""
    return -(-spec.group // spec.block_m)


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of `spec`, role decode or prefill."""
    attend = Attend(spec)
    params = attend.params()
    loops = []
    for source in attend.sources:
        bounds = attend.bounds(source)
        loops.append(
            {
                "what": "the new tokens" if source.prefix else "the cache",
                "bounds": bounds,
                "plain": attend.tile(source, False) if bounds.plain else [],
                "masked": attend.tile(source, True),
            }
        )
    name = f"{spec.role}_attention"
    scale = [line for part in attend.readers for line in attend.fixed_scale(part)]
    text = rendered(
        "attend.py.jinja",
        name=name,
        params=params,
        spec=spec,
        many=attend.many,
        row_tiles=row_tiles(spec),
        options=spec.options,
        queries=[*attend.constants(), *scale, *attend.queries()],
        accumulators=attend.accumulators(),
        loops=loops,
        finish=attend.finish(),
        partial=attend.stores("partial_ptr + row[:, None]", "{}"),
        out=attend.stores("out_ptr + row[:, None]", "({} / total[:, None])"),
        log2e=scores.LOG2E,
        rescale=[f"acc{i} = acc{i} * tl.exp2(top - highest)[:, None]" for i in attend.values.indices],
        out_dim=attend.values.channels,
        mixed=attend.mixed,
    )
    return KernelSource(name, params, helpers.module(tidy(text)))
