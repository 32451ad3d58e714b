"""CacheHandle: a text in a cache, as `generate` takes it for `past_key_values`; stepped back, forked, saved."""

from __future__ import annotations

import logging
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex
from weakref import ref

import torch
from torch import Tensor

from kvcompile.errors import InputError, MethodError
from kvcompile.runtime import saved
from kvcompile.runtime.cache import KVCache
from kvcompile.runtime.ids import reads_at_once

if TYPE_CHECKING:
    from kvcompile.runtime.module import CachedModel

log = logging.getLogger(__name__)


class CacheHandle:
    """What a module's cache holds: its tokens, and how they are gone on with.

    A module's own is `fast.handle`; `fork()` makes others, each with memory of its own, which are passed to `forward`
    and `generate` as `past_key_values`. All of them know their text: `generate` keeps what a new text has in common
    with it.
    """

    is_compileable = False
    # transformers 5.24 asks of each layer whether it keeps no tokens; what it sees here is one, and it counts tokens.
    is_linear = (False,)

    def __init__(self, module: CachedModel, cache: KVCache):
        self._module = ref(module)  # which has this
        self.cache = cache

    @property
    def module(self) -> CachedModel:
        """The optimized module whose cache this is."""
        found = self._module()
        if found is None:
            raise InputError("the optimized module of this cache is gone")
        return found

    def __len__(self) -> int:
        """Columns in the cache, padding included."""
        return self.cache.columns

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        cache = self.cache
        return f"CacheHandle({cache.batch} sequences, {cache.columns} tokens, {cache.nbytes} bytes)"

    def __getattr__(self, name: str) -> Any:
        raise MethodError(
            f"a cache handle has no {name}: it stands for the cache inside of an optimized module, and goes to that "
            "alone (fast.generate(.., past_key_values=fast.handle)); the original, or another model, cannot read it"
        )

    @property
    def input_ids(self) -> Tensor:
        """The text that the cache holds, int64 [B, columns], padding included."""
        return self.cache.text.ids.clone()

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be forgotten again, however many come; in a `generate`, those that come in it."""
        back, most = self.cache.shape.back, self.module.most_tokens(self.cache)
        return back.always if most is None else back.problem(most) is None

    def crop(self, tokens: SupportsIndex) -> None:
        """Keep the first `tokens` columns, or without the last `-tokens` where that is negative; 0 keeps all, as
        transformers calls it (`fast.reset()` forgets all).

        tokens: a whole number; transformers 5.17 gives it as a tensor []

        Raises:
            InputError: the layout cannot step back (see `kvcompile.layouts.stepping`), or has fewer columns; the cache
                is as it was.
        """
        try:
            if isinstance(tokens, bool):
                raise TypeError
            wanted = operator.index(tokens)
        except TypeError:
            raise InputError(f"crop: expected a whole number of tokens, got {tokens!r}") from None
        with self.module.turns.alone():
            columns = self.cache.columns
            keep = wanted if wanted > 0 else columns + wanted
            if not 0 <= keep <= columns:
                raise InputError(f"crop({wanted}): the cache holds {columns} tokens")
            self.cache.crop(keep)

    def fork(self) -> CacheHandle:
        """Another handle with a copy of everything, which goes its own way."""
        with self.module.turns.alone():
            return CacheHandle(self.module, self.cache.copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheHandle:
        """As `fork`: the idiom of transformers for a prefix of many texts. Attribute by attribute, all that a buffer
        has addresses for would be copied, and steps that were captured over one would be taken for the other's."""
        return self.fork()

    def __copy__(self) -> CacheHandle:
        """Another handle of the same cache."""
        return CacheHandle(self.module, self.cache)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            "a cache handle cannot be pickled or saved by torch.save: handle.save(path) writes the text and its cache, "
            "and handle.load(path) of the same model and recipe reads it"
        )

    def reset(self) -> None:
        """Forget all tokens; the memory is kept."""
        with self.module.turns.alone():
            self.cache.reset()

    def save(self, path: str | Path) -> None:
        """Write the text and its cache as one safetensors file, for `load` of the same plan and weights.

        Raises:
            InputError: there is no text, or the file cannot be written; what was there is as it was.
        """
        with self.module.turns.alone():
            saved.write(self.cache, path, self.module.plan.digest(), self.module.weights_digest())

    def load(self, path: str | Path) -> None:
        """Hold what `save` has written, in the place of what is held now.

        Raises:
            InputError: no such file, another plan, other weights, or damage; the cache is as it was.
        """
        with self.module.turns.alone():
            saved.read(
                self.cache, Path(path).expanduser(), self.module.plan.digest(), self.module.weights_digest()
            )
            self.cache.stamp = self.module.stamp()

    # ---- what transformers asks of a cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in the cache, padding included."""
        return self.cache.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        limit = self.cache.shape.limits.max_tokens
        return -1 if limit is None else limit

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams that were kept: row i becomes what row beam_idx[i] was.

        Raises:
            InputError: not one whole number from 0 on for each row; the cache is as it was.
        """
        with self.module.turns.alone():
            self._check_rows(beam_idx)
            self.cache.reorder(beam_idx.long())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows `indices`, in that order; a row may come several times.

        Raises:
            InputError: no whole numbers of rows that there are.
            LimitError: more rows than the limits, or than pools have pages for; in both cases the cache is as it was.
        """
        with self.module.turns.alone():
            self._check_rows(indices, "batch_select_indices", any_count=True)
            self.cache.select(indices.long())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times, one beside the other: a prefix that was computed once, for many texts.

        Raises:
            InputError, LimitError: as `batch_select_indices`.
        """
        if not isinstance(repeats, int) or isinstance(repeats, bool) or repeats < 1:
            raise InputError(f"batch_repeat_interleave: expected a count of at least 1, got {repeats!r}")
        self.batch_select_indices(torch.arange(self.cache.batch).repeat_interleave(repeats))

    def _check_rows(self, index: Any, what: str = "reorder_cache", any_count: bool = False) -> None:
        rows = self.cache.batch if len(self) else 0
        fits = isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64) and rows > 0
        fits = fits and index.dim() == 1 and (len(index) > 0 if any_count else len(index) == rows)
        # A GPU is not waited for: beams come from its own scores.
        if fits and (any_count or reads_at_once(index.device)):
            fits = bool(((index >= 0) & (index < rows)).all())
        if not fits:
            got = f"{index.dtype} {index.tolist()}" if isinstance(index, Tensor) else type(index).__name__
            wanted = "some" if any_count else f"[{rows}]"
            there = f"rows from 0 to {rows - 1}" if rows else "rows, and the cache is empty"
            raise InputError(f"{what}: expected int64 {wanted} of {there}, got {got}")

    def activate_past_recording(self) -> None:
        """Nothing is to be recorded: a cache that can step back can do so at any time."""

    # ---- a text that comes

    def common(self, ids: Tensor, mask: Any) -> int:
        """How many leading columns of a whole text [B, S] are in the cache already, so that one is left to compute.

        None are where the weights have changed since it was begun.

        mask: [B, S], 0 for padding on the left; None: none
        """
        cache = self.cache
        if not cache.columns or cache.calls.lost or len(ids) != cache.batch:
            return 0
        if cache.stamp != self.module.stamp():
            log.info("the text is computed anew: weights have changed since it was begun")
            return 0
        hidden = cache.hidden
        size = min(ids.shape[1], cache.columns)
        if isinstance(mask, Tensor):
            padding = ~mask[:, :size].to(cache.device).bool()
        else:
            padding = torch.zeros_like(hidden[:, :size])
        if not torch.equal(padding, hidden[:, :size]):
            return 0
        return min(cache.text.common(ids, hidden), ids.shape[1] - 1)

    def keep(self, columns: int) -> None:
        """Step back to the first `columns`, or, where the layout cannot, to nothing: the text is then computed anew."""
        cache = self.cache
        cache.writers.take_over()
        if columns == cache.columns:
            return
        problem = cache.shape.back.problem(cache.columns) if columns else None
        if problem is not None:
            log.info("%d tokens in common are computed again: %s", columns, problem)
            columns = 0
        cache.crop(columns)
