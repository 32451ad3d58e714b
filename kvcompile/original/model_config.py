"""The K/V shapes of a model, read from its config alone: no weights, no tracing.

| config says | a layer's shape |
|---|---|
| num_key_value_heads, head_dim (or hidden_size / num_attention_heads) | that many KV heads of that size |
| kv_lora_rank, qk_rope_head_dim (MLA) | a latent row of rank + rope channels, whose first rank are the values |
| layer_types, sliding_window, attention_chunk_size | sliding and chunked layers; none for other mixers |
| num_kv_shared_layers | the last layers read the K/V of an earlier one of their type |
| per_layer_config | each layer its own numbers |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcompile.errors import ModelError
from kvcompile.specs import MaskSpec, SiteShape
from kvcompile.util.console import shown

# Names that configs give one thing. transformers maps most of them itself; plain dicts come as they are.
_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_kv_heads"),
    "sliding_window": ("window_size", "attention_window_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
    "layer_types": ("layers_block_type", "attention_layers"),
    "dtype": ("torch_dtype",),
}
_NO_ATTENTION = ("linear_attention", "conv", "moe", "mlp", "mamba", "mamba2", "recurrent", "sparse", "dense")
# Newer transformers have the first name for all of them.
_INDEXED = ("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")
_CAUSAL = ("full_attention", "attention", "global", "hybrid", *_INDEXED)
_SLIDING = ("sliding_attention", "hybrid_sliding", "local")
_CHUNKED = ("chunked_attention",)
_MOST_LAYERS = 10_000
_MOST = 1 << 31  # of anything else that is counted
# What transformers calls the kinds of models that continue a text.
_GENERATE = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
_DTYPES = {
    "float32": ("float32", "fp32", "float"),
    "float16": ("float16", "fp16", "half"),
    "bfloat16": ("bfloat16", "bf16"),
}


@dataclass(frozen=True, kw_only=True)
class LayerShape(SiteShape):
    """The shape of one layer's attention, as its config says it.

    num_qo_heads: as many as there are KV heads where the config names no query heads
    latent:       MLA only: channels of a latent row, and how many of them are the values
    """

    layer: int
    kv_source: int  # the layer whose K/V this one reads (its own unless shared)
    latent: tuple[int, int] | None = None


@dataclass(frozen=True)
class ModelShape:
    """What a KV cache needs to know of a model.

    layers:            those with attention, in order
    num_layers:        all of them
    dtype:             "bfloat16", ...; None where the config names none
    max_tokens:        the longest sequence the model was made for, where known
    """

    name: str
    layers: tuple[LayerShape, ...]
    num_layers: int
    dtype: str | None
    max_tokens: int | None
    notes: tuple[str, ...]


def dtype_name(dtype: object) -> str:
    """ "float32", "float16" or "bfloat16" for any usual spelling or a torch.dtype.

    Raises:
        ModelError: none of these.
    """
    text = str(dtype).removeprefix("torch.").lower()
    for name, spellings in _DTYPES.items():
        if text in spellings:
            return name
    raise ModelError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")


def model_shape(config: object) -> ModelShape:
    """Read the shapes from a transformers config or a dict of one (both may nest a `text_config`).

    Raises:
        ModelError: no decoder's; or a field is missing or makes no sense: all of these are named.
    """
    _check_decoder(config)
    return _Reader(_text_config(config), outer=config).read()


def _text_config(config: object) -> object:
    if not isinstance(config, Mapping):
        pick = getattr(config, "get_text_config", None)
        return pick(decoder=True) if callable(pick) else config
    known = as_transformers(config)
    if known is not None:
        return _text_config(known)
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _check_decoder(config: object) -> None:
    """Refuse a config of transformers whose kind of model does not continue a text.

    Raises:
        ModelError: it is for something else, or looks both ways.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as tasks

    name = _get(config, "model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        return
    known = as_transformers(config) if isinstance(config, Mapping) else config
    if _get(known, "is_encoder_decoder"):
        raise ModelError(f"{name}: an encoder-decoder model; kvcompile is for decoders")
    of = {
        task.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES"): getattr(tasks, task)
        for task in vars(tasks)
        if task.startswith("MODEL_FOR_") and task.endswith("_MAPPING_NAMES")
    }
    serves = [task for task, models in of.items() if name in models]
    if serves and not any(task in _GENERATE for task in serves):
        kinds = ", ".join(task.lower().replace("_", " ") for task in serves[:3])
        raise ModelError(
            f"{name}: a model for {kinds}, which continues no text; kvcompile is for decoders (causal language models)"
        )
    if "MASKED_LM" in serves and _get(known, "is_decoder") is False:
        raise ModelError(
            f"{name}: with is_decoder: false its tokens see those after them, so there is no KV cache to choose; "
            "kvcompile is for decoders"
        )


def as_transformers(config: Mapping[str, Any]) -> Any | None:
    """The transformers config of a dict, with its class's defaults; None for an unknown model_type.

    Raises:
        ModelError: transformers refuses the values.
    """
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    try:
        return CONFIG_MAPPING[model_type].from_dict(dict(config))
    except Exception as error:  # each config class checks in its own way
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"config of model_type {model_type!r} is not valid: {reason}") from error


