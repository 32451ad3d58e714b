"""Hugging Face models keep their generate(): sampling, beams, streamers, stopping criteria, pipelines.

`generate` makes a cache and hands it to every forward; ours is the module's own, so a handle travels in its
place. A new `generate` starts from an empty cache, unless a handle is passed as `past_key_values`, which transformers
5.24 calls `cache`: both names are taken, with any transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvcompile.compile.executor import Executor
from kvcompile.errors import ExportError, InputError, LimitError, MethodError
from kvcompile.plan import Plan
from kvcompile.runtime.cache import KVCache
from kvcompile.runtime.generate_options import check_count, check_options
from kvcompile.runtime.handle import CacheHandle
from kvcompile.runtime.module import CachedModel
from kvcompile.runtime.padding import check_dense, check_prompt, pads_of
from kvcompile.runtime.program import Program
from kvcompile.runtime.turns import alone
from kvcompile.runtime.untraced import not_compiled_again

_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
_NAMES = ("past_key_values", "cache")
_STEPS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# What the installed transformers calls a cache: in the arguments of each step, and in what a step returns.
_CACHE = "cache" if "cache" in _STEPS else "past_key_values"


def _one_cache(**given: Any) -> Any:
    """Return the cache that comes under one of its two names, or None."""
    caches = [cache for cache in given.values() if cache is not None]
    if len(caches) > 1 and caches[0] is not caches[1]:
        raise InputError("past_key_values and cache: they are two names of one argument; pass one of them")
    return caches[0] if caches else None


_WRITTEN_OVER = (
    "a generate() of this module is at this cache, and what it calls would write over its text: give the assistant, or "
    "what a callback calls, a module of its own (kvcompile.optimize again: weights are shared) or a fork of the cache "
    "(past_key_values=fast.handle.fork())"
)


@contextmanager
def _asked() -> Iterator[None]:
    """What transformers refuses, as an error of ours."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InputError(f"generate: {' '.join(str(error).split())}") from error


@dataclass
class _Run:
    """What is known of a `generate`.

    prompt:     token ids that were passed, and mask with them
    from_start: whether its first call brings the text from its beginning, whatever the cache holds
    alone:      whether it brings new tokens alone
    most:       tokens that its text may come to, once that is known
    """

    prompt: Any = None
    mask: Any = None
    assistant: Any = None
    from_start: bool = False
    alone: bool = False
    most: int | None = None


