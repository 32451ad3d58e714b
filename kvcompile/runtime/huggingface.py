"""Hugging Face models keep their generate(): sampling, beams, streamers, stopping criteria, pipelines.

`generate` makes a cache and hands it to every forward; ours is the module's own, so a handle travels in its
place. A new `generate` starts from an empty cache, unless a handle is passed as `past_key_values`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from kvcompile.emit.executor import Executor
from kvcompile.errors import InputError, LimitError
from kvcompile.plan import Plan
from kvcompile.runtime.cache import KVCache
from kvcompile.runtime.module import CachedModel
from kvcompile.runtime.padding import check_prompt, pads_of
from kvcompile.runtime.program import Program

_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)


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
        limit = self._cache.shape.limits.max_tokens
        return -1 if limit is None else limit

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams that were kept."""
        self._cache.reorder(beam_idx)

    def __repr__(self) -> str:
        cache = self._cache
        return f"CacheHandle({cache.batch} sequences, {cache.columns} tokens, {cache.nbytes} bytes)"


class HuggingFaceCachedModel(CachedModel, GenerationMixin):
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

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: CacheHandle | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `CachedModel.forward`, with arguments that the original also takes.

        Args:
            past_key_values: this module's own handle, or None; the cache is used either way.
            use_cache: not False.
            logits_to_keep: logits of the last n tokens only; 0 is all.
            kwargs: position_ids that say what the cache and `attention_mask` say; nothing else.

        Raises:
            InputError: an argument that this module cannot honour; see `CachedModel.forward` for the rest.
        """
        positions = kwargs.pop("position_ids", None)
        refused = {name: value for name, value in kwargs.items() if value is not None and value is not False}
        if input_ids is None or refused:
            what = ", ".join(sorted(refused)) or "no input_ids"
            raise InputError(f"this module takes input_ids and attention_mask; it cannot honour: {what}")
        self._check_cache_choice(past_key_values, use_cache)
        # A bool is an int to Python.
        if not isinstance(logits_to_keep, int) or isinstance(logits_to_keep, bool) or logits_to_keep < 0:
            raise InputError(f"logits_to_keep: expected a count of last tokens, got {logits_to_keep!r}")
        if positions is not None:
            self._check_positions(input_ids, attention_mask, positions)
        output = self.program.rebuild(self._call(input_ids, attention_mask, keep=logits_to_keep or None))
        if past_key_values is not None:
            output["past_key_values"] = past_key_values
        if return_dict is False:
            return output.to_tuple()
        return output

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's generate(): greedy, sampling, beams; see there for the arguments.

        It starts from an empty cache, or goes on where `past_key_values=fast.handle` is passed.

        Raises:
            InputError: what the cache inside cannot serve (assisted generation, inputs_embeds, another
                cache); see also `CachedModel.forward`.
            LimitError: the prompt and what it asks for would not fit; nothing has been computed.
        """
        if kwargs.get("inputs_embeds") is not None:
            raise InputError("generate: this module takes input_ids, not inputs_embeds")
        self._check_cache_choice(kwargs.get("past_key_values"), kwargs.get("use_cache"))
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def _check_cache_choice(self, past_key_values: Any, use_cache: bool | None) -> None:
        if past_key_values is not None and past_key_values is not self.handle:
            raise InputError(
                "past_key_values: this module has its own cache: expected its `handle` (to go on) or None, "
                f"got {type(past_key_values).__name__}"
            )
        if use_cache is False:
            raise InputError(
                "use_cache=False: this module has no form without its cache; call the original model"
            )

    def _check_positions(self, input_ids: Tensor, mask: Tensor | None, positions: Any) -> None:
        self._check_ids(input_ids)
        pads = pads_of(self.cache, input_ids, mask, self.program.ragged)
        batch, tokens = input_ids.shape
        first = self.cache.seq_lens if self.cache.columns else self.cache.seq_lens.new_zeros(batch)
        if pads is not None:
            first = first - pads
        own = first[:, None] + torch.arange(tokens, device=self.device)
        fits = isinstance(positions, Tensor) and tuple(positions.shape) in ((batch, tokens), (1, tokens))
        if not fits or not bool(((positions.to(self.device) == own) | (own < 0)).all()):
            raise InputError(
                "position_ids: they follow from attention_mask and from what is in the cache, and these "
                "differ; leave them out"
            )

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, mode_kwargs: Any
    ) -> None:
        if generation_mode not in _MODES:
            raise InputError(
                f"{generation_mode.value}: it steps back in the text, and the cache of this module only goes "
                "on; use greedy search, sampling or beam search, or the original model"
            )
        super()._validate_generation_mode(  # type: ignore[misc]
            generation_mode, generation_config, mode_kwargs
        )

    def can_generate(self) -> bool:
        return True

    @classmethod
    def is_remote_code(cls) -> bool:
        return False

    def get_output_embeddings(self) -> Any:
        model: Any = self.model
        return model.get_output_embeddings()

    def get_input_embeddings(self) -> Any:
        model: Any = self.model
        return model.get_input_embeddings()

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
        self._check_cache_choice(given, generation_config.use_cache)
        if generation_config.cache_implementation is not None:
            raise InputError(
                f"cache_implementation={generation_config.cache_implementation!r}: the recipe has chosen the "
                "cache; leave it out"
            )
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name):
                raise InputError(f"{name}: the rewritten graph gives logits only; call the original model")
        limit = self.plan.limits.max_tokens
        if limit is not None and max_cache_length > limit:
            raise LimitError(
                f"prompt and max_new_tokens come to {max_cache_length} cached tokens, more than "
                f"runtime.max_tokens {limit}: raise it in the recipe, ask for fewer tokens, or choose a "
                "bounded retention"
            )
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        self.cache.check_limits(rows, 1)
        kept = given is not None and self.cache.columns > 0 and rows == self.cache.batch
        mask = model_kwargs.get("attention_mask")
        if given is None and isinstance(mask, Tensor) and mask.dim() == 2:
            check_prompt(self.cache, mask, mask, self.program.ragged)
        self.cache.check_end(max_cache_length, rows, mask, kept)
        if given is None:
            self.reset()
        # Every step is one token long; without this, generate() would send the whole sequence again.
        generation_config.use_cache = True
        model_kwargs["past_key_values"] = self.handle
        return False

    @contextmanager
    def _optimize_model_for_decode(self) -> Iterator[None]:
        # The graph is fixed: there are no expert implementations left to switch.
        yield

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        is_first_iteration: bool | None = False,
        *,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that are not in the cache yet; of a prompt, only the last logits."""
        if next_sequence_length is not None and next_sequence_length < 1:
            raise InputError(
                f"generate: the cache holds {self.cache.columns} tokens, and the input has "
                f"{input_ids.shape[1]}: to go on, pass the whole conversation or only what is new; to start "
                "over, leave out past_key_values"
            )
        new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        # The prompt says where each sequence starts; what generate() adds is never padding.
        first = is_first_iteration or self.cache.columns == 0
        given = None if position_ids is None or not first else position_ids[..., -new.shape[1] :]
        return {
            "input_ids": new.contiguous(),
            "attention_mask": attention_mask if first else None,
            "position_ids": given,
            "past_key_values": past_key_values,
            "logits_to_keep": 1,
        }
