"""Decode steps of models whose layers keep recurrent state: their modules compiled, in Python, and by transformers.

    python benchmarks/python_step.py --out python_step
    python benchmarks/python_step.py --models bamba --dtypes bfloat16

Random models, 512 wide, of eight layers, of which seven keep recurrent state and one attends; one new token after 64.
All three stand in one process and take turns; figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from compile_time import machine, write

LAYERS, WIDTH, VOCABULARY = 8, 512, 8000
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 1408,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LINEAR = ["linear_attention"] * (LAYERS - 1) + ["full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "jamba": {
        "attn_layer_period": LAYERS,
        "attn_layer_offset": LAYERS - 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "use_mamba_kernels": False,
    },
    "bamba": {
        "attn_layer_indices": [LAYERS - 1],
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
    },
    "qwen3_next": {
        "layer_types": _LINEAR,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "head_dim": 64,
    },
    "lfm2": {"layer_types": ["conv"] * (LAYERS - 1) + ["full_attention"]},
}


def random_model(name: str, dtype: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES, **MODELS[name])
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


def measured(name: str, dtype: str, rounds: int, tokens: int) -> dict[str, Any]:
    """A row: milliseconds of a step, and what compiling has taken."""
    import torch

    import kvcompile
    from kvcompile.compile.python_step import Step

    model = random_model(name, dtype)
    fast: Any = kvcompile.optimize(model, max_tokens=64 * (2 + 2 * rounds * tokens // 64 + 1), verify="off")
    ids = torch.randint(3, VOCABULARY, (1, 64), generator=torch.Generator().manual_seed(0))
    fast(ids)
    one = ids[:, :1]
    fast(one)
    ((shapes, programs),) = [
        (shapes, list(programs))
        for shapes, programs in fast.executor.programs.items()
        if shapes.tokens_is_one
    ]
    steps = [each for each in programs if isinstance(each, Step)]
    python = [each.region if isinstance(each, Step) else each for each in programs]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values

    def ours(run: Any) -> Callable[[], object]:
        def step() -> object:
            fast.executor.take(shapes, run)
            return fast(one)

        return step

    def theirs() -> object:
        with torch.no_grad():
            return model(one, past_key_values=cache)

    variants = {"compiled": ours(programs), "python": ours(python), "transformers": theirs}
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, step in variants.items():
            step()
            for _ in range(tokens):
                began = time.perf_counter()
                step()
                times[variant].append(time.perf_counter() - began)
    took = {variant: statistics.median(each) * 1e3 for variant, each in times.items()}
    return {
        "model": name,
        "dtype": dtype,
        "modules": len(steps),
        "programs": len({id(step.compiled) for step in steps}),
        **{f"{variant}_ms": round(value, 2) for variant, value in took.items()},
        "over_python": round(took["python"] / took["compiled"], 2),
        "over_transformers": round(took["transformers"] / took["compiled"], 2),
        "step_seconds": round(sum(fast.executor.step_seconds.values()), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=5, help="of a turn")
    parser.add_argument(
        "--out", default="", help="name of the JSON in benchmarks/results; none: it is printed"
    )
    options = parser.parse_args()
    rows = []
    for name in options.models.split(","):
        for dtype in options.dtypes.split(","):
            rows.append(measured(name, dtype, options.rounds, options.tokens))
            print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if options.out:
        print(write({"machine": machine(), "rows": rows}, options.out))


if __name__ == "__main__":
    main()