class _Reader:
    """Reads one (text) config; collects what is missing so that all of it is reported at once."""

    def __init__(self, config: object, outer: object) -> None:
        self.config = config
        self.outer = outer
        self.missing: list[str] = []
        self.wrong: list[str] = []

    def read(self) -> ModelShape:
        name = str(_get(self.outer, "model_type") or type(self.outer).__name__)
        if _get(self.config, "is_encoder_decoder"):
            raise ModelError(f"{name}: an encoder-decoder model; kvcompile is for decoders")
        types = _get(self.config, "layer_types")
        types = list(types) if isinstance(types, (list, tuple)) else None
        count = self._number(self.config, "num_hidden_layers", most=_MOST_LAYERS)
        if count is None:
            count = len(types) if types else self._miss("num_hidden_layers")
        if types is not None and len(types) != count:
            raise ModelError(f"{name}: layer_types has {len(types)} entries for {count} layers")
        if types is None:
            types = ["sliding_attention" if _get(self.config, "sliding_window") else "full_attention"] * count
        shared = self._number(self.config, "num_kv_shared_layers", least=0, most=count) or 0
        layers = []
        for layer, kind in enumerate(types):
            if (shape := self._layer(layer, str(kind), types, count - shared)) is not None:
                layers.append(shape)
        made_for = self._number(self.config, "max_position_embeddings")
        if self.wrong:
            raise ModelError(f"config of {name}: {'; '.join(dict.fromkeys(self.wrong))}")
        if self.missing:
            fields = ", ".join(dict.fromkeys(self.missing))
            raise ModelError(
                f"config of {name}: cannot tell the KV shapes; missing: {fields}. Add them, or give the model"
            )
        if not layers:
            raise ModelError(f"{name}: no layer has attention, so there is no KV cache to choose")
        return ModelShape(
            name=name,
            layers=tuple(layers),
            num_layers=count,
            dtype=self._dtype(),
            max_tokens=made_for,
            notes=self._notes(types, len(layers), shared),
        )

    def _layer(self, layer: int, kind: str, types: list[Any], first_shared: int) -> LayerShape | None:
        if kind in _NO_ATTENTION:
            return None
        if kind not in (*_CAUSAL, *_SLIDING, *_CHUNKED):
            known = ", ".join((*_CAUSAL, *_SLIDING, *_CHUNKED, *_NO_ATTENTION))
            raise ModelError(f"layer_types[{layer}]: the cache of {kind!r} is not known here; known: {known}")
        config = self._config_of(layer)
        mask = MaskSpec("causal")
        if kind in _SLIDING:
            mask = MaskSpec("sliding", self._number(config, "sliding_window") or self._miss("sliding_window"))
        if kind in _CHUNKED:
            size = self._number(config, "attention_chunk_size") or self._miss("attention_chunk_size")
            mask = MaskSpec("chunked", size)
        heads, head_dim, v_head_dim = self._dims(config, layer)
        if heads == 0:
            return None
        source = layer
        if layer >= first_shared:
            source = max((i for i in range(first_shared) if types[i] == kind), default=layer)
        return LayerShape(
            num_qo_heads=self._number(config, "num_attention_heads", least=0, layer=layer) or heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            mask=mask,
            layer=layer,
            kv_source=source,
            latent=self._latent(config),
        )

    def _config_of(self, layer: int) -> object:
        if isinstance(self.config, Mapping) or not getattr(self.config, "is_heterogeneous", False):
            return self.config
        own: object = self.config.per_layer_config[layer]  # type: ignore[attr-defined]
        return own

    def _dims(self, config: object, layer: int) -> tuple[int, int, int]:
        """num_kv_heads, head_dim, v_head_dim of a layer; heads 0: no attention there."""
        if (latent := self._latent(config)) is not None:
            fields = ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            heads, nope, rope, values = (self._number(config, field, least=0) for field in fields)
            if heads is None or nope is None or rope is None or values is None:
                return 1, *latent
            return heads, nope + rope, values
        qo_heads = self._number(config, "num_attention_heads", least=0, layer=layer)
        kv_heads = self._number(config, "num_key_value_heads", least=0, layer=layer)
        if _get(config, "multi_query") and not _get(config, "new_decoder_architecture"):
            kv_heads = 1  # Falcon, GPTBigCode
        if kv_heads is None:
            kv_heads = (
                qo_heads if qo_heads is not None else self._miss("num_key_value_heads or num_attention_heads")
            )
        head_dim = self._number(config, "head_dim", least=0)
        if not head_dim:
            hidden = self._number(config, "hidden_size")
            if hidden and qo_heads:
                head_dim = hidden // qo_heads
            else:
                head_dim = self._miss("head_dim or hidden_size with num_attention_heads")
        return kv_heads, head_dim, self._number(config, "v_head_dim", least=0) or head_dim

    def _latent(self, config: object) -> tuple[int, int] | None:
        """Channels of a latent row, and the rank; None without MLA."""
        rank = self._number(config, "kv_lora_rank", least=0)
        if not rank:
            return None
        rope = self._number(config, "qk_rope_head_dim", least=0)
        return rank + (rope if rope is not None else self._miss("qk_rope_head_dim")), rank

    def _dtype(self) -> str | None:
        dtype = _get(self.config, "dtype") or _get(self.outer, "dtype")
        try:
            return None if dtype is None else dtype_name(dtype)
        except ModelError:
            return None  # a checkpoint in fp8 or the like computes in something else

    def _notes(self, types: list[Any], attending: int, shared: int) -> tuple[str, ...]:
        notes = []
        if attending < len(types):
            others = (
                ", ".join(sorted({str(kind) for kind in types if kind in _NO_ATTENTION})) or "no KV heads"
            )
            notes.append(
                f"{len(types) - attending} of {len(types)} layers have no KV cache ({others}); "
                "what state they keep is not counted"
            )
        if shared:
            notes.append(f"the last {shared} layers read the K/V of earlier layers and add none")
        if any(kind in _INDEXED for kind in types):
            notes.append("the keys of the sparse-attention indexer are not counted")
        return tuple(notes)

    def _number(
        self, config: object, field: str, least: int = 1, most: int = _MOST, layer: int | None = None
    ) -> int | None:
        """A whole number, of this layer where there is one for each; None if absent, or noted as wrong."""
        value = _get(config, field)
        if layer is not None and isinstance(value, (list, tuple)):
            value = value[layer] if layer < len(value) else None
        if value is None or (
            isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        ):
            return value
        if isinstance(value, float) and value.is_integer() and least <= value <= most:
            return int(value)  # as some configs have them
        self.wrong.append(f"{field}: expected a whole number from {least} to {most:,}, got {shown(value)}")
        return None

    def _miss(self, field: str) -> int:
        self.missing.append(field)
        return 1


def _get(config: object, field: str) -> Any:
    """A field by its name or one of its aliases; None if absent."""
    names = (field, *_ALIASES.get(field, ()))
    if isinstance(config, Mapping):
        return next((config[name] for name in names if config.get(name) is not None), None)
    for name in names:
        try:
            return getattr(config, name)
        except AttributeError:
            continue
        except Exception:  # heterogeneous configs refuse a global value that layers differ in
            return None
    return None
