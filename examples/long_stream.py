"""SmolLM2 reads past the 8,192 tokens it was made for, in constant memory: the first tokens and the last ones stay.

    python examples/long_stream.py
    python examples/long_stream.py --tokens 3000 --recipe streaming_int8

The text is what Python's help() shows (pydoc_data.topics). Perplexity is over each 1,000 tokens, each token predicted
from what is still in the cache; cache and process memory are as they stand after them.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import Any

from kvcompile.errors import KVCompileError

PIECE = 250  # tokens in one call: their logits are the largest tensor here


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--every", type=int, default=1000, help="tokens between two lines of figures")
    parser.add_argument(
        "--recipe", default="streaming", help="any; one that keeps every token ends at its limit"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(argv)
    try:
        _stream(options)
    except KVCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _stream(options: argparse.Namespace) -> None:
    if options.tokens < 2 or options.every < 2:
        raise KVCompileError("--tokens and --every: expected at least 2")
    from kvcompile.cli.common import overrides_from, stages, waiting

    with waiting(f"loading {options.model}"):
        import torch
        import typer

        import kvcompile
        from kvcompile.models import load_model
        from kvcompile.report.quality.text import help_topics
        from kvcompile.util.console import format_bytes

        try:
            recipe = kvcompile.Recipe.load(options.recipe, **overrides_from(options.settings))
        except typer.BadParameter as error:
            raise KVCompileError(f"--set: {error.message}") from error
        loaded = load_model(options.model)
        if loaded.tokenizer is None:
            raise KVCompileError(f"{options.model}: no tokenizer beside it, which reading text needs")
        tokens = loaded.tokenizer(help_topics(), return_tensors="pt", verbose=False)["input_ids"][
            :, : options.tokens + 1
        ]
    with stages() as progress:
        fast: Any = kvcompile.optimize(loaded.model, recipe=recipe, progress=progress)

    print(f"{'tokens':>15} {'perplexity':>11} {'cache':>10} {'process':>10} {'tokens/s':>9}")
    count = tokens.shape[1] - 1
    for first in range(0, count, options.every):
        last = min(first + options.every, count)
        loss, began = 0.0, time.perf_counter()
        for start in range(first, last, PIECE):
            stop = min(start + PIECE, last)
            logits = fast(tokens[:, start:stop]).logits[0].float()
            loss += float(
                torch.nn.functional.cross_entropy(logits, tokens[0, start + 1 : stop + 1], reduction="sum")
            )
        rate = (last - first) / (time.perf_counter() - began)
        print(
            f"{f'{first:,} – {last:,}':>15} {math.exp(loss / (last - first)):>11.2f} "
            f"{format_bytes(fast.cache.nbytes):>10} {_resident():>10} {rate:>9.0f}",
            flush=True,
        )


def _resident() -> str:
    """Memory of this process, weights and all, where the system says it."""
    from kvcompile.util.console import format_bytes

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return "?"
    import resource

    return format_bytes(pages * resource.getpagesize())


if __name__ == "__main__":
    sys.exit(main())
