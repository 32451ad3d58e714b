"""How many bytes of weights a model has, from its config: it is built without any, and counted.

table      the input embedding: whole on every rank of a tensor parallel group
head       the output embedding; 0 where it is the table
experts    of mixtures of experts, those that not every token goes through
matrices   all other parameters of two dimensions: what is cut over ranks
vectors    the rest: whole on every rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompile.errors import ModelError


@dataclass(frozen=True)
class Weights:
    """Parameters by kind, in elements; hidden and vocabulary: sizes of what the collectives move.

    expert_share: the part of `experts` that one token goes through
    """

    table: int
    head: int
    experts: int
    matrices: int
    vectors: int
    hidden: int
    vocabulary: int
    expert_share: float = 1.0

    @property
    def total(self) -> int:
        return self.table + self.head + self.experts + self.matrices + self.vectors

    def on_rank(self, ranks: int) -> int:
        """Elements that a rank has, where every matrix can be cut: the least."""
        cut = self.experts + self.matrices + self.head
        return self.table + self.vectors + -(-cut // ranks)

    def read(self, ranks: int, batch: int) -> float:
        """Elements that a rank reads in a step of `batch` tokens: experts as far as tokens go through them."""
        untouched = (1 - self.expert_share) ** batch  # tokens choose their experts evenly and independently
        head = self.head or self.table  # a table that is the head is read as the head
        return self.vectors + (self.matrices + head + self.experts * (1 - untouched)) / ranks


def weights_of(config: object) -> Weights:
    """
    Args:
        config: a transformers config, a dict of one with a `model_type`, or a folder or file that has one.

    Raises:
        ModelError: transformers has no causal language model for it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kvcompile.models import load_config

    if isinstance(config, (str, Path)):
        config = load_config(config)
    if isinstance(config, Mapping):
        given = dict(config)
        kind = given.pop("model_type", None)
        if kind is None:
            raise ModelError("the config has no model_type, by which its weights could be counted")
        config = AutoConfig.for_model(kind, **given)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError) as error:
        raise ModelError(f"its weights cannot be counted: {error}") from error
    return _count(model, config)


def _count(model: Any, config: Any) -> Weights:
    table = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    head = None if output is None or output.weight is table else output.weight
    experts = matrices = vectors = 0
    for name, parameter in model.named_parameters():
        if parameter is table or parameter is head:
            continue
        size = parameter.numel()
        if ".experts." in f".{name}." and "shared" not in name:
            experts += size
        elif parameter.dim() >= 2:
            matrices += size
        else:
            vectors += size
    vocabulary, hidden = table.shape
    return Weights(
        table.numel(),
        0 if head is None else head.numel(),
        experts,
        matrices,
        vectors,
        int(hidden),
        int(vocabulary),
        _share(config) if experts else 1.0,
    )


def _share(config: Any) -> float:
    """The part of its experts that a token goes through."""
    text = config.get_text_config(decoder=True)
    chosen = next(
        (
            n
            for key in ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
            if (n := getattr(text, key, None))
        ),
        None,
    )
    keys = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    all_of = next((n for key in keys if (n := getattr(text, key, None))), None)
    return 1.0 if not isinstance(chosen, int) or not isinstance(all_of, int) else min(1.0, chosen / all_of)
