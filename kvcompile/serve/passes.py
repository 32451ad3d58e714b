"""Carries out what a step's plan says on tensors: pages and rows are moved, tokens run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.runtime.module import CachedModel
from kvcompile.serve.capacity import Capacity
from kvcompile.serve.moves import Copy, Down, Drop, Fork, In, Move, Out, Restore, Snapshot, Tables, Up
from kvcompile.serve.rows import Rows
from kvcompile.serve.texts import Text
from kvcompile.serve.tiers import Tiers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Tokens of a text for one pass.

    tables: its pages, by group
    seen:   tokens of it in the cache before
    ids:    those that run
    """

    text: int
    tables: Tables
    seen: int
    ids: tuple[int, ...]

    @staticmethod
    def of(text: Text, end: int | None) -> Piece:
        """What is left of a text, up to `end` where that is said."""
        ids = tuple(text.tokens[text.computed : end])
        return Piece(text.id, tuple(map(tuple, text.tables)), text.computed, ids)


class Passes:
    """An engine's cache, and the module that runs over it; used by one thread."""

    beat: float | None = None  # seconds after which `idle` wants to be called again

    @property
    def failed(self) -> str | None:
        """Why no pass can run any more; None: passes can."""
        return None

    @property
    def lost(self) -> list[int]:
        """Texts that a failure has left with a part of what they had, whether they were meant or not."""
        return self.rows.lost

    def idle(self) -> None:
        """Called while there is nothing to do."""

    def warm(self, shapes: Sequence[tuple[int, int]], packed: bool) -> None:
        """Compile what passes of so many texts and tokens need, and a packed one."""
        for batch, tokens in shapes:
            self.module.prepare(batch, tokens)
        if packed:
            self.module.packed().prepare()

    def close(self) -> None:
        """Nothing runs any more."""

    def __init__(self, module: CachedModel, room: Capacity, tiers: Tiers):
        """
        tiers: where evicted pages and snapshots are

        Raises:
            LimitError: the device has no memory for so much.
        """
        self.module = module
        self.tiers = tiers
        newest = max((decision.layout.unsettled for decision in module.plan.decisions), default=0)
        pages = [group.pages for group in room.groups]
        self.rows = Rows(module.cache.shape, module.device, room.rows, pages, newest)
        self._on_host: dict[int, dict[str, Tensor]] = {}
        self._packed_order: list[int] = []  # texts of the last packed pass that had one token each
        program = module.program
        # Texts of other lengths come in other passes.
        self._apart = program.takes_past_length or not program.ragged

    def move(self, moves: Sequence[Move], computed: dict[int, int]) -> None:
        """Carry out moves, one after the other; computed: tokens that each text that comes back has in the cache."""
        try:
            for move in moves:
                self._do(move, computed)
        except Exception:
            for move in moves:  # who has given way has no row, whatever became of the others
                if isinstance(move, Drop):
                    self.rows.drop(move.text)
            raise
        self.tiers.release()

    def _do(self, move: Move, computed: dict[int, int]) -> None:
        """Carry out a move, as `move`."""
        fetched = self.tiers.fetched
        match move:
            case Copy():
                self.rows.copy_pages([move])
            case Drop(text):
                self.rows.drop(text)
            case Out(text, tables):
                self._on_host[text] = self.rows.state(text, tables)
            case In(text, tables):
                self.rows.restore(text, computed[text], tables, self._on_host.pop(text))
            case Down():
                self._keep_page(move)
            case Up(_, group, page, key):
                self.rows.fill_page(group, page, fetched(key))
            case Restore(text, tokens, row, slots, pages):
                self.rows.resume(text, tokens, pages, fetched(row), [fetched(key) for key in slots])

    def _keep_page(self, down: Down) -> None:
        """Keep what a page holds; where that fails it is forgotten, and nobody misses it."""
        try:
            self.tiers.pages.store(down.key, self.rows.page(down.group, down.page))
        except (RuntimeError, MemoryError) as error:  # the host has no memory to give
            log.warning("a page that was evicted is lost: %s", error)

    def keep(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; where that fails there is none."""
        text, start, tokens = snapshot.text, snapshot.start, snapshot.tokens
        try:
            items = [(snapshot.row, self.rows.snapshot(text, snapshot.pages))]
            if snapshot.slots:
                items.append((snapshot.slots[-1], self.rows.slots(text, start, tokens)))
        except (RuntimeError, MemoryError) as error:  # the host has no memory to give
            log.warning("there is no snapshot of a prefix: %s", error)
            return
        self.tiers.keep_snapshot(items, snapshot.slots[:-1])

    def fork(self, fork: Fork) -> None:
        """Let a text go its own way from where another one is."""
        self.move(fork.moves, {})
        self.rows.fork(fork.source, fork.target)

    def leave(self, text: int) -> None:
        """A text has nothing here any more."""
        self._on_host.pop(text, None)
        self.rows.drop(text)

    def has(self, text: int) -> bool:
        """Whether a text has something here."""
        return text in self._on_host or text in self.rows

    def begin_again(self) -> None:
        """No text has anything here."""
        self._on_host.clear()
        self.rows.clear()

    def batches(self, texts: Sequence[int]) -> list[list[int]]:
        """Texts that take their next token together."""
        return [[text] for text in texts] if self._apart else [list(texts)] if texts else []

    def run_packed(self, texts: Sequence[Text], ends: Sequence[int]) -> Tensor:
        """Run tokens of texts up to `ends` in one row; texts with one token come first.

        Returns the logits [R, V] after the last of these tokens of each text.
        """
        return self.pass_packed([Piece.of(text, end) for text, end in zip(texts, ends, strict=True)])

    def run(self, texts: Sequence[Text], end: int | None = None) -> tuple[list[Text], Tensor]:
        """Run what is left of texts; several have one token left each.

        end: where the piece of a single text ends; None: at its last token

        Returns the texts in the order of their rows, and the logits [B, V] after the last token of each.
        """
        by_id = {text.id: text for text in texts}
        order, logits = self.pass_apart([Piece.of(text, end) for text in texts])
        return [by_id[id] for id in order], logits

    def pass_packed(self, pieces: Sequence[Piece]) -> Tensor:
        """`run_packed` of pieces."""
        asked, pieces = pieces, self._neighbours(pieces)
        for piece in pieces:
            self.rows.place(piece.text)
            self.rows.write_tables(piece.text, piece.tables)
        with self.module.turns.alone():
            self.module.check_call()
            inputs = self.rows.inputs_of([piece.text for piece in pieces])
            ids, seen = [list(piece.ids) for piece in pieces], [piece.seen for piece in pieces]
            logits = self.module.packed().run(ids, seen, inputs)
        for piece in pieces:
            self.rows.note(piece.text, piece.seen + len(piece.ids))
        if asked is not pieces:
            place = {piece.text: number for number, piece in enumerate(pieces)}
            logits = logits[[place[piece.text] for piece in asked]]
        return logits.float()

    def _neighbours(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Pieces in the order in which a packed pass takes them.

        Where kernels read common pages once, those of one token that begin with the same pages follow each other.
        """
        ones = {piece.text: piece for piece in pieces if len(piece.ids) == 1}
        if not self.rows.in_bundles or len(ones) < 3:
            return pieces
        if frozenset(ones) != frozenset(self._packed_order):
            self._packed_order = self.rows.by_pages({text: piece.tables for text, piece in ones.items()})
        return [*(ones[text] for text in self._packed_order), *(p for p in pieces if p.text not in ones)]

    def pass_apart(self, pieces: Sequence[Piece]) -> tuple[list[int], Tensor]:
        """`run` of pieces of equally many tokens; returns the texts in the order of their rows, and the logits."""
        rows, device = self.rows, self.module.device
        if len(pieces) == 1:
            first = rows.place(pieces[0].text)
        else:
            by_text, first = {piece.text: piece for piece in pieces}, 0
            tables = {id: piece.tables for id, piece in by_text.items()}
            pieces = [by_text[id] for id in rows.arrange(tables)]
        for piece in pieces:
            rows.write_tables(piece.text, piece.tables)
        seen = [piece.seen for piece in pieces]
        ids = torch.tensor([piece.ids for piece in pieces], dtype=torch.int64)
        lens = torch.tensor(seen, dtype=torch.int64)
        positions = lens[:, None] + torch.arange(ids.shape[1])
        with self.module.turns.alone():
            self.module.check_call()
            columns = max(seen)
            rows.hold(columns + ids.shape[1])
            flat = self.module.run_pass(
                ids.to(device),
                positions.to(device),
                lens.to(device),
                rows.inputs(first, first + len(pieces)),
                columns=columns,
                kept=1,
                rows=[[0] * len(seen), seen],
                version=rows.version if first == 0 else None,
            )
        for piece in pieces:
            rows.note(piece.text, piece.seen + len(piece.ids))
        return [piece.text for piece in pieces], flat[self.module.program.logits][:, -1].float()
