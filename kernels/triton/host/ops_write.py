"""Defines the ops of the roles that write the cache. Each carries its KernelSpec as a text, and launches that kernel.

| op | role | mutates | returns |
|---|---|---|---|
| triton_append | append | the parts of the cache, notes of its slots | q_out, k_out, v_out, those that the spec has |
| triton_group | group | the parts of one side | - |
| triton_score | score | the scores | - |
| triton_page_copy | page_copy | the pool | - |

They are `torch.library.triton_op`s: Inductor and AOTInductor see the launch. In Triton's interpreter they run on CPU
tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.triton import packed
from kvcompile.kernels.triton.append import append as append_role
from kvcompile.kernels.triton.append import group as group_role
from kvcompile.kernels.triton.append import page_copy as page_copy_role
from kvcompile.kernels.triton.append import slots as slots_part
from kvcompile.kernels.triton.append.encode.tile import power_of_two
from kvcompile.kernels.triton.append.operands import sides
from kvcompile.kernels.triton.attend.cascade import NUMBERS, PREFIXES
from kvcompile.kernels.triton.host.launch import launch
from kvcompile.kernels.triton.host.source import kernel_of
from kvcompile.kernels.triton.params import TensorParam
from kvcompile.kernels.triton.retention import evict as evict_part
from kvcompile.kernels.triton.retention import score as score_role

_PER_WARP = 256  # elements of a tile that a warp holds: 8 a thread
_MOST_WARPS = 8


@torch.library.triton_op("kvcompile::triton_append", mutates_args={"buffers"})
def append(
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    buffers: list[Tensor],
    positions: Tensor,
    rope: list[Tensor],
    slots: Tensor | None,
    page_table: Tensor | None,
    spec: str,
    query_start_loc: Tensor | None = None,
    max_query_len: int = 0,
) -> list[Tensor]:
    """New tokens into the cache; see `append/append.py` for the spec's options.

    Args:
        q: [B, Hq, S, D], where there is q_out; k: [B, Hkv, S, D]; v: [B, Hkv, S, Dv], where values are not in the keys.
        buffers: the site's, as the reference has them; of one token and a retention by scores, those of the notes too,
            token int32 and score float32 [B, Hkv or 1, slots].
        positions: int64 [B, S], consecutive, negative for padding on the left.
        rope: [cos, sin], float32 [P, R] each, where something turns; else [].
        slots: int32 [B, Hkv or 1, S] for many tokens and a retention by scores, -1: nowhere.
        page_table: int32 [B, pages], where the layout is paged.
        query_start_loc, max_query_len: with option packed: int64 [B + 1], and a number; q, k, v, positions, what is
            returned, then have one row, [1, .., S, ..], and buffers that are an array of the call's tokens one of
            `packed.room` tokens.

    Returns:
        q_out [B, Hq, S, D], k_out [B, Hkv, S, D], v_out [B, Hkv, S, Dv], arrivals int32 [B, Hq], prefixes int32
        [B, 4]: those that the spec has, dense.

    Raises:
        TypeError: an argument that the kernel needs is missing, or one that it does not is there.
    """
    kernel = kernel_of(spec)
    own = kernel.spec
    batch, _, tokens, _ = k.shape
    news = {"q": q, "k": k, "v": v}
    given: dict[str, Tensor | None] = {
        **news,
        "positions": positions,
        "slots": slots,
        "page_table": page_table,
    }
    given |= zip(("cos", "sin"), rope, strict=False)
    parts = [p.name for side in sides(own) for p in side.params(own)]
    if slots_part.evicts(own):
        parts += [param.name for param in evict_part.PARAMS]
    given |= zip(parts, buffers, strict=False)
    outs: list[Tensor] = []
    wanted = [param for param in kernel.source.params if isinstance(param, TensorParam)]
    for param in wanted:
        if param.name.endswith("_out"):
            like = news[param.name.removesuffix("_out")]
            assert like is not None
            outs.append(like.new_empty(like.shape, dtype=param.dtype))
            given[param.name] = outs[-1]
    if any(param.name == "arrivals" for param in wanted):
        outs.append(k.new_empty((batch, own.num_qo_heads), dtype=torch.int32))
        given["arrivals"] = outs[-1]
    if any(param.name == PREFIXES.name for param in wanted):
        outs.append(k.new_empty((batch, NUMBERS), dtype=torch.int32))
        given[PREFIXES.name] = outs[-1]
    found = ((param.name, given.get(param.name)) for param in wanted)
    tensors = {name: tensor for name, tensor in found if tensor is not None}
    sizes = {"tokens": tokens, **({"table_rows": rope[0].shape[0]} if "cos" in tensors else {})}
    if query_start_loc is not None:
        batch, tokens = query_start_loc.shape[0] - 1, max_query_len
        tensors = packed.launched(tensors, batch, append_role.of_row(own))
        tensors["query_start_loc"] = query_start_loc
        del sizes["tokens"]
    grid = append_role.grid(own, batch, tokens)
    launch(kernel, grid, tensors, sizes, num_warps=warps(append_role.elements(own)))
    return outs


@torch.library.triton_op("kvcompile::triton_group", mutates_args={"buffers"})
def group(
    x: Tensor | None, buffers: list[Tensor], positions: Tensor, page_table: Tensor | None, spec: str
) -> None:
    """Groups of tokens that the new ones make whole, of one side; see `append/group.py`.

    Args:
        x: [B, Hkv, S, D], the new vectors as they are kept; None for one token a sequence.
        buffers: the site's, as the reference has them.
        positions, page_table: as for `append`.

    Raises:
        TypeError: an argument that the kernel needs is missing, or one that it does not is there.
    """
    kernel = kernel_of(spec)
    own = kernel.spec
    batch, tokens = positions.shape
    named = dict(zip((p.name for side in sides(own) for p in side.params(own)), buffers, strict=False))
    parts = [param.name for param in group_role.side_of(own).params(own)]
    given = {
        "x": x,
        "positions": positions,
        "page_table": page_table,
        **{name: named[name] for name in parts},
    }
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    side = group_role.side_of(own)
    tile = group_role.rows(side) * power_of_two(side.dim)
    launch(kernel, group_role.grid(own, batch, tokens), tensors, {"tokens": tokens}, num_warps=warps(tile))


@torch.library.triton_op("kvcompile::triton_score", mutates_args={"score"})
def score(score: Tensor, logits: Tensor, levels: Tensor, lse: Tensor, positions: Tensor, spec: str) -> None:
    """What one query a sequence adds to the scores of its slots; see `retention/score.py`.

    Args:
        score: float32 [B, Hkv or 1, slots].
        logits, levels: [B, Hkv, G, slots] and float32 [B, Hkv, G, tiles], as decode leaves them; -inf: not seen.
        lse: float32 [B, Hq], the log-sum-exp of a head's logits (and sink), in base 2.
        positions: int64 [B, 1].
    """
    kernel = kernel_of(spec)
    own = kernel.spec
    tensors = {"score": score, "logits": logits, "levels": levels, "lse": lse, "positions": positions}
    grid = score_role.grid(own, positions.shape[0])
    launch(kernel, grid, tensors, num_warps=warps(own.block_n * power_of_two(own.group)))


@torch.library.triton_op("kvcompile::triton_page_copy", mutates_args={"pool"})
def page_copy(pool: Tensor, sources: Tensor, targets: Tensor, spec: str) -> None:
    """Pages `targets` of the pool become what `sources` are; see `append/page_copy.py`.

    Args:
        pool: [pages, ...], dense; its pages are seen as the spec's words.
        sources, targets: int32 [copies]; no page is in both, and none twice in targets.
    """
    kernel = kernel_of(spec)
    word, _ = page_copy_role.page_of(kernel.spec)
    tensors = {"pool": pool.flatten(1).view(word), "sources": sources, "targets": targets}
    grid = page_copy_role.grid(kernel.spec, sources.shape[0])
    launch(kernel, grid, tensors, num_warps=warps(kernel.spec.block_n))


def warps(elements: int) -> int:
    """Warps of a program whose tile has so many elements."""
    return max(1, min(_MOST_WARPS, elements // _PER_WARP))
