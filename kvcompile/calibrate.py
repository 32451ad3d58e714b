"""How large keys and values get on a text: what fp8 with one scale per layer or per head must know beforehand.

    absmax[layer, side, head] = max |x|   over the text's tokens and the head's channels; scale = absmax / 448

The canonical graph, with one attention per site and no cache, runs over the text in sequences of at most `context`
tokens, and the largest absolute value of each site's K and V is noted in every form that a recipe can store
(`kvcompile/recipe/scales.py`). Source of the method: per-tensor calibration as in vLLM and TensorRT-LLM.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

from kvcompile.errors import InputError, ModelError
from kvcompile.original.adapters import base_of
from kvcompile.util.progress import Progress, told

# Light on purpose: torch is imported when calibrate() is called.
if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

    from kvcompile.passes.records import AttentionSite
    from kvcompile.pipeline import Front
    from kvcompile.recipe.scales import Extent, LayerExtents, Scales

CONTEXT = 1024


def calibrate(
    model: Any,
    text_or_ids: Any,
    *,
    tokenizer: Any = None,
    tokens: int | None = None,
    context: int = CONTEXT,
    progress: Progress | None = None,
) -> Scales:
    """Measure the scales of fp8 with `scale: tensor` or `scale: head` on a text; `.save(path)` writes them.

    Args:
        model: as for `optimize`: a `transformers` causal LM, or any module from token ids to logits. Left as it is.
        text_or_ids: text, or token ids int64 [S] or [1, S].
        tokenizer: of the model, where `text_or_ids` is text: called as tokenizer(text, return_tensors="pt").
        tokens: how many of them to take, from the start; None: all.
        context: tokens that stand in one sequence at most; fewer where the model was made for fewer. Keys after
            RoPE depend on their position, so choose it as long as your sequences, or long enough.
        progress: called as progress(stage, done, total); None: as `optimize` shows it.

    Returns:
        The scales of every layer, in all forms that a recipe can store.

    Raises:
        InputError: no tokens, ids that are none or that the model does not have, or an impossible count.
        ModelError: as `optimize`; also a head that is zero, or not finite, over the whole text.
    """
    for name, value in (("tokens", tokens), ("context", context)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name}: expected a whole number of at least 1, got {value!r}")
    ids = _ids(text_or_ids, tokenizer)[:tokens]
    if not len(ids):
        raise InputError("calibrate: the text has no tokens")
    with told(progress) as tell:
        return _measured(model, ids, context, tell)


def _measured(model: Any, ids: Tensor, context: int, tell: Progress) -> Scales:
    import torch

    from kvcompile.pipeline import understand
    from kvcompile.recipe.scales import Scales, Text
    from kvcompile.runtime.ids import check_vocabulary
    from kvcompile.verify.ids import bounds

    tell("capture and detect", 0, 1)
    model = base_of(model)
    front = understand(model)
    check_vocabulary(ids, bounds(front), "calibrate: token ids")
    if front.max_tokens is not None:
        context = min(context, front.max_tokens)
    # Pieces of nearly equal size: no last sequence of a few tokens.
    count = math.ceil(len(ids) / context)
    largest: dict[Node, Tensor] = {}
    for i in range(count):
        tell("calibrate", i, count)
        piece = ids[len(ids) * i // count : len(ids) * (i + 1) // count]
        for node, found in _measure(front, piece[None].to(front.device)).items():
            largest[node] = torch.maximum(largest.get(node, found), found)
    tell("calibrate", count, count)
    digest = hashlib.sha256(" ".join(map(str, ids.tolist())).encode()).hexdigest()[:16]
    return Scales(
        model=front.model,
        dtype=str(front.sites[0].dtype).removeprefix("torch."),
        text=Text(tokens=len(ids), digest=digest, context=min(context, len(ids))),
        layers=tuple(_layer(site, largest) for site in front.sites),
    )


def _ids(given: Any, tokenizer: Any) -> Tensor:
    """Token ids int64 [S] of a text or of ids."""
    import torch

    if isinstance(given, str):
        if tokenizer is None:
            raise InputError("calibrate: text needs the model's tokenizer: pass tokenizer=, or token ids")
        if not callable(tokenizer):
            raise InputError(
                f"calibrate: tokenizer: expected one of transformers, got {type(tokenizer).__name__}"
            )
        given = tokenizer(given, return_tensors="pt")["input_ids"]
    if not isinstance(given, torch.Tensor) or given.dtype != torch.int64:
        got = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise InputError(f"calibrate: expected text or an int64 tensor of token ids, got {got}")
    if given.dim() == 2 and given.shape[0] == 1:
        given = given[0]
    if given.dim() != 1:
        raise InputError(f"calibrate: expected token ids [S] or [1, S], got {list(given.shape)}")
    ids: Tensor = given
    return ids


def _wanted(site: AttentionSite) -> list[Node]:
    """The nodes whose values a recipe may store."""
    rope = [site.rope.k_input] if site.rope else []
    rows = _wanted(site.latent.site) if site.latent else []
    return [site.k, site.v, *rope, *rows]


def _measure(front: Front, ids: Tensor) -> dict[Node, Tensor]:
    """[2, heads] fp32 of each wanted node: absmax as it is, and turned (or again as it is where there is no turn)."""
    import torch
    from torch.fx import Interpreter

    from kvcompile.kernels.shared.hadamard import hadamard
    from kvcompile.pipeline import example_inputs

    wanted = {node for site in front.sites for node in _wanted(site)}
    found: dict[Node, Tensor] = {}

    class Recorder(Interpreter):
        def run_node(self, n: Node) -> Any:
            result = super().run_node(n)
            if n in wanted:
                turned = hadamard(result) if _turns(result.shape[-1]) else result
                found[n] = torch.stack([x.float().abs().amax((0, 2, 3)) for x in (result, turned)])
            return result

    inputs = example_inputs(front, *ids.shape) | {"input_ids": ids}
    if "logits_to_keep" in inputs:
        inputs["logits_to_keep"] = inputs["logits_to_keep"][-1:]
    names = [n.name for n in front.canonical.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        Recorder(front.canonical).run(*[inputs[name] for name in names])
    return found


def _turns(dim: int) -> bool:
    from kvcompile.layouts.storage import hadamard

    return hadamard.check(dim) is None


def _layer(site: AttentionSite, largest: dict[Node, Tensor]) -> LayerExtents:
    from kvcompile.recipe.scales import LayerExtents

    where = f"layer {site.layer} ({site.module_path}, {site.source})"
    before = None
    if site.rope is not None:
        before = _extent(largest[site.rope.k_input], site.head_dim, f"{where}: keys before RoPE")
    return LayerExtents(
        num_kv_heads=site.num_kv_heads,
        head_dim=site.head_dim,
        v_head_dim=site.v_head_dim,
        keys=_extent(largest[site.k], site.head_dim, f"{where}: keys"),
        keys_before_rope=before,
        values=_extent(largest[site.v], site.v_head_dim, f"{where}: values"),
        rows=_layer(site.latent.site, largest) if site.latent else None,
    )


def _extent(found: Tensor, dim: int, what: str) -> Extent:
    from kvcompile.recipe.scales import Extent

    bad = [head for head, value in enumerate(found[0].tolist()) if not 0 < value < math.inf]
    if bad:
        raise ModelError(
            f"calibrate: {what} of KV head {bad[0]} are {found[0, bad[0]].item()} at most over the whole text, which "
            "gives no scale: use another text, or scale: token"
        )
    plain, turned = (tuple(row) for row in found.tolist())
    return Extent(plain=plain, hadamard=turned if _turns(dim) else None)


__all__ = ["CONTEXT", "calibrate"]
