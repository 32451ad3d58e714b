"""Hugging Face models keep their generate(): sampling, beams, streamers, stopping criteria, pipelines.

`generate` makes a cache and hands it to every forward; ours is the module's own, so a handle travels in its
place. A new `generate` starts from an empty cache, unless a handle is passed as `past_key_values`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from kvcompile.emit.executor import Executor
from kvcompile.errors import InputError, LimitError
from kvcompile.plan import Plan
from kvcompile.runtime.cache import KVCache
from kvcompile.runtime.module import CachedModel
from kvcompile.runtime.program import Program


class CacheHandle:
    """What generate() sees of the module's cache: how long it is, and how beams are reordered."""

    is_compileable = False
    is_croppable = False

    def __init__(self, cache: KVCache):
        self._cache = cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in the cache, padding included."""
        return self._cache.columns

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        limit = self._cache.plan.limits.max_tokens
        return -1 if limit is None else limit

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams that were kept."""
        self._cache.reorder(beam_idx)

    def __repr__(self) -> str:
        return f"CacheHandle({self._cache.batch} sequences, {self._cache.columns} tokens, {self._cache.nbytes} bytes)"


class HuggingFaceCachedModel(CachedModel, GenerationMixin):  # type: ignore[misc]
    """A rewritten `transformers` model; call it and generate from it as from the original."""

    main_input_name = "input_ids"
    base_model_prefix = "model"
    input_modalities = ("text",)
    # One cache inside: a second model, or a step back, would find it changed.
    _is_stateful = True

    def __init__(self, model: Any, program: Program, plan: Plan, executor: Executor):
        super().__init__(model, program, plan, executor)
        self.config = model.config
        self.generation_config = model.generation_config
        self.handle = CacheHandle(self.cache)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: CacheHandle | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `CachedModel.forward`; the other arguments are those that generate() passes.

        Args:
            position_ids: follow from `attention_mask` and the cache; accepted only because generate() passes them.
            past_key_values: this module's own handle, or None.
            use_cache: the cache is always used.
            logits_to_keep: logits of the last n tokens only; 0 is all.

        Raises:
            InputError: an argument that this module cannot honour; see `CachedModel.forward` for the rest.
        """
        refused = {name: value for name, value in kwargs.items() if value is not None and value is not False}
        if input_ids is None or refused:
            what = ", ".join(sorted(refused)) or "no input_ids"
            raise InputError(f"this module takes input_ids and attention_mask; it cannot honour: {what}")
        if past_key_values is not None and past_key_values is not self.handle:
            raise InputError(
                f"past_key_values: expected this module's own cache handle or None, got {type(past_key_values).__name__}"
            )
        if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise InputError(f"logits_to_keep: expected a count of last tokens, got {logits_to_keep!r}")
        output = self.program.rebuild(self._call(input_ids, attention_mask, keep=logits_to_keep or None))
        if past_key_values is not None:
            output["past_key_values"] = past_key_values
        if return_dict is False:
            return output.to_tuple()
        return output

    def can_generate(self) -> bool:
        return True

    @classmethod
    def is_remote_code(cls) -> bool:
        return False

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
        *args: Any,
    ) -> Any:
        """Hand generate() our handle, and refuse before the first token what would not fit at the end."""
        given = model_kwargs.get("past_key_values")
        if given is not None and given is not self.handle:
            raise InputError(
                "past_key_values: this module has its own cache; pass `fast.handle` to go on from it, or nothing"
            )
        if generation_config.cache_implementation is not None:
            raise InputError(
                f"cache_implementation={generation_config.cache_implementation!r}: the recipe has chosen the cache"
            )
        if generation_config.use_cache is False:
            raise InputError("use_cache=False: this module has no form without its cache; call the original model")
        limit = self.plan.limits.max_tokens
        if limit is not None and max_cache_length > limit:
            raise LimitError(
                f"prompt and max_new_tokens come to {max_cache_length} cached tokens, more than runtime.max_tokens "
                f"{limit}: raise it in the recipe, ask for fewer tokens, or choose a bounded retention"
            )
        if given is None:
            self.reset()
        model_kwargs["past_key_values"] = self.handle
        return False

    @contextmanager
    def _optimize_model_for_decode(self) -> Iterator[None]:
        # The graph is fixed: there are no expert implementations left to switch.
        yield

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that are not in the cache yet; of a prompt, only the last logits."""
        new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        refused = {k: v for k, v in kwargs.items() if v is not None and k in ("inputs_embeds", "token_type_ids")}
        if refused:
            raise InputError(f"generate: this module takes input_ids only, not {', '.join(refused)}")
        return {
            "input_ids": new.contiguous(),
            # The first pass says where each sequence starts; what generate() adds is never padding.
            "attention_mask": attention_mask if is_first_iteration or self.cache.columns == 0 else None,
            "past_key_values": past_key_values,
            "logits_to_keep": 1,
        }

