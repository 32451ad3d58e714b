"""The demo: SmolLM2 answers a prompt from an int8 cache, and a report says what that saves and costs.

    python examples/generate.py
    python examples/generate.py --recipe streaming_int8 --prompt "Tell me a story about a lighthouse."

kvcompile and plain transformers generate from the same prompt, the same number of tokens, in turns. The
first start compiles (a minute or two); the demo then starts once more in another process, to show what the
caches save.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from kvcompile.errors import KVCompileError, ModelError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
STAGES = ("capture", "verify", "compile")


@dataclass
class Run:
    """One generation: when its tokens came (seconds of perf_counter), and which they were."""

    began: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cache_bytes: int = 0

    @property
    def first(self) -> float:
        return self.times[0] - self.began

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        if len(self.times) < 2:
            return float("nan")
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        _demo(options)
    except KVCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, a .gguf file, or a folder of a checkpoint"
    )
    parser.add_argument("--recipe", default="int8", help="a shipped name or a YAML file")
    parser.add_argument(
        "--prompt", default="Write a short story about a lighthouse keeper who finds a letter."
    )
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="float32, bfloat16, ...; the model's by default")
    parser.add_argument("--rounds", type=int, default=2, help="timed generations of each side; 0 for none")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="change the recipe"
    )
    parser.add_argument(
        "--compare-compile",
        action="store_true",
        help="measure a cold torch.compile of the same model too (minutes)",
    )
    parser.add_argument(
        "--second-start",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="after a cold start, start once more in another process to time it with warm caches",
    )
    return parser


def _demo(options: argparse.Namespace) -> None:
    from kvcompile.cli.common import overrides_from, stages, waiting

    if options.max_new_tokens < 1:
        raise KVCompileError(f"--max-new-tokens: expected at least 1, got {options.max_new_tokens}")
    with waiting("starting"):
        import typer

        import kvcompile
        from kvcompile.cli.generate import encode
        from kvcompile.models import load_model

        try:
            overrides = overrides_from(options.settings)
        except typer.BadParameter as error:
            raise KVCompileError(f"--set: {error.message}") from error
        recipe = kvcompile.Recipe.load(options.recipe, **overrides)
    with waiting(f"loading {options.model}"):
        loaded = load_model(options.model, options.dtype, options.device)
    if loaded.tokenizer is None:
        raise ModelError(f"{options.model}: no tokenizer beside it, which generating from text needs")
    prompt = encode(loaded.tokenizer, options.prompt, chat=True).to(options.device)

    began = time.perf_counter()
    with stages() as progress:
        fast: Any = kvcompile.optimize(loaded.model, recipe=recipe, progress=progress)
        compile_began = time.perf_counter()
        fast.warmup(progress=progress)
        done = time.perf_counter()
    verify = fast.report["verify_seconds"]
    start = {"capture": compile_began - began - verify, "verify": verify, "compile": done - compile_began}

    answer = _generate(fast, loaded.tokenizer, prompt, options.max_new_tokens, aloud=True)
    count = len(answer.tokens)
    ours, plain = [], []
    with waiting("the same again, in turns with plain transformers"):
        for _ in range(options.rounds):
            plain.append(_generate(loaded.model, loaded.tokenizer, prompt, count, exactly=True))
            ours.append(_generate(fast, loaded.tokenizer, prompt, count, exactly=True))
    agree = _agreement(fast, loaded.model, prompt["input_ids"], plain[0].tokens) if plain else ""
    _say(_speeds(fast, prompt["input_ids"].shape[1], ours or [answer], plain, agree))
    _say(*_starts(options, fast, start))


def _generate(
    model: Any, tokenizer: Any, prompt: Any, count: int, *, aloud: bool = False, exactly: bool = False
) -> Run:
    """Greedy; `aloud`: print the text as it comes; `exactly`: go on after an end of text."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def put(self, value: Any) -> None:
            if not self.next_tokens_are_prompt:
                run.times.append(time.perf_counter())
                run.tokens += value.flatten().tolist()
            if aloud:
                super().put(value)  # type: ignore[no-untyped-call]
            self.next_tokens_are_prompt = False

        def end(self) -> None:
            if aloud:
                super().end()  # type: ignore[no-untyped-call]

    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    more = {"min_new_tokens": count} if exactly else {}
    run = Run(time.perf_counter())
    result = model.generate(
        **prompt,
        **more,
        max_new_tokens=count,
        do_sample=False,
        streamer=streamer,
        return_dict_in_generate=True,
    )
    # Its name since transformers 5.24, and before.
    cache = result["cache" if "cache" in result else "past_key_values"]
    run.cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in getattr(cache, "layers", ()))
    return run


def _agreement(fast: Any, model: Any, prompt: Any, tokens: list[int]) -> str:
    """How often both take the same next token, when both have read the same text."""
    import torch

    text = torch.cat([prompt, torch.tensor([tokens], device=prompt.device)], dim=1)[:, :-1]
    fast.reset()
    with torch.no_grad():
        theirs = model(input_ids=text, use_cache=False, logits_to_keep=len(tokens)).logits[0].argmax(-1)
    pieces = text.split([prompt.shape[1], *[1] * (len(tokens) - 1)], dim=1)
    ours = torch.cat([fast(input_ids=piece, logits_to_keep=1).logits[0, -1:] for piece in pieces]).argmax(-1)
    return f"{int((ours == theirs).sum())} of {len(tokens)}"


