"""For the tests of `kvcompile.quality`: a tiny Llama that is sure of what it says, a tokenizer of bytes, and a text."""

from __future__ import annotations

from typing import Any

import torch

TEXT = "".join(
    f"The {i}th bird of the {'big' if i % 3 else 'small'} tree sings {i * 7} songs. " for i in range(60)
)
WINDOW = {"name": "window", "cache": {"retention": {"kind": "window", "size": 24}}}
SINKS = {"name": "sinks", "cache": {"retention": {"kind": "sink_window", "sinks": 3, "window": 21}}}
SCORED: dict[str, Any] = {"metrics": ("perplexity",), "prompt": 40, "tokens": 80}
HIDDEN: dict[str, Any] = {
    "metrics": ("needle",),
    "needle_tokens": (160,),
    "depths": (0, 0.5, 1),
    "needles": 1,
}
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
