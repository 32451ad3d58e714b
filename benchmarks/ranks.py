"""A model on 1 and 2 ranks: kvcompile's tensor parallel beside transformers' own (`tp_plan="auto"`), in one run.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --ranks 1,2 --context 512 --rounds 7

A Llama of 8 query and 4 KV heads with random weights is on each number of ranks in turn, by processes of this machine
with one thread each, over gloo. Forms take turns; the table has medians: a prompt, and a step after it. On one machine
ranks share its memory bandwidth, so twice the ranks are twice the cores and not twice the bandwidth. The least that a
step sends is told beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compile_time import machine, write

CONFIG = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
STEPS = 8


def ours(folder: str, ranks: int, context: int) -> Any:
    from transformers import AutoModelForCausalLM

    import kvcompile

    parallel = {"tensor": ranks} if ranks > 1 else None
    model = AutoModelForCausalLM.from_pretrained(folder)
    fast = kvcompile.optimize(model, "baseline", parallel=parallel, max_batch=1, max_tokens=context + 64)
    fast.prepare(1, 2), fast.prepare(1, 1)
    return fast


def theirs(folder: str, ranks: int) -> Any:
    from transformers import AutoModelForCausalLM

    plan = {"tp_plan": "auto"} if ranks > 1 else {}
    return AutoModelForCausalLM.from_pretrained(folder, **plan).eval()


def turn_of(name: str, model: Any, ids: Any) -> tuple[float, float, Any]:
    """Milliseconds of a prompt and of a step after it, and the last step's logits."""
    if name == "kvcompile":
        model.reset()
        began = time.perf_counter()
        model(ids, logits_to_keep=1)
        more = {}
    else:
        began = time.perf_counter()
        more = {"past_key_values": model(ids, use_cache=True, logits_to_keep=1).past_key_values}
    then = time.perf_counter()
    for _ in range(STEPS):
        out = model(ids[:, :1], **more)
    return 1e3 * (then - began), 1e3 * (time.perf_counter() - then) / STEPS, out.logits


def rank(options: argparse.Namespace) -> None:
    """One process of torchrun, or the only one; rank 0 prints what it measured."""
    import torch

    torch.set_num_threads(1)
    number = int(os.environ.get("RANK", 0))
    models = {
        "transformers": theirs(options.folder, options.only),
        "kvcompile": ours(options.folder, options.only, options.context),
    }
    ids = torch.arange(options.context)[None] % CONFIG["vocab_size"]
    found: dict[str, dict[str, list[float]]] = {name: {"prompt": [], "step": []} for name in models}
    last: dict[str, Any] = {}
    with torch.inference_mode():
        for turn in range(options.rounds + 1):
            for name, model in models.items():
                prompt, step, last[name] = turn_of(name, model, ids)
                if turn:  # the first one warms up
                    found[name]["prompt"].append(prompt)
                    found[name]["step"].append(step)
    first, second = (last[name].float() for name in models)
    apart = float((first - second).abs().max() / second.abs().max())
    if number == 0:
        medians = {
            name: {what: statistics.median(ms) for what, ms in each.items()} for name, each in found.items()
        }
        print("RESULT " + json.dumps({"ranks": options.only, "apart": apart, "ms": medians}), flush=True)


def measured(options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    own = [
        str(Path(__file__).resolve()),
        "--folder",
        folder,
        "--context",
        str(options.context),
        "--rounds",
        str(options.rounds),
    ]
    found = []
    for ranks in options.ranks:
        start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        done = subprocess.run(
            [sys.executable, *start, *own, "--only", str(ranks)], capture_output=True, text=True, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not lines:
            raise SystemExit(f"{ranks} ranks: {done.stderr[-2000:]}")
        found.append(json.loads(lines[0].removeprefix("RESULT ")))
        said = ", ".join(
            f"{name} {ms['prompt']:.0f} / {ms['step']:.1f}" for name, ms in found[-1]["ms"].items()
        )
        print(f"{ranks} ranks, ms of a prompt / a step: {said}", file=sys.stderr)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="a name in benchmarks/results, or a path")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.only:
        rank(options)
        return 0
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
        rows = measured(options, folder)
    print(f"{'ranks':>5} {'form':<13} {'prompt ms':>10} {'step ms':>8}")
    for row in rows:
        for name, ms in row["ms"].items():
            print(f"{row['ranks']:>5} {name:<13} {ms['prompt']:>10.1f} {ms['step']:>8.2f}")
    if options.out:
        path = write(
            {"machine": machine(), "config": CONFIG, "context": options.context, "rows": rows}, options.out
        )
        print(f"written to {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