def _speeds(fast: Any, prompt_tokens: int, ours: list[Run], plain: list[Run], agree: str) -> Any:
    """Table: the recipe's cache beside transformers' own."""
    from kvcompile.util.console import format_bytes, table

    def row(name: str, mine: float, other: float, unit: str) -> None:
        theirs = [f"{other:.2f} {unit}", f"{mine / other:.2f}×"] if plain else ["", ""]
        made.add_row(name, f"{mine:.2f} {unit}", *theirs)

    new = len(ours[0].tokens)
    cached = prompt_tokens + new - 1
    sides = (f"kvcompile, {fast.plan.recipe}", "transformers, DynamicCache", "ratio")
    made = table("", *sides, right=sides)
    median = statistics.median
    row("time to first token", median(r.first for r in ours), median(r.first for r in plain or ours), "s")
    if new > 1:
        row("decode", median(r.rate for r in ours), median(r.rate for r in plain or ours), "tokens/s")
    mine, other = fast.plan.bytes_per_token, (plain[0].cache_bytes // cached if plain else 0)
    per_token = [format_bytes(other), f"{mine / other:.2f}×"] if other else ["", ""]
    made.add_row("cache, one token", format_bytes(mine), *per_token)
    mine, other = fast.plan.bytes(1, cached), (plain[0].cache_bytes if plain else 0)
    in_all = [format_bytes(other), f"{mine / other:.2f}×"] if other else ["", ""]
    made.add_row(f"cache, {cached} tokens", format_bytes(mine), *in_all)
    made.add_row("cache, as allocated", format_bytes(fast.cache.nbytes), in_all[0], "")
    if agree:
        made.add_row("same next token, same text", agree, "", "")
    return made


def _starts(options: argparse.Namespace, fast: Any, start: dict[str, float]) -> list[Any]:
    """Table: what starting took, cold and with warm caches, and torch.compile's own; then notes."""
    from torch._dynamo.utils import counters

    from kvcompile.cli.common import waiting
    from kvcompile.util.console import table

    compiled = fast.executor.compiled
    hits, misses = (counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss"))
    numbers = ("capture", "verify", "compile", "in all")
    made = table("start, seconds", *numbers, right=numbers)

    def row(name: str, seconds: dict[str, float]) -> None:
        cells = [f"{seconds[stage]:.1f}" if stage in seconds else "" for stage in STAGES]
        made.add_row(name, *cells, f"{sum(seconds.get(stage, 0.0) for stage in STAGES):.1f}")

    notes = []
    if not compiled:
        row("this one, compilation off", start)
    elif misses:
        row(f"this one, cold ({misses} of {hits + misses} graphs compiled)", start)
        _remember(fast, start)
        if options.second_start:
            with waiting("starting once more in another process, with the caches of this one"):
                row("a second one, warm caches", _measure("ours", options))
    else:
        known = f"{hits} graphs from the cache" if hits else "programs of an earlier start"
        row(f"this one, warm ({known})", start)
        cold = _remembered(fast)
        if cold is not None:
            row(f"the cold one, on {cold['date']}", cold)
    if options.compare_compile:
        with waiting("torch.compile of the same model, cold, in another process"):
            row("plain torch.compile, cold", _measure("plain", options))
    elif compiled:
        notes += _recorded(options)
    return [made, *notes]


def _measure(side: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of one start in another process: "ours" with the caches of this one, "plain" with empty ones."""
    import os
    import tempfile

    command = [sys.executable, str(BENCHMARKS / "compile_time.py"), "--worker", side]
    command += ["--model", options.model, "--recipe", options.recipe, "--device", options.device]
    command += ["--dtype", options.dtype] if options.dtype else []
    for setting in options.settings:
        command += ["--set", setting]
    with tempfile.TemporaryDirectory(prefix="kvcompile-demo-") as empty:
        fresh = {"TORCHINDUCTOR_CACHE_DIR": empty} if side == "plain" else {}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | fresh, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise KVCompileError(f"the start in another process failed: {last[0]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _memory() -> Path:
    from kvcompile.models import cache_dir

    return cache_dir() / "demo_starts.json"


def _what(fast: Any) -> str:
    """Which code was compiled, and by which torch."""
    import torch

    return f"{fast.plan.digest()} {fast.executor.digest()} {torch.__version__}"


def _remember(fast: Any, start: dict[str, float]) -> None:
    """Keep what a cold start took, for the report of the warm ones after it."""
    with suppress(OSError):  # a report without that row is still a report
        path = _memory()
        known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        known[_what(fast)] = {**start, "date": date.today().isoformat()}
        path.write_text(json.dumps(known, indent=2), encoding="utf-8")


def _remembered(fast: Any) -> dict[str, Any] | None:
    try:
        known: dict[str, dict[str, Any]] = json.loads(_memory().read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return known.get(_what(fast))


def _recorded(options: argparse.Namespace) -> list[str]:
    """A line with torch.compile's seconds as benchmarks/compile_time.py recorded them, with the machine."""
    path = BENCHMARKS / "results" / "compile_time.json"
    try:
        record = json.loads(path.read_text("utf-8"))
        plain, machine = record["starts"]["plain cold"], record["machine"]
        where = f"{machine['cpu']}, {machine['cores']} cores, {machine['date'][:10]}"
        ours = record["starts"].get("ours cold")
        beside = f" (kvcompile {record['recipe']} there: {ours['compile']:.0f} s)" if ours else ""
        same = record["model"] == options.model
    except (OSError, ValueError, KeyError):
        same = False
    if not same:
        return ["--compare-compile measures a cold torch.compile of the same model for comparison (minutes)."]
    return [
        f"Plain torch.compile of the same model, cold: {plain['compile']:.0f} s{beside},\n"
        f"recorded on {where}; --compare-compile measures it here."
    ]


def _say(*parts: Any) -> None:
    from kvcompile.cli.common import show

    for part in parts:
        print()
        show(part)


if __name__ == "__main__":
    sys.exit(main())
