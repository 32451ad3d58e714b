"""Exports SmolLM2 with the KV cache of a recipe, and generates from the artifacts beside the compiled module.

    python examples/export.py
    python examples/export.py --target onnx --target tensorrt --recipe streaming_int8 --out artifacts/

Every artifact answers the same prompt greedily; the table says whether the tokens are those of the compiled module, and
how many came per second. ONNX takes a few minutes to write, AOTInductor longer: it compiles the whole model. A TensorRT
engine is built anywhere and runs on a GPU that it was built for; elsewhere ONNX Runtime runs the graph behind it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvcompile
from kvcompile.errors import ArtifactError, KVCompileError
from kvcompile.models import load_model
from kvcompile.runtime.load import openers


@dataclass(frozen=True)
class Row:
    """One run: who, what it gave, and its tokens per second after the first."""

    name: str
    tokens: list[int]
    rate: float
    note: str = ""


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        with ExitStack() as stack:
            out = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            _show(_runs(options, out), options)
    except KVCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _runs(options: argparse.Namespace, out: Path) -> list[Row]:
    loaded = load_model(options.model, options.dtype)
    ids = _prompt(loaded.tokenizer, options.prompt)
    limit = ids.shape[1] + options.max_new_tokens
    settings: dict[str, Any] = {"recipe": options.recipe, "max_tokens": max(limit, 512), "max_batch": 4}
    print(f"compiling {options.model} with recipe {options.recipe}")
    fast = kvcompile.optimize(loaded.model, **settings)

    def compiled(tokens: torch.Tensor) -> torch.Tensor:
        return fast._call(tokens, None, keep=1)[fast.program.logits]

    fast.warmup()
    rows = [_timed("compiled module", compiled, fast.reset, ids, options.max_new_tokens)]
    print(loaded.tokenizer.decode(rows[0].tokens, skip_special_tokens=True) if loaded.tokenizer else "", "\n")
    for target in options.target or ("onnx", "aoti"):
        folder = out / target
        print(f"exporting to {folder}")
        began = time.perf_counter()
        manifest = kvcompile.export(loaded.model, folder, target, tokenizer=loaded.tokenizer, **settings)
        size = sum(info.bytes for info in manifest.files.values()) / 2**20
        print(f"  {len(manifest.files)} files, {size:,.0f} MiB, in {time.perf_counter() - began:.0f} s")
        for name, opened in openers(manifest):
            try:
                session = opened(folder)
            except ArtifactError as error:
                rows.append(Row(f"{target}: {name}", [], float("nan"), str(error)))
                continue
            session.decode(ids[:, :1])  # the first call of a session is slower
            rows.append(
                _timed(
                    f"{target}: {session.name}", session.prefill, session.reset, ids, options.max_new_tokens
                )
            )
    return rows


def _timed(
    name: str,
    call: Callable[[torch.Tensor], torch.Tensor],
    reset: Callable[[], None],
    ids: torch.Tensor,
    count: int,
) -> Row:
    """`count` greedy tokens after `ids`, from an empty cache."""
    reset()
    token = call(ids)[:, -1:].argmax(-1)
    tokens = [int(token)]
    began = time.perf_counter()
    for _ in range(count - 1):
        token = call(token)[:, -1:].argmax(-1)
        tokens.append(int(token))
    seconds = time.perf_counter() - began
    reset()
    return Row(name, tokens, (count - 1) / seconds if count > 1 else float("nan"))


def _prompt(tokenizer: Any, text: str) -> torch.Tensor:
    if tokenizer is None:  # a random model may have none
        return torch.arange(3, 19)[None]
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return ids


def _show(rows: list[Row], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "", "tokens/s", "of the compiled module's tokens", title=f"{options.model}, {options.recipe}"
    )
    wanted = rows[0].tokens
    for row in rows:
        same = sum(a == b for a, b in zip(row.tokens, wanted, strict=False))
        table.add_row(row.name, f"{row.rate:.1f}", row.note or f"{same} of {len(wanted)} the same")
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="as for `kvcompile generate`")
    parser.add_argument("--recipe", default="int8")
    parser.add_argument("--dtype", default=None, help="float32, float16 or bfloat16")
    parser.add_argument("--target", action="append", choices=("onnx", "aoti", "tensorrt"), help="repeatable")
    parser.add_argument("--prompt", default="Write two sentences about the sea.")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=None, help="keep the artifacts here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
