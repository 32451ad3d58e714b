"""Requests that come and go on one compiled SmolLM2: streams, prompts that begin alike, several samples, and figures.

    python examples/serve.py
    python examples/serve.py --recipe paged_int8 --max-new-tokens 64

Questions come one after the other while earlier ones are still being answered. All begin with the same instructions,
which are computed once. One of them leaves early. Over HTTP the same engine is `kvcompile serve`
(docs/serving_http.md).
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from kvcompile.errors import KVCompileError

INSTRUCTIONS = (
    "You answer questions about the Python language for people who have programmed before, but never in Python. You "
    "answer in one or two short sentences, without code, and without telling what you are going to say. You never "
    "repeat the question. Where a word of the language has a meaning of its own, you say which one it is that you mean."
)
QUESTIONS = (
    "What is a list comprehension?",
    "When would you use a tuple?",
    "What does the word yield do?",
    "How are arguments passed?",
)
APART = 0.3  # seconds between two questions


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--samples", type=int, default=3, help="texts of the last question")
    parser.add_argument("--recipe", default="paged", help="any; pages are what prompts share")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(argv)
    try:
        _serve(options)
    except KVCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _serve(options: argparse.Namespace) -> None:
    from kvcompile.cli.common import overrides_from, stages, waiting

    with waiting(f"loading {options.model}"):
        import typer

        import kvcompile
        from kvcompile.models import load_model
        from kvcompile.serve import Engine, Sampling

        try:
            recipe = kvcompile.Recipe.load(options.recipe, **overrides_from(options.settings))
        except typer.BadParameter as error:
            raise KVCompileError(f"--set: {error.message}") from error
        how = Sampling.of(max_tokens=options.max_new_tokens)
        several = Sampling.of(max_tokens=options.max_new_tokens, n=options.samples, temperature=0.8, seed=1)
        loaded = load_model(options.model)
        if loaded.tokenizer is None:
            raise KVCompileError(f"{options.model}: no tokenizer beside it, which questions need")
    with stages() as progress:
        fast = kvcompile.optimize(loaded.model, recipe, progress=progress)

    def prompt(question: str) -> list[int]:
        chat = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
        ids: list[int] = loaded.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        return ids

    with Engine(fast, tokenizer=loaded.tokenizer, max_sequences=8) as engine:
        with waiting("compiling what steps need"):
            engine.warmup()
        handles = [engine.submit(prompt(QUESTIONS[0]), how)]
        print(f"{QUESTIONS[0]}\n  ", end="")
        for delta in handles[0]:  # as its tokens come
            print(delta.text, end="", flush=True)
        print("\n")

        for question in QUESTIONS[1:-1]:
            handles.append(engine.submit(prompt(question), how))
            time.sleep(APART)
        leaves = engine.submit(prompt("Tell me all that you know."), Sampling(max_tokens=500))
        next(iter(leaves))  # its first words are enough
        leaves.cancel()
        handles += [leaves, engine.submit(prompt(QUESTIONS[-1]), several)]
        results = [handle.result() for handle in handles]
        for question, result in zip((*QUESTIONS[1:-1], None, QUESTIONS[-1]), results[1:], strict=True):
            if question is not None:
                print(question)
                for completion in result.completions:
                    print(f"  {' '.join(completion.text.split())}")
                print()
        print(_figures(results, engine.stats()))


def _figures(results: list[Any], stats: Any) -> str:
    """A row for each request, and what the engine has done."""
    from kvcompile.util.console import format_bytes, render, table

    numbers = ("prompt", "of it found", "new tokens", "first token", "in all")
    rows = table("request", *numbers, "end", right=numbers)
    for result in results:
        usage = result.usage
        rows.add_row(
            result.id,
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            str(usage.completion_tokens),
            f"{usage.first_token:.2f} s",
            f"{usage.total:.2f} s",
            ", ".join(sorted({completion.finish for completion in result.completions})),
        )
    share = stats.cached_tokens / max(stats.prompt_tokens, 1)
    return (
        f"{render(rows)}\n\n{stats.requests} requests in {stats.steps} steps: {stats.finished} answered, "
        f"{stats.cancelled} cancelled, {stats.failed} failed\nprefix cache {stats.prefix_cache}: "
        f"{share:.0%} of all prompts' tokens were not computed again\n{format_bytes(stats.bytes)} for "
        f"{stats.pages:,} pages, of which {stats.pages_held} are held and {stats.pages_cached} may be found again"
    )


if __name__ == "__main__":
    sys.exit(main())
