"""A text and its cache as one safetensors file.

| tensor | what |
|---|---|
| text.ids, text.seq_lens | int64 [B, columns], [B] |
| cache.* | each buffer; rows behind the text, and pages of nobody, are left out |
| page table * | none: pages are written in the order of their sequences, and get other numbers when they are read |

The metadata says which plan and which weights it belongs to, and has a hash of what is in the file: a cache that is
damaged looks like any other, and gives other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvcompile.errors import InputError
from kvcompile.original.digest import of_tensors
from kvcompile.runtime.cache import KVCache
from kvcompile.util.whole_file import whole_file, write_tensors

_FORMAT = "kvcompile cache 2"
_IDS, _LENGTHS = "text.ids", "text.seq_lens"


def write(cache: KVCache, path: str | Path, plan: str, weights: str) -> None:
    """Raises InputError where there is no text, or `path` cannot be written; what stood there is as it was."""
    if not cache.columns:
        raise InputError("the cache holds no text: there is nothing to save")
    tensors = {_IDS: cache.text.ids, _LENGTHS: cache.seq_lens, **cache.state()}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    told = {"format": _FORMAT, "plan": plan, "weights": weights, "seen": json.dumps(cache.seen)}
    told["content"] = _content(tensors, told["seen"])
    try:
        with whole_file(path) as made:
            write_tensors(tensors, made, told)
    except OSError as error:
        raise InputError(f"the cache cannot be saved as {path}: {error.strerror or error}") from error


def read(cache: KVCache, path: Path, plan: str, weights: str) -> None:
    """Let `cache` hold what the file has; raises InputError where it does not fit, and the cache is as it was."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            told: dict[str, str] = file.metadata() or {}
            if told.get("format") != _FORMAT:
                raise InputError(f"{path}: expected a saved cache ({_FORMAT}), got {told.get('format')!r}")
            for name, own in (("plan", plan), ("weights", weights)):
                if told.get(name) != own:
                    raise InputError(
                        f"{path}: it was saved with other {name} ({told.get(name)}) than this module has ({own}); what "
                        "a cache holds means nothing to them: compute the text anew"
                    )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: no saved cache can be read there: {error}") from error
    try:
        if _content(tensors, told["seen"]) != told["content"]:
            raise ValueError("its content is not what was saved; save it again")
        ids, lengths = tensors.pop(_IDS), tensors.pop(_LENGTHS)
        seen = [int(count) for count in json.loads(told["seen"])]
        _check(cache, ids, lengths, seen)
        cache.restore(ids, lengths, seen, tensors)
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: a damaged file: {error}") from error


def _content(tensors: Mapping[str, Tensor], seen: str) -> str:
    return f"{of_tensors(tensors.items())} {seen}"


def _check(cache: KVCache, ids: Any, lengths: Tensor, seen: list[int]) -> None:
    """Raises ValueError where the text itself makes no sense."""
    if ids.dim() != 2 or ids.dtype != torch.int64 or 0 in ids.shape:
        raise ValueError(f"{_IDS} is {ids.dtype} {tuple(ids.shape)}")
    batch, columns = ids.shape
    if lengths.dtype != torch.int64 or tuple(lengths.shape) != (batch,) or len(seen) != batch:
        raise ValueError(f"lengths of {len(seen)} sequences, and ids of {batch}")
    if bool((lengths < 0).any()) or bool((lengths > columns).any()):
        raise ValueError(f"lengths {lengths.tolist()} of {columns} columns")
    cache.check_limits(batch, columns)
