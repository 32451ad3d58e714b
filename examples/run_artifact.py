"""Runs an ONNX artifact with NumPy and ONNX Runtime: no kvcompile, no PyTorch. All it knows is in manifest.json.

python examples/run_artifact.py FOLDER --ids 5 17 3 --max-new-tokens 24
python examples/run_artifact.py FOLDER --text "Why is the sky blue?"          (needs `tokenizers`)

It is also the shortest description of how artifacts run; docs/artifacts.md is the longer one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

BLOCK = 64  # slots are read in whole blocks, so that a graph meets few different shapes


class Artifact:
    """The graphs of an artifact, and one cache."""

    def __init__(self, folder: Path):
        path = folder / "manifest.json"
        if not path.is_file():
            raise SystemExit(f"{folder}: no artifact, it has no manifest.json")
        self.manifest = json.loads(path.read_text(encoding="utf-8"))
        if self.manifest["format"] != "kvcompile" or self.manifest["format_version"] != 1:
            raise SystemExit(f"{folder}: expected format kvcompile, version 1")
        if self.manifest["target"] != "onnx":
            raise SystemExit(
                f"{folder}: an artifact for {self.manifest['target']}, and this sample runs onnx"
            )
        if any(cache["dtype"] == "bfloat16" for cache in self.manifest["caches"]):
            raise SystemExit(f"{folder}: NumPy has no bfloat16; export the model in float32 or float16")
        self.sessions = {
            graph["file"]: onnxruntime.InferenceSession(
                str(folder / graph["file"]), providers=["CPUExecutionProvider"]
            )
            for graph in self.manifest["graphs"]
        }

    def start(self, batch: int, tokens: int) -> None:
        """An empty cache for `batch` sequences of up to `tokens` tokens (padding counts)."""
        limits = self.manifest["limits"]
        if batch > limits["max_batch"] or tokens > (limits["max_tokens"] or tokens):
            raise SystemExit(f"{batch} sequences of {tokens} tokens: the manifest's limits are {limits}")
        sizes: dict[str, int] = {"batch": batch}
        self.tables = {}
        for pages in self.manifest["pages"]:
            # A sequence has one page for each `page_size` tokens, up to `slots`. Here they get theirs at the start, one
            # sequence after the other. Page 0 belongs to nobody: entries without a page are 0, and padding goes there.
            each = math.ceil(min(tokens, pages["slots"]) / pages["page_size"])
            table = np.zeros((batch, math.ceil(pages["slots"] / pages["page_size"])), np.int32)
            table[:, :each] = 1 + np.arange(batch * each).reshape(batch, each)
            self.tables[pages["table"]] = table
            sizes[pages["dimension"]] = 1 + batch * each
        self.caches = {}
        for cache in self.manifest["caches"]:
            shape = [sizes.get(size, size) for size in cache["shape"]]
            self.caches[cache["name"]] = np.zeros(shape, cache["dtype"])
            if cache["fill"] is not None:  # one number per KV head, which is the second dimension
                fill = np.array(cache["fill"], cache["dtype"])
                self.caches[cache["name"]][:] = fill.reshape(1, -1, *[1] * (len(shape) - 2))
        self.spare: dict[str, np.ndarray] = {}
        self.seq_lens = np.zeros(batch, np.int64)
        self.columns = 0

    def append(self, ids: np.ndarray, pads: np.ndarray) -> np.ndarray:
        """Append tokens [B, S], of which the first `pads` [B] are padding; logits [B, V] of the last one."""
        limits, tokens = self.manifest["limits"], ids.shape[1]
        # A long prompt comes in passes, unless its tokens choose together what stays of it.
        passes = 1 if limits["whole_prompts"] else math.ceil(tokens / limits["prefill_chunk"])
        for number in range(passes):
            start, end = tokens * number // passes, tokens * (number + 1) // passes
            logits = self.step(ids[:, start:end], np.clip(pads - start, 0, end - start))
        return logits

    def step(self, ids: np.ndarray, pads: np.ndarray) -> np.ndarray:
        batch, tokens = ids.shape
        phase = "decode" if tokens == 1 else "prefill"
        graph = next(graph for graph in self.manifest["graphs"] if graph["phase"] in (phase, "step"))
        # Positions count a sequence's own tokens, from 0; those of padding are negative.
        positions = (self.seq_lens - pads)[:, None] + np.arange(tokens)
        span = min(self.manifest["slots"], math.ceil((self.columns + tokens) / BLOCK) * BLOCK)
        given: dict[str, Any] = {
            "input_ids": ids,
            "positions": positions,
            "seq_lens": self.seq_lens,  # before this call
            "keep": np.array([tokens - 1]),  # which tokens' logits are wanted
            "slots": np.arange(span),  # only its length counts: at least the longest sequence after this call
            **self.tables,
            **self.caches,
        }
        logits = next(output for output in graph["outputs"] if output["role"] == "logits")
        result = np.empty((batch, 1, logits["shape"][-1]), logits["dtype"])
        made = {logits["name"]: result}
        for alias in graph["aliases"]:
            # Either a cache is updated where it stands, or its new value goes to a second place, and the two swap.
            cache = self.caches[alias["input"]]
            if not alias["in_place"]:
                self.spare.setdefault(alias["input"], np.empty_like(cache))
            made[alias["output"]] = cache if alias["in_place"] else self.spare[alias["input"]]
        session = self.sessions[graph["file"]]
        binding = session.io_binding()
        arrays = {info["name"]: np.ascontiguousarray(given[info["name"]]) for info in graph["inputs"]}
        for name, array in arrays.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in made.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        session.run_with_iobinding(binding)
        for alias in graph["aliases"]:
            if not alias["in_place"]:
                name = alias["input"]
                self.caches[name], self.spare[name] = self.spare[name], self.caches[name]
        self.seq_lens = positions[:, -1] + 1
        self.columns += tokens
        return result[:, 0]

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Up to `count` new tokens after each prompt, the most probable one each time."""
        vocab = self.manifest["model"]["vocab_size"]
        if count < 1 or not all(prompts):
            raise SystemExit("expected prompts of one token or more, and --max-new-tokens of 1 or more")
        if not all(0 <= token < vocab for prompt in prompts for token in prompt):
            raise SystemExit(f"expected token ids from 0 to {vocab - 1}")
        longest = max(map(len, prompts))
        pads = np.array([longest - len(prompt) for prompt in prompts])
        if pads.any() and not self.manifest["ragged"]:
            raise SystemExit(
                "this model's sequences cannot start at different places: pass prompts of one length"
            )
        self.start(len(prompts), longest + count - 1)
        ids = np.array([[0] * (longest - len(prompt)) + prompt for prompt in prompts], np.int64)
        ends = self.manifest["model"]["eos_token_ids"]
        ended = np.zeros(len(prompts), bool)
        rows: list[np.ndarray] = []
        logits = self.append(ids, pads)
        while True:
            token = logits.astype(np.float32).argmax(-1)
            if ends:
                token = np.where(ended, ends[0], token)
                ended |= np.isin(token, ends)
            rows.append(token)
            if len(rows) == count or ended.all():
                return np.stack(rows, 1).tolist()
            logits = self.append(token[:, None], np.zeros_like(pads))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--ids", type=int, nargs="+", action="append", help="a prompt; more make a batch")
    prompt.add_argument("--text")
    args = parser.parse_args(argv)
    artifact = Artifact(args.folder)
    if args.text is None:
        for row in artifact.generate(args.ids, args.max_new_tokens):
            print(*row)
        return 0
    if artifact.manifest["tokenizer"] is None:
        raise SystemExit(f"{args.folder} has no tokenizer: pass --ids")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(args.folder / artifact.manifest["tokenizer"] / "tokenizer.json"))
    (row,) = artifact.generate([tokenizer.encode(args.text).ids], args.max_new_tokens)
    print(tokenizer.decode(row, skip_special_tokens=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