class HuggingFaceCachedModel(CachedModel, GenerationMixin):
    """A rewritten `transformers` model; call it and generate from it as from the original."""

    main_input_name = "input_ids"
    base_model_prefix = "model"
    input_modalities = ("text",)
    _run = _Run()  # the `generate` that runs
    # Caches that one is at: what it calls (an assistant, a callback) needs another.
    _at_work: tuple[KVCache, ...] = ()

    def __init__(self, model: Any, program: Program, plan: Plan, executor: Executor):
        super().__init__(model, program, plan, executor)
        self.config = model.config

    @property
    def generation_config(self) -> Any:
        """The original's, also one that it is given later; or this module's own, once it has been given one."""
        own = self.__dict__.get("_own_generation_config")
        model: Any = self.model
        return model.generation_config if own is None else own

    @generation_config.setter
    def generation_config(self, config: Any) -> None:
        self.__dict__["_own_generation_config"] = config

    @not_compiled_again
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: CacheHandle | None = None,
        cache: CacheHandle | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `CachedModel.forward`, with arguments that the original also takes.

        Args:
            past_key_values: this module's own handle, or None, which is the same; or a fork of it.
            cache: another name of `past_key_values`.
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
        self._check_use_cache(use_cache)
        # A bool is an int to Python.
        if not isinstance(logits_to_keep, int) or isinstance(logits_to_keep, bool) or logits_to_keep < 0:
            raise InputError(f"logits_to_keep: expected a count of last tokens, got {logits_to_keep!r}")
        given = _one_cache(past_key_values=past_key_values, cache=cache)
        with self._at(given):
            if given is None and self.cache in self._at_work:
                raise InputError(_WRITTEN_OVER)
            if positions is not None:
                self._check_positions(input_ids, attention_mask, positions)
            flat = self._call(
                input_ids, attention_mask, keep=logits_to_keep or (1 if self.program.last else None)
            )
        output = self.program.rebuild(flat)
        if given is not None:
            output[_CACHE] = given
        if return_dict is False:
            return output.to_tuple()
        return output

    @alone
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's generate(): greedy, sampling, beams; see there for the arguments.

        It starts from an empty cache. With `past_key_values=fast.handle` (or a fork of it; `cache=` is the same) a
        whole text keeps what it has in common with what the cache holds, where the layout can step back; else it is
        computed anew. Tokens without the text before them go on where an attention_mask of all columns comes with
        them.

        Raises:
            InputError: what the cache inside cannot serve (inputs_embeds, another cache, assisted generation where the
                layout cannot step back); see also `CachedModel.forward`.
            LimitError: the prompt and what it asks for would not fit; nothing has been computed.
        """
        given = kwargs.get("input_ids") if inputs is None else inputs
        if given is not None:
            self._check_ids(given)
        mask = kwargs.get("attention_mask")
        if mask is not None:
            if not (isinstance(mask, Tensor) and mask.dim() == 2):
                got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
                raise InputError(f"attention_mask: expected a tensor [batch, tokens], got {got}")
            check_dense(mask, self.device)
        for name in ("num_beams", "num_return_sequences"):
            check_count(name, kwargs.get(name))
        streamer = kwargs.get("streamer")
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise InputError(f"streamer: expected one with put() and end(), got {type(streamer).__name__}")
        if kwargs.get("inputs_embeds") is not None:
            raise InputError("generate: this module takes input_ids, not inputs_embeds")
        config = kwargs.get("generation_config", args[0] if args else None)
        asked = kwargs.get("use_cache")
        self._check_use_cache(getattr(config, "use_cache", None) if asked is None else asked)
        # Under the name that transformers reads, so that it neither overlooks a cache nor warns of an old name.
        handle = _one_cache(**{name: kwargs.pop(name, None) for name in _NAMES})
        if handle is not None:
            kwargs[_CACHE] = handle
        if self.group is not None:
            self.group.share_randomness()
        assistant, before = kwargs.get("assistant_model"), (self._run, self._at_work)
        with self._at(handle) as own:
            if own.cache in self._at_work or (assistant is self and own is self.handle):
                raise InputError(_WRITTEN_OVER)
            self._run = _Run(given, mask, assistant)
            self._at_work = (*self._at_work, own.cache)
            try:
                return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]
            finally:
                self._run, self._at_work = before

    # What generate() is asked is checked by transformers, which raises of its own kinds.

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        with _asked():
            config, rest = super()._prepare_generation_config(*args, **kwargs)  # type: ignore[misc]
        check_options(config)
        # Some models' own configs say False (MPT), which nobody asked for; steps are one token long with a cache alone.
        config.use_cache = True
        return config, rest

    def _get_deprecated_gen_repo(self, generation_mode: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_mode(generation_mode)  # before transformers asks to trust code that it would load
        return super()._get_deprecated_gen_repo(generation_mode, *args, **kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        own = inspect.signature(self.forward).parameters
        taken = inspect.signature(self.model.forward).parameters
        others = sorted(
            name
            for name, value in model_kwargs.items()
            if value is not None and name in taken and name not in own and name != "position_ids"
        )
        if others:  # which transformers would call unused, or a typo
            raise InputError(
                f"generate: this module takes input_ids and attention_mask; it cannot honour: {', '.join(others)}. "
                "Call the original model"
            )
        with _asked():
            super()._validate_model_kwargs(model_kwargs)  # type: ignore[misc]

    def _validate_generated_length(self, *args: Any, **kwargs: Any) -> None:
        with _asked():
            super()._validate_generated_length(*args, **kwargs)  # type: ignore[misc]

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        with _asked():
            return super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
        with _asked():
            return super()._get_logits_processor(*args, **kwargs)  # type: ignore[misc]

    def _check_use_cache(self, use_cache: bool | None) -> None:
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

    def _check_mode(self, mode: Any) -> None:
        if mode not in (*_MODES, GenerationMode.ASSISTED_GENERATION):
            raise InputError(
                f"{mode.value}: this module has greedy search, sampling, beam search and assisted generation; call the "
                "original model"
            )

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, mode_kwargs: Any
    ) -> None:
        self._check_mode(generation_mode)
        super()._validate_generation_mode(  # type: ignore[misc]
            generation_mode, generation_config, mode_kwargs
        )

    # Whether a step back is impossible, as transformers calls it: see `_check_steps_back`, which knows how far.
    _is_stateful = False

    def most_tokens(self, cache: KVCache) -> int | None:
        return self._run.most if self._at_work and self._at_work[-1] is cache else None

    def _check_steps_back(self, tokens: int, whose: str) -> None:
        """Refuse guesses where they could not be taken back from a text of `tokens`."""
        back = self.cache.shape.back
        problem = back.problem(tokens)
        if problem is None:
            return
        recipe = (
            "a recipe that keeps every token by itself (also in sliding layers, retention: {kind: full}), "
        )
        recipe = "" if self.program.states else recipe  # no recipe changes what a model carries
        most = f" beyond {back.until} tokens, and this text may come to {tokens}" if back.until else ""
        raise InputError(
            f"assisted_generation: {whose} steps back in the text, and its cache cannot{most}: {problem}; use {recipe}"
            "greedy search, sampling, beams, or the original model"
        )

    def check_length(self, tokens: int) -> None:
        """Refuse a text of which so many tokens would be cached: prompt and new ones, but the last.

        Raises:
            LimitError: more than the limits.
        """
        limit = self.plan.limits.max_tokens
        if limit is not None and tokens > limit:
            raise LimitError(
                f"prompt and max_new_tokens come to {tokens} cached tokens, more than runtime.max_tokens {limit}: "
                "raise it in the recipe, ask for fewer tokens, or choose a bounded retention"
            )

    def _check_as_assistant(self, tokens: int) -> None:
        """Refuse to guess for a text of `tokens` that could not be held, or not stepped back in."""
        self._check_steps_back(tokens, "the assistant")
        limit = self.plan.limits.max_tokens
        if limit is not None and tokens > limit:
            raise LimitError(
                f"prompt and max_new_tokens come to {tokens} cached tokens, more than the assistant's "
                f"runtime.max_tokens {limit}: raise it in its recipe, or ask for fewer tokens"
            )

    def _get_candidate_generator(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers has it, but that no guess goes beyond `max_length`, which the cache has been asked for."""
        make: Any = super()._get_candidate_generator  # type: ignore[misc]
        generator = make(generation_config, *args, **kwargs)
        guess, most = generator.get_candidates, generation_config.max_length - 1

        def within(input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            ids, logits = guess(input_ids, *args, **kwargs)
            count = max(0, min(ids.shape[1], most) - input_ids.shape[1])
            return ids[:, : input_ids.shape[1] + count], None if logits is None else logits[:, :count]

        generator.get_candidates = within
        return generator

    def can_generate(self) -> bool:
        return True

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the original's checkpoint, weights and config: load that and optimize it again.

        The recipe is not in it; `kvcompile.export` writes what runs as it is.
        """
        self.check_alone("saved", ExportError)
        model: Any = self.model
        return model.save_pretrained(*args, **kwargs)

    def num_parameters(self, *args: Any, **kwargs: Any) -> int:
        """As the original's: its weights are all that there are."""
        model: Any = self.model
        return int(model.num_parameters(*args, **kwargs))

    def get_memory_footprint(self, *args: Any, **kwargs: Any) -> int:
        """Bytes of the original's weights and buffers; the cache has `cache.nbytes`."""
        model: Any = self.model
        return int(model.get_memory_footprint(*args, **kwargs))

    @property
    def name_or_path(self) -> str:
        return str(getattr(self.model, "name_or_path", ""))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not callable(getattr(self.__dict__.get("_modules", {}).get("model"), name, None)):
                raise
        raise MethodError(
            f"{name}() belongs to the original model: what it does would not reach the compiled graph or its cache; "
            f"call fast.model.{name}(..), and optimize again if it changes the model"
        )

    def _serves_no_batches(self, *args: Any, **kwargs: Any) -> Any:
        raise MethodError(
            "continuous batching of transformers has a cache of its own: kvcompile.serve.Engine(fast) answers requests "
            "that come and go over this one (docs/serving.md); generate() takes a batch"
        )

    generate_batch = init_continuous_batching = continuous_batching_context_manager = _serves_no_batches

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
        given = model_kwargs.get(_CACHE)
        handle = self.handle if given is None else self._checked_handle(given)
        rows = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if assisted and rows > 1:
            raise InputError(f"assisted_generation: it is for one sequence, got {rows}")
        run = self._run
        prompt, mask = run.prompt, run.mask  # transformers drops a mask of ones
        columns, known = self.cache.columns, isinstance(prompt, Tensor) and prompt.dim() == 2
        times = rows // len(prompt) if known else 1  # beams, or answers to one prompt
        made = model_kwargs.get("attention_mask") if mask is None and known else None
        if made is not None:  # by transformers, where pad_token_id stands in the prompt
            mask = made[::times]
        flat = isinstance(mask, Tensor) and mask.dim() == 2
        run.alone = False
        if given is None or not known or rows != self.cache.batch:
            kept = 0
        elif flat and columns and mask.shape[1] == columns + prompt.shape[1]:
            kept, run.alone = columns, True  # the mask says that these are the new tokens alone
        else:
            hides = mask.repeat_interleave(times, 0) if flat else None
            kept = handle.common(prompt.repeat_interleave(times, 0), hides)
        end = max_cache_length + (columns if run.alone else 0)
        self.check_length(end)
        self.cache.check_limits(rows, 1)
        if assisted or getattr(generation_config, "is_assistant", False):
            self._check_steps_back(end, "it" if assisted else "an assistant")
        if assisted and isinstance(run.assistant, HuggingFaceCachedModel):
            run.assistant._check_as_assistant(max_cache_length)
        if flat and not kept:
            try:
                check_prompt(self.cache, mask, mask, self.program.ragged)
            except InputError as error:
                if made is None:
                    raise
                raise InputError(
                    f"{error}. No attention_mask was passed, so pad_token_id is padding wherever it stands: pass one, "
                    "of ones where it is a token"
                ) from None
        self.cache.check_end(end, rows, mask, kept == columns > 0)
        handle.keep(kept)
        run.from_start = assisted and not run.alone
        run.most = end
        model_kwargs[_CACHE] = handle
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
        cache: Any = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The tokens that are not in the cache yet; of a prompt, only the last logits."""
        if next_sequence_length is not None and next_sequence_length < 1:
            raise InputError(
                f"generate: the cache holds {self.cache.columns} tokens, and the input has "
                f"{input_ids.shape[1]}: to go on, pass the whole conversation or only what is new; to start "
                f"over, leave out {_CACHE}"
            )
        # The prompt says where each sequence starts; what generate() adds is never padding.
        first = is_first_iteration or self.cache.columns == 0
        if next_sequence_length is None and first and self._run.from_start:
            next_sequence_length = input_ids.shape[1] - self.cache.columns
        new = input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
        total = self.cache.columns + new.shape[1]
        if self._run.alone and attention_mask is not None and attention_mask.shape[1] < total:
            # Assisted generation cuts the mask to the tokens that it has.
            ones = self._run.mask.new_ones(len(new), total - self._run.mask.shape[1])
            attention_mask = torch.cat([self._run.mask, ones], 1)
        # In transformers 5.17 nothing tells a later chunk of a prompt (prefill_chunk_size) from what is added.
        if attention_mask is not None and new.shape[1] > 1:
            first = first or attention_mask.shape[1] == total
        given = None if position_ids is None or not first else position_ids[..., -new.shape[1] :]
        return {
            "input_ids": new.contiguous(),
            "attention_mask": attention_mask if first else None,
            "position_ids": given,
            _CACHE: _one_cache(past_key_values=past_key_values, cache=cache),
            "logits_to_keep": 1,
        }


class _AnyConfig:
    """Stands for the config of whatever was optimized."""


# pipeline() looks up there what it may run, and complains at length of what it does not find.
MODEL_FOR_CAUSAL_LM_MAPPING.register(_AnyConfig, HuggingFaceCachedModel)  # type: ignore[arg-type]
