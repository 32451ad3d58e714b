"""What decode.py measures in its own process: kvcompile with a recipe, and transformers with its caches."""

from __future__ import annotations

import time
from typing import Any, Protocol


class Variant(Protocol):
    """A model with a cache of its own. `prefill` starts anew; both give the next token, [1, 1] int64."""

    def prefill(self, tokens: Any) -> Any: ...
    def step(self, token: Any) -> Any: ...
    def free(self) -> None: ...
    def cache_bytes(self) -> int: ...
    def read_bytes(self, context: int) -> int:
        """Bytes of cache that one token must read with `context` tokens before it."""
        ...


class Ours:
    """kvcompile with a recipe; one compilation for all contexts."""

    def __init__(self, model: Any, recipe: str, compiled: bool, progress: Any, **more: Any):
        import kvcompile

        more |= {} if compiled else {"compile": {"mode": "none"}}
        # Capture is the same for each recipe; what it proves is in the tests and in compile_time.py.
        self.fast: Any = kvcompile.optimize(model, recipe, verify="off", progress=progress, **more)
        self.fast.warmup(progress=progress)

    def prefill(self, tokens: Any) -> Any:
        self.fast.reset()
        return self.step(tokens)

    def step(self, token: Any) -> Any:
        return self.fast(input_ids=token, logits_to_keep=1).logits[:, -1:].argmax(-1)

    def free(self) -> None:
        self.fast.release()

    def cache_bytes(self) -> int:
        return int(self.fast.cache.nbytes)

    def read_bytes(self, context: int) -> int:
        plan = self.fast.plan
        return min(context * int(plan.bytes_per_token), int(plan.bytes(1)))


class Plain:
    """The model as transformers runs it, with its default cache or a compiled static one."""

    def __init__(
        self,
        model: Any,
        static_tokens: int | None = None,
        compiled: bool = True,
        mode: str | None = None,
    ):
        import torch

        self.model = self.decode = model
        self.static_tokens = static_tokens
        self.cache: Any = None
        if static_tokens is not None and compiled:
            self.decode = torch.compile(model.forward, dynamic=False, mode=mode)

    def prefill(self, tokens: Any) -> Any:
        from transformers import DynamicCache, StaticCache

        if self.static_tokens is None:
            self.cache = DynamicCache(config=self.model.config)
        elif self.cache is None:
            self.cache = StaticCache(config=self.model.config, max_cache_len=self.static_tokens)
        else:
            self.cache.reset()
        return self._call(self.model, tokens)

    def step(self, token: Any) -> Any:
        return self._call(self.decode, token)

    def _call(self, forward: Any, tokens: Any) -> Any:
        import torch

        with torch.no_grad():
            output = forward(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1)

    def free(self) -> None:
        self.cache = None

    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)

    def read_bytes(self, context: int) -> int:
        text = self.model.config.get_text_config()
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        slot = 2 * text.num_hidden_layers * text.num_key_value_heads * dim * self.model.dtype.itemsize
        return int(slot * context)


def make(name: str, model: Any, room: int, compiled: bool, progress: Any) -> Variant:
    """`room`: tokens that a static cache must hold."""
    if name == "dynamic":
        return Plain(model)
    if name == "static":
        return Plain(model, room, compiled)
    return Ours(model, name, compiled, progress)


class InProcess:
    """A variant as rounds have it: what a prompt and some tokens take, in seconds."""

    def __init__(self, variant: Variant):
        self.variant = variant
        self.token: Any = None

    def prompt(self, tokens: Any) -> float:
        began = time.perf_counter()
        self.token = self.variant.prefill(tokens)
        self.token.item()
        return time.perf_counter() - began

    def steps(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self.token = self.variant.step(self.token)
        self.token.sum().item()
        return time.perf_counter() - began
