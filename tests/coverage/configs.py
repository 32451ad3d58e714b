"""Tiny configurations of every causal-LM type, made from the defaults of their config classes.

Nothing here is known to kvcompile: it is test data. Sizes are set by the names that configs use for them, and
what a type needs beside that stands in `SPECIAL`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.coverage.sizes import BELOW, PIECE, PIECES, SEEN, TABLE, TABLES, seen


@dataclass(frozen=True)
class Size:
    """Stands in `SPECIAL` for the value of a size of `SEEN`."""

    name: str


@dataclass
class Sizes:
    """Values of sizes, and which of them a config has."""

    values: Mapping[str, Any]
    used: set[str] = field(default_factory=set)

    def value(self, name: str) -> Any:
        self.used.add(name)
        return self.values[name]


# Common names of sizes, and what they become where a config has them as an integer.
SIZES: dict[str, Any] = {
    **seen(BELOW),
    **dict.fromkeys(PIECES, PIECE),
    **dict.fromkeys(TABLES, TABLE),
    "vocab_size": 61,
    "hidden_size": 48,
    "d_model": 48,
    "n_embd": 48,
    "emb_dim": 48,
    "word_embed_proj_dim": 48,
    "embedding_size": 48,
    "input_embedding_size": 48,
    "output_embedding_size": 48,
    "embedding_dim": 48,
    "lru_width": 48,
    "intermediate_size": 56,
    "decoder_ffn_dim": 56,
    "encoder_ffn_dim": 56,
    "ffn_dim": 56,
    "dim_ff": 56,
    "dff": 56,
    "d_inner": 56,
    "ffn_hidden_size": 56,
    "expert_ffn_hidden_size": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_experts_intermediate_size": 24,
    "dense_intermediate_size": 56,
    "intermediate_size_mlp": 56,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_blocks": 2,
    "num_attention_heads": 6,
    "n_head": 6,
    "n_heads": 6,
    "num_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_attention_heads": 6,
    "num_decoder_attention_heads": 6,
    "num_encoder_attention_heads": 6,
    "attention_heads": 6,
    "swa_num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "num_query_groups": 2,
    "swa_num_key_value_heads": 2,
    "head_dim": 8,
    "swa_head_dim": 8,
    "global_head_dim": 8,
    "kv_channels": 8,
    "dim_head": 8,
    "d_head": 8,
    "rotary_dim": 8,
    "attention_head_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_block_size": 4,
    "index_n_heads": 12,  # few enough exact ties (all heads at zero) between which a topk may choose
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 0,
    "mamba_n_heads": 6,
    "mamba_num_heads": 6,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "n_groups": 1,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_expand": 2,
    "mamba_d_ssm": 96,
    "n_mamba_heads": 2,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 8,
    "query_pre_attn_scalar": 8,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "decoder_start_token_id": 1,
    "pronunciation_vocab_size": 61,
    "shape_vocab_size": 61,
    "decoder_vocab_size": 61,
    "prompt_length": 4,
    "adapter_rank": 8,
    "num_mem_blocks": 1,
    "router_hidden_size": 16,
    "d_rel": 8,
    "gated_norm_rank": 8,
    "unpadded_vocab_size": 61,
    "type_vocab_size": 2,
}
# Parts of a composite config that carry the decoder.
PARTS = ("text_config", "decoder", "decoder_config")

_CONV = ("conv", "full_attention")
_LINEAR = ("linear_attention", "full_attention")
_WINDOW = ("sliding_attention", "full_attention")
_INDEXED = ("indexed_attention", "indexed_attention")
_SHARED = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
# Kinds of layers, where the default of the config would give one kind only, or the wrong number.
LAYERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("afmoe", "beam", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "exaone4"), _WINDOW
    ),
    **dict.fromkeys(("dots1", "exaone_moe", "flint", "gemma2", "gemma3", "gemma3_text", "gpt_oss"), _WINDOW),
    **dict.fromkeys(
        ("granite_swa", "granitemoe_swa", "kolibri1", "laguna", "mellum", "mimo_v2_flash"), _WINDOW
    ),
    **dict.fromkeys(("ministral", "modernbert-decoder", "olmo3", "vaultgemma"), _WINDOW),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), _SHARED),
    **dict.fromkeys(("bailing_hybrid", "granitemoehybrid", "kimi_linear", "minimax", "olmo_hybrid"), _LINEAR),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _LINEAR),
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), _INDEXED),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), ("indexed_attention", "sliding_attention")),
    **dict.fromkeys(("inkling_text", "inkling2_text", "zaya"), ("hybrid_sliding", "hybrid")),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONV),
    "lfm3": ("conv", "sliding_attention", "full_attention"),
    "llama4_text": ("chunked_attention", "full_attention"),
    "deepseek_v4": ("heavily_compressed_attention", "compressed_sparse_attention"),
    "minimax_m3_vl_text": ("full_attention", "full_attention"),
    "qwen4_exp": ("linear_attention", "indexed_attention"),
    "qwen4_exp_text": ("linear_attention", "indexed_attention"),
}
# Encoders that are decoders when they are told to.
_BIDIRECTIONAL = [
    *(
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
    ),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl"),
    *("xmod", "reformer"),
]
_TINY_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_TINY_BYTES = {"vocab_size": 260, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 1} | {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 8,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {
        "vocab_size": 260,
        "encoder_hash_byte_group_vocab": 64,
        "patcher_config": _TINY_BYTES,
        "global_config": _TINY_BYTES,
        "encoder_config": _TINY_BYTES | {"hidden_size_global": 48},
        "decoder_config": _TINY_BYTES | {"hidden_size_global": 48},
    },
    **{name: {"is_decoder": True} for name in _BIDIRECTIONAL},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "mimo_v2_flash": {"v_head_dim": 8, "num_key_value_heads": 3},  # sliding layers have twice as many
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"is_decoder": True, "attention_type": "original_full", "block_size": 64},
    "bigbird_pegasus": {"block_size": 64},  # of an encoder; block-sparse attention sees the future
    "deepseek_v4": {
        "index_topk": Size("index_topk_compressed"),
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    **{name: {"num_kv_shared_layers": 2} for name in ("gemma4_text", "gemma4_unified_text")},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 24, "swa_head_dim": 24},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "intermediate_size": 56,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]} for kind in _WINDOW
        }
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1, "num_chroma": 4, "chroma_length": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "codegen": {"n_head": 4, "n_embd": 32, "rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "llama4_text": {
        "no_rope_layers": [1, 0]
    },  # as larger ones have it: full attention, no RoPE, a temperature
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": Size("llama_4_scaling"),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "zaya": {"num_experts_per_tok": 1, "sliding_window": Size("sliding_window")},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4}
    | {"attention_hidden_size": 96, "attention_head_dim": 16, "num_key_value_heads": 6, "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4}
    | {"attention_head_dim": 16, "num_key_value_heads": 6, "n_mamba_heads": 6, "mamba_headdim": 16},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "mlp", "full_attention"]},
    "mamba2": {"num_heads": 6, "head_dim": 16},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}}
    | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 48}},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"),
        {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": Size("indexer_budget"),
        }
        | {
            "indexer_compress_ratio": 2,
            "ple_embed_dim": 16,
            "ngram_vocab_size_base": 64,
            "split_ngram_parts": 2,
        },
    ),
    "phi4_multimodal": {
        "vision_config": {**_TINY_VISION, "image_size": 28, "patch_size": 14, "crop_size": 28},
        "audio_config": {**_TINY_VISION, "num_blocks": 1, "ext_pw_out_channel": 16}
        | {"depthwise_separable_out_channel": 16, "nemo_conv_channels": 16},
    },
    "got_ocr2": {"vision_config": {**_TINY_VISION, "output_channels": 8, "image_size": 32, "mlp_dim": 16}},
    "moss_transcribe_diarize": {"audio_config": _TINY_VISION},
    "dots3_note": {
        "per_layer_config": {},
        "vision_config": {
            **_TINY_VISION,
            "per_layer_config": {},
            "adapter_in_dim": 16,
            "adapter_out_dim": 48,
            "num_local_experts": 2,
        }
        | {"moe_intermediate_size": 16},
        "audio_config": {
            **_TINY_VISION,
            "per_layer_config": {},
            "adapter_input_size": 16,
            "adapter_out_dim": 48,
            "head_dim": 8,
        }
        | {"num_key_value_heads": 2, "downsample_hidden_size": 8, "conv_output_size": 128},
    },
    "gemma3": {"vision_config": {**_TINY_VISION, "image_size": 28, "patch_size": 14}},
    "git": {"vision_config": {**_TINY_VISION, "image_size": 28, "patch_size": 14}},
}


def tiny_config(model_type: str, sizes: Sizes | None = None, changes: Mapping[str, Any] | None = None) -> Any:
    """The config of a type, tiny.

    sizes:   instead of `SIZES`; notes which of them the config has
    changes: to the defaults of the type's config class
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _shrink(CONFIG_MAPPING[model_type], model_type, sizes or Sizes(SIZES), changes or {})


