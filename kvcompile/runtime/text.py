"""The token ids that a cache holds, so that what comes next can be told from another text."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST = 256  # columns that there is room for from the start


class Text:
    """Ids [sequences, columns] as they came, padding included; they stay on the device of the cache."""

    def __init__(self, device: torch.device):
        self._ids = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._columns = 0

    @property
    def ids(self) -> Tensor:
        """int64 [B, columns]."""
        return self._ids[:, : self._columns]

    def append(self, ids: Tensor) -> None:
        """Note columns int64 [B, S] of all sequences."""
        rows, end = len(ids), self._columns + ids.shape[1]
        if len(self._ids) != rows or end > self._ids.shape[1]:
            room = max(_LEAST, 1 << (end - 1).bit_length())
            grown = torch.zeros(rows, room, dtype=torch.int64, device=self._ids.device)
            if self._columns:
                grown[:, : self._columns] = self.ids
            self._ids = grown
        self._ids[:, self._columns : end] = ids
        self._columns = end

    def crop(self, columns: int) -> None:
        """Forget all but the first columns."""
        self._columns = min(columns, self._columns)

    def reorder(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was."""
        self._ids = self._ids.index_select(0, index)

    def common(self, ids: Tensor, hidden: Tensor) -> int:
        """Leading columns in which `ids` [B, S] and this text are the same; `hidden` [B, columns] is padding here."""
        size = min(ids.shape[1], self._columns)
        same = (ids[:, :size].to(self._ids.device) == self.ids[:, :size]) | hidden[:, :size]
        return int(same.all(0).int().cumprod(0).sum())

    def copy(self) -> Text:
        made = Text(self._ids.device)
        made._ids, made._columns = self._ids.clone(), self._columns
        return made
