"""Rotations: where positions enter queries and keys, what they do there, and tables of it, by evaluating.

Between a projection and the scores, queries and keys may pass through any arithmetic with *tables*: nodes that are
functions of the positions alone (cos and sin, complex phases, ..). With the tables held at some position p, what
comes out is y(p); with those of position 0 it is x. A rotary embedding of any spelling is then

    y(p)[c] = a(p)[c] * x[c] + b(p)[c] * x[partner(c)]

a linear map with at most two terms a channel, the same for every head, and a rotation that composes:
R(p + q) = R(p) R(q). All of this is found out in float64 with random values at the projections; casts in between
are left out, so the result is exact for models in half precision, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, map_arg

from kvcompile.kernels.ops.opaque import find, opaque
from kvcompile.passes.detect.positional import position_sources, value_descendants
from kvcompile.passes.detect.rotary_form import EXACT, NotRotary, form_of, partner, sign
from kvcompile.passes.graph import expr, is_size, shape, size_at, target_name, value
from kvcompile.passes.probe.evaluate import evaluate, fetch_attr
from kvcompile.passes.records import Rotation
from kvcompile.specs import RotaryForm

_MOST_NODES = 200
# Operators that act on each token alone and that a position may pass through on its way into queries and keys.
_CASTS = ("to", "_to_copy", "type_as")
_PASSING = frozenset(
    (
        *(
            "mul",
            "add",
            "sub",
            "rsub",
            "neg",
            "div",
            "addcmul",
            "where",
            "pow",
            "rsqrt",
            "sqrt",
            "reciprocal",
        ),
        *("mean", "sum", "square", "rms_norm", "linalg_vector_norm", "clamp_min", "clamp", "abs", "conj"),
        *(
            "cat",
            "stack",
            "hstack",
            "concat",
            "slice",
            "split",
            "split_with_sizes",
            "chunk",
            "getitem",
            "narrow",
        ),
        *("unbind", "select", "index", "index_select", "gather", "flip", "roll", "tile", "repeat"),
        *("slice_scatter", "select_scatter", "copy", "repeat_interleave", "resolve_conj", "_conj"),
        *("squeeze", "unsqueeze", "reshape", "view", "_unsafe_view", "flatten", "unflatten", "expand"),
        *(
            "transpose",
            "permute",
            "t",
            "movedim",
            "swapaxes",
            "clone",
            "contiguous",
            "expand_as",
            "view_as",
            "reshape_as",
        ),
        *("view_as_complex", "view_as_real", "complex", "real", "imag", "polar"),
        *("new_empty", "new_zeros", "empty_like", "zeros_like", "new_ones", "ones_like", "empty", "zeros"),
        *_CASTS,
    )
)
_MOVING = _PASSING - frozenset(
    (
        *("mul", "add", "sub", "rsub", "div", "addcmul", "where", "pow", "rsqrt", "sqrt", "reciprocal"),
        *("mean", "sum", "square", "rms_norm", "linalg_vector_norm", "clamp_min", "clamp", "abs"),
    )
)
# Numbers of all samples that are rotated at once: what the processor's caches hold takes a fraction of the time.
_AT_ONCE = 2**18


class Rotations:
    """Finds and evaluates the rotations of one graph."""

    def __init__(self, graph_module: GraphModule):
        self.graph_module = graph_module
        placeholders = {str(n.target): n for n in graph_module.graph.nodes if n.op == "placeholder"}
        ids = placeholders["input_ids"]
        self.batch, self.seq = (expr(dim) for dim in shape(ids))
        self.device = ids.meta["val"].device
        self._ids = ids
        self._from_tokens: set[Node] = set()
        self._positional: set[Node] = set()
        self._nodes = 0

    def find(self, output: Node) -> Rotation | None:
        """The rotation that ends in `output`; None where no position enters between projection and `output`."""
        self._refresh()
        tables: list[Node] = []
        roots: list[Node] = []
        seen, stack = {output}, [output]
        while stack:
            node = stack.pop()
            if node in self._positional:
                tables.append(node)
                continue
            if node in self._from_tokens and (not self._passes(node) or len(seen) > _MOST_NODES):
                roots.append(node)
                continue
            fresh = [parent for parent in node.all_input_nodes if parent not in seen and _is_value(parent)]
            seen.update(fresh)
            stack.extend(fresh)
        if not tables:
            return None
        ordered = [tuple(sorted(nodes, key=self._place)) for nodes in (roots, tables)]
        return Rotation(output, self._last_roots(Rotation(output, *ordered)), ordered[1])

    def _last_roots(self, rotation: Rotation) -> tuple[Node, ...]:
        """The nodes before the tables come in, behind which values only change their places (and signs).

        What lies before them (a norm, say) is the same for any values there, so it needs no evaluating.
        """
        rotated = set(self.rotated(rotation))
        stack = [n for node in rotated for n in node.all_input_nodes if n not in rotated]
        found, seen = set(), set(stack)
        while stack:
            node = stack.pop()
            if node in rotation.tables or node not in self._from_tokens or not _is_value(node):
                continue
            if node in rotation.roots or target_name(node) not in _MOVING or not self._passes(node):
                found.add(node)
                continue
            parents = [n for n in node.all_input_nodes if n not in seen]
            seen.update(parents)
            stack.extend(parents)
        return tuple(sorted(found, key=self._place))

    def _passes(self, node: Node) -> bool:
        """Whether the walk goes on behind `node`: where tokens are no dimension of their own, it ends."""
        sources = [shape(n) for n in node.all_input_nodes if n in self._from_tokens and shape(n)]
        return target_name(node) in _PASSING and all(
            any(is_size(size, self.seq) for size in sizes) for sizes in sources
        )

    def _refresh(self) -> None:
        """Tell tokens and positions apart; again whenever a rule has added nodes."""
        count = len(self.graph_module.graph.nodes)
        if count != self._nodes:
            self._nodes = count
            sources = position_sources(self.graph_module, self.seq)
            behind = value_descendants(sources)
            pure = {node for node in behind if node.target is opaque and self._only_positions(node, behind)}
            self._from_tokens = value_descendants([self._ids], pure)
            self._positional = behind - self._from_tokens

    def _only_positions(self, node: Node, behind: set[Node]) -> bool:
        """Whether an opaque module's results depend on positions and on nothing else that it is given."""
        inputs, key = node.args
        assert isinstance(inputs, (list, tuple))
        sizes = {self.batch: 2, self.seq: 7}
        for source in self.graph_module.graph.nodes:
            if source.target == "position_ids":  # its sizes may have symbols of their own
                sizes |= dict(zip((expr(dim) for dim in shape(source)), (2, 7), strict=True))
        if any(expr(dim).subs(sizes).free_symbols for source in inputs for dim in shape(source)):  # type: ignore[arg-type]
            return False
        found = []
        for seed in (0, 1):
            generator = torch.Generator().manual_seed(seed)
            values = []
            for source in inputs:
                assert isinstance(source, Node)
                val = source.meta["val"]
                size = [size_at(dim, sizes) for dim in shape(source)]
                if source in behind and not val.is_floating_point():
                    steps = [n if n == 7 else 1 for n in size]
                    value = (
                        torch.arange(7).reshape(steps).expand(size)
                        if steps.count(7) == 1
                        else torch.zeros(size)
                    )
                else:
                    value = torch.randn(size, generator=generator)
                values.append(value.to(self.device, val.dtype))
            found.append(find(str(key)).run(values))
        return all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def positional(self) -> set[Node]:
        """Nodes that are functions of the positions alone."""
        self._refresh()
        return self._positional

    @staticmethod
    def _place(node: Node) -> Any:
        return node._sort_key

    def region(self, outputs: Sequence[Node], rotation: Rotation) -> list[Node]:
        """The nodes between roots and tables and `outputs`, in the order of the graph."""
        seen = {*rotation.roots, *rotation.tables}
        inside, stack = [], list(outputs)
        while stack:
            node = stack.pop()
            if node in seen or node.op != "call_function":
                continue
            seen.add(node)
            inside.append(node)
            stack.extend(parent for parent in node.all_input_nodes if _is_value(parent))
        return sorted(inside, key=self._place)

    def rotated(self, rotation: Rotation) -> list[Node]:
        """The nodes of the region that depend on the tables, in the order of the graph."""
        behind = set(rotation.tables)
        found = []
        for node in self.region([rotation.output], rotation):
            if any(parent in behind for parent in node.all_input_nodes):
                behind.add(node)
                found.append(node)
        return found

    def signature(self, rotation: Rotation) -> str:
        """The rotation as text: rotations with equal texts turn alike."""
        names = {table: f"table {table.name}" for table in rotation.tables}
        number: dict[Node, str] = {}
        lines = []
        for node in self.region([rotation.output], rotation):
            for used in node.all_input_nodes:
                if used not in number and used not in names:
                    if isinstance(value(used), torch.SymInt):
                        names[used] = str(expr(value(used)))
                    elif used.op == "get_attr" or used not in self._from_tokens:
                        names[used] = str(used.target)
                    else:
                        names[used] = f"root {len(names)} {[expr(size) for size in shape(used)]}"
            args = map_arg((node.args, node.kwargs), lambda n: number.get(n) or names[n])
            number[node] = f"%{len(number)}"
            lines.append(f"{node.target} {args!r}")
        return "\n".join(lines)

    def table_values(self, rotation: Rotation, inputs: dict[str, Any]) -> list[Tensor]:
        """The tables for a graph's inputs [1, P]: each with its batch dimension, if any, of size one."""
        return evaluate(self.graph_module, list(rotation.tables), inputs)

    def at(self, rotation: Rotation, tables: Sequence[Tensor], positions: Tensor, batch: int) -> list[Tensor]:
        """Tables as they are for sequences [batch, len(positions)] that stand at these positions, in float64."""
        chosen = []
        for node, table in zip(rotation.tables, tables, strict=True):
            for dim, size in enumerate(shape(node)):
                if is_size(size, self.seq):
                    table = table.index_select(dim, positions.to(table.device))
                elif is_size(size, self.batch):
                    table = table.expand(*table.shape[:dim], batch, *table.shape[dim + 1 :])
            chosen.append(_double(table.to(self.device)))
        return chosen

    def roots(self, rotation: Rotation, batch: int, seq: int, seed: int = 0) -> list[Tensor]:
        """Random values at the projections, float64, the same for every token of a sequence."""
        generator = torch.Generator().manual_seed(seed)
        values = []
        for node in rotation.roots:
            one, full = (
                [size_at(size, {self.batch: batch, self.seq: tokens}) for size in shape(node)]
                for tokens in (1, seq)
            )
            if any(a not in (b, 1) for a, b in zip(one, full, strict=True)):
                raise NotRotary(f"{node.name} has no dimension for the sequence alone")
            drawn = torch.randn(one, generator=generator, dtype=torch.float64).to(self.device)
            values.append(drawn.expand(full))
        return values

    def run(
        self,
        outputs: Sequence[Node],
        rotation: Rotation,
        tables: Sequence[Tensor],
        roots: Sequence[Tensor],
        batch: int,
        seq: int,
    ) -> list[Tensor]:
        """Values of `outputs` in float64 for given values of tables and roots, all on one device. Raises NotRotary."""
        values: dict[Node, Any] = dict(zip(rotation.tables, tables, strict=True))
        values |= dict(zip(rotation.roots, roots, strict=True))
        sizes = {self.batch: batch, self.seq: seq}

        def known(node: Node) -> Any:
            if node in values:
                return values[node]
            val = value(node)
            if isinstance(val, torch.SymInt):
                return size_at(val, sizes)
            if node.op == "get_attr":
                found = fetch_attr(self.graph_module, str(node.target))
                return _double(found.to(self.device)) if isinstance(found, Tensor) else found
            raise NotRotary(f"{node.name} is needed and is neither a table nor a projection")

        try:
            with torch.no_grad():
                for node in self.region(outputs, rotation):
                    args, kwargs = map_arg((node.args, dict(node.kwargs)), known)
                    if target_name(node) in _CASTS:
                        values[node] = args[0]
                        continue
                    dtype = kwargs.get("dtype")
                    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
                        kwargs["dtype"] = torch.float64
                    if "device" in kwargs:
                        kwargs["device"] = self.device
                    assert callable(node.target)
                    values[node] = node.target(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise NotRotary(f"what they do cannot be evaluated in float64: {reason[:200]}") from error
        return [values[node] for node in outputs]

    def fit(
        self, rotation: Rotation, tables: Sequence[Tensor], probes: Sequence[int]
    ) -> tuple[RotaryForm, Tensor]:
        """The form, and the maps float64 [len(probes), D, D] at some positions; raises NotRotary.

        probes: positions a, b, a + b, and more; the tables reach beyond all of them.
        """
        heads, channels = (int(size) for size in (shape(rotation.output)[1], shape(rotation.output)[3]))
        batch = -(-2 * channels // heads) + 1
        where = torch.tensor([0, *probes])
        (found,) = self.run(
            [rotation.output],
            rotation,
            self.at(rotation, tables, where, batch),
            self.roots(rotation, batch, len(where)),
            batch,
            len(where),
        )
        rows = found.transpose(1, 2).transpose(0, 1).flatten(1, 2)  # [1 + probes, samples, D]
        x, y = rows[0], rows[1:]
        if not torch.isfinite(rows).all():
            raise NotRotary("what comes out is not finite")
        # y = map @ x, for all positions at once, and only for the channels that any position changes
        active = (y != x).any(0).any(0)
        maps = torch.eye(channels, dtype=torch.float64, device=x.device).repeat(len(y), 1, 1)
        solved = torch.linalg.lstsq(
            x[:, active], y[:, :, active].permute(1, 0, 2).flatten(1), driver="gels"
        ).solution
        width = int(active.sum())
        block = solved.reshape(width, len(y), width).permute(1, 2, 0)
        maps[:, active.nonzero(), active.nonzero().T] = block
        rest = (torch.einsum("pij,nj->pni", maps, x) - y).abs().max()
        if float(rest) > EXACT * float(y.abs().max()):
            raise NotRotary("queries or keys do not depend linearly on what they are at position 0")
        form = form_of(maps)
        eps = max([EXACT, *(torch.finfo(t.dtype).eps * 16 for t in tables if _is_real(t))])
        unit = torch.eye(channels, dtype=torch.float64, device=maps.device)
        if float((maps.transpose(-1, -2) @ maps - unit).abs().max()) > eps:
            raise NotRotary("they scale as well as rotate (factors of single channels behind the rotation?)")
        if float((maps[0] @ maps[1] - maps[2]).abs().max()) > eps:
            raise NotRotary("the angles do not grow in proportion to the positions")
        return form, maps

    def tabulate(
        self, rotation: Rotation, tables: Sequence[Tensor], form: RotaryForm, count: int
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, float64 [count, rotary_dim], of every position; checked for each. Raises NotRotary."""
        heads, channels = (int(size) for size in (shape(rotation.output)[1], shape(rotation.output)[3]))
        batch = max(2, -(-8 // heads))
        # A part of the positions at a time: all of a long context, for all heads, would be many GiB.
        size = max(1, _AT_ONCE // (batch * heads * channels))
        parts = [
            self._tabulate(rotation, tables, form, torch.arange(start, min(start + size, count)), batch)
            for start in range(0, count, size)
        ]
        return torch.cat([cos for cos, _ in parts]), torch.cat([sin for _, sin in parts])

    def _tabulate(
        self, rotation: Rotation, tables: Sequence[Tensor], form: RotaryForm, where: Tensor, batch: int
    ) -> tuple[Tensor, Tensor]:
        """`tabulate` for the positions `where`."""
        channels, count = int(shape(rotation.output)[3]), len(where) + 1
        roots = self.roots(rotation, batch, count)
        with_first = torch.cat([torch.zeros(1, dtype=where.dtype), where])
        (y,) = self.run(
            [rotation.output], rotation, self.at(rotation, tables, with_first, batch), roots, batch, count
        )
        y = y.transpose(1, 2).transpose(0, 1).flatten(1, 2)  # [1 + positions, samples, D]
        x, y = y[0], y[1:]
        mixed = x[:, partner(form, channels).to(x.device)]
        # Two unknowns a channel, from all samples: the normal equations, solved by hand.
        xx, xm, mm = (x * x).sum(0), (x * mixed).sum(0), (mixed * mixed).sum(0)
        yx, ym = (y * x).sum(1), (y * mixed).sum(1)
        determinant = xx * mm - xm * xm
        alone = partner(form, channels).to(x.device) == torch.arange(channels, device=x.device)
        safe = torch.where(alone, 1.0, determinant)
        a = torch.where(alone, 1.0, (yx * mm - ym * xm) / safe)
        b = torch.where(alone, 0.0, (ym * xx - yx * xm) / safe)
        self.check(y, x, mixed, a, b)
        turned = slice(form.start, form.start + form.rotary_dim)
        return a[:, turned], b[:, turned] * sign(form).to(x.device)

    @staticmethod
    def check(y: Tensor, x: Tensor, mixed: Tensor, a: Tensor, b: Tensor) -> None:
        """Raises NotRotary unless y [P, N, D] is a x + b mixed, a and b [P, D]."""
        rest = (y - a[:, None] * x - b[:, None] * mixed).abs().max()
        if float(rest) > EXACT * float(y.abs().max()):
            raise NotRotary("some position is not rotated as the others are")

    def follows(
        self, rotation: Rotation, tables: Sequence[Tensor], form: RotaryForm, cos: Tensor, sin: Tensor
    ) -> None:
        """Raises NotRotary unless this rotation (of queries, say) has these tables, at a sample of positions."""
        channels = int(shape(rotation.output)[3])
        count = cos.shape[0]
        where = torch.unique(torch.linspace(0, count - 1, min(count, 16)).round().long())
        batch = 2
        (y,) = self.run(
            [rotation.output],
            rotation,
            self.at(rotation, tables, where, batch),
            self.roots(rotation, batch, len(where), seed=1),
            batch,
            len(where),
        )
        y = y.transpose(1, 2).transpose(0, 1).flatten(1, 2)
        a, b = torch.ones(len(where), channels).to(y), torch.zeros(len(where), channels).to(y)
        turned = slice(form.start, form.start + form.rotary_dim)
        a[:, turned], b[:, turned] = cos[where], sin[where] * sign(form).to(y.device)
        self.check(y, y[0], y[0][:, partner(form, channels).to(y.device)], a, b)


def _is_value(node: Node) -> bool:
    """Whether a node is a tensor or a list of them (of `split`, say), not a size."""
    val = value(node)
    return isinstance(val, (Tensor, list, tuple))


def _is_real(table: Tensor) -> bool:
    return table.is_floating_point()


def _double(table: Tensor) -> Tensor:
    if table.is_complex():
        return table.to(torch.complex128)
    return table.double() if table.is_floating_point() else table
