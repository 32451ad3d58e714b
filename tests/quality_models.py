"""A tiny Llama that is sure of what it says, and a tokenizer of bytes: for the tests of `kvcompile.quality`."""

from __future__ import annotations

from typing import Any

import torch

TEMPLATE = (
    "{% for message in messages %}<user>{{ message['content'] }}</user>{% endfor %}"
    "{% if add_generation_prompt %}<model>{% endif %}"
)


def byte_tokenizer(chat: bool = True) -> Any:
    """One token per byte, "<s>" before a text; `chat`: with a chat template."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({token: i for i, token in enumerate([*special, *letters])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def sure_llama(**changes: Any) -> Any:
    """Large random weights: distributions far from uniform, which every key changes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