def _shrink(cls: Any, model_type: str, sizes: Sizes, more: Mapping[str, Any]) -> Any:
    special = {**SPECIAL.get(model_type, {}), **more}
    base = special.get("__base__", {})
    defaults = cls(**base).to_dict()
    changes: dict[str, Any] = dict(base)
    layers = LAYERS.get(model_type)
    for name, value in defaults.items():
        if name in special and (name in SEEN or name in PIECES):
            continue
        if (
            name in sizes.values
            and (isinstance(value, (int, float)) or value is None)
            and not isinstance(value, bool)
        ):
            if value is None and name not in ("head_dim", "num_key_value_heads", "pad_token_id"):
                continue
            changes[name] = sizes.value(name)
        elif name in PARTS and isinstance(value, dict) and value.get("model_type"):
            from transformers.models.auto.configuration_auto import CONFIG_MAPPING

            if value["model_type"] in CONFIG_MAPPING:
                part = _shrink(CONFIG_MAPPING[value["model_type"]], value["model_type"], sizes, {})
                changes[name] = part.to_dict()
    if layers:
        changes |= {"num_hidden_layers": len(layers), "layer_types": list(layers)}
    if "mlp_layer_types" in defaults:  # one of each kind
        kinds = list(dict.fromkeys(defaults["mlp_layer_types"]))
        count = changes["num_hidden_layers"]
        changes["mlp_layer_types"] = (
            (["dense", "sparse"] * count)[:count] if "dense" in kinds else (kinds * count)[:count]
        )
    if "kv_lora_rank" in changes and "num_key_value_heads" in changes:
        changes["num_key_value_heads"] = changes["num_attention_heads"]  # as latent attention has it
    changes |= {key: _sized(value, sizes) for key, value in special.items() if not key.startswith("__")}
    changes = {key: value for key, value in changes.items() if value != "__default__"}
    return cls(**changes)


def _sized(value: Any, sizes: Sizes) -> Any:
    """The value with numbers for all `Size`."""
    if isinstance(value, dict):
        return {key: _sized(part, sizes) for key, part in value.items()}
    return sizes.value(value.name) if isinstance(value, Size) else value


def tiny_model(
    model_type: str,
    attn: str | None = None,
    sizes: Sizes | None = None,
    changes: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A seeded random model in eval mode whose every parameter matters (none is zero, none is tiny).

    sizes, changes: as in `tiny_config`
    """
    import transformers

    config = tiny_config(model_type, sizes, changes)
    cls: Any = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, cls.config_class):  # the class wants the decoder of a composite config
        parts = [getattr(config, name, None) for name in PARTS]
        config = next((part for part in parts if isinstance(part, cls.config_class)), config)
    torch.manual_seed(0)
    kwargs = {} if attn is None else {"attn_implementation": attn}
    model = cls._from_config(config, **kwargs).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    return model


def all_types() -> list[str]:
    """Every causal-LM type of the installed release, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
