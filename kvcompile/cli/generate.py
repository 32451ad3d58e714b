"""`kvcompile generate`: text from a model with the cache of a recipe, streamed to stdout."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvcompile.cli.common import (
    Debug,
    Dtype,
    Model,
    RecipeName,
    ScalesFile,
    Settings,
    command,
    on_ranks,
    overrides_from,
    stages,
    stderr,
    waiting,
)
from kvcompile.errors import InputError, ModelError
from kvcompile.util.console import format_bytes


class Verify(StrEnum):
    QUICK = "quick"
    THOROUGH = "thorough"
    OFF = "off"


@command
def generate(
    model: Model = "smollm2",
    recipe: RecipeName = "baseline",
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt; - reads it from stdin.")] = (
        "Write two sentences about the sea."
    ),
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    dtype: Dtype = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token every time.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling, when the temperature is not 0.")] = 0,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Give the prompt to the model as it is.")
    ] = False,
    settings: Settings = None,
    scales: ScalesFile = None,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Run the rewritten graph as it is: slower, starts at once.")
    ] = False,
    verify: Annotated[
        Verify | None,
        typer.Option(help="How much is compared with the original model; the recipe's by default."),
    ] = None,
    tensor: Annotated[
        int,
        typer.Option(min=1, help="Ranks that each have a part of the model; start as many with torchrun."),
    ] = 1,
    stage_count: Annotated[
        int,
        typer.Option("--stages", min=1, help="Stages that each have a part of the layers; one process each."),
    ] = 1,
    debug: Debug = False,
) -> None:
    """Generate text with a model and the KV cache of a recipe.

    Example: kvcompile generate --recipe streaming --prompt "Tell me a story." -n 400
    Over ranks: torchrun --nproc-per-node 3 -m kvcompile.cli generate --tensor 3
    Over stages: torchrun --nproc-per-node 2 -m kvcompile.cli generate --stages 2
    """
    overrides = overrides_from(settings, scales)
    if no_compile:
        overrides["compile"] = {**overrides.get("compile", {}), "mode": "none"}
    if verify is not None:
        overrides["verify"] = verify.value
    text = read_prompt(prompt)
    with waiting("starting"):
        import torch

        import kvcompile
        from kvcompile.compile import ahead
        from kvcompile.models import load_model
        from kvcompile.recipe import Recipe

        loaded_recipe = Recipe.load(recipe, **overrides)  # a mistake in it shows before the model loads
    parallel, device = on_ranks(tensor, device, stage_count)
    started = time.perf_counter()
    # What is compiled for this machine and not for a model: reading one takes a core, and seconds.
    if device == "cpu":
        ahead.begin_for(torch.device(device), None, loaded_recipe)
    with waiting(f"loading {model}"):
        loaded = load_model(model, dtype, device)
    if loaded.tokenizer is None:
        raise ModelError(
            f"{model}: has no tokenizer beside it, which generate needs; explain works without one"
        )
    tokens = encode(loaded.tokenizer, text, chat=not no_chat_template).to(device)
    ready = time.perf_counter()
    with stages() as progress:
        fast: Any = kvcompile.optimize(
            loaded.model, recipe=loaded_recipe, progress=progress, parallel=parallel
        )
        loaded = replace(loaded, model=None)  # a rank keeps its part alone
        fast.check_length(tokens["input_ids"].shape[1] + max_new_tokens - 1)  # before anything compiles
        fast.warmup(progress=progress)
    optimized = time.perf_counter()
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature}
    clock = Clock()
    first = fast.group is None or fast.group.rank == 0
    shown = streamer(loaded.tokenizer, clock) if first else None
    fast.generate(**tokens, max_new_tokens=max_new_tokens, streamer=shown, **sampling)
    if not first:
        return
    plan = fast.plan
    stderr().print(
        f"{clock.summary()} · recipe {plan.recipe}, {format_bytes(plan.bytes_per_token)} a token"
        f"{_where(fast.group)} · "
        f"load {ready - started:.1f} s, optimize and compile {optimized - ready:.1f} s",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _where(group: Any) -> str:
    """Whose bytes are told."""
    if group is None:
        return ""
    return (
        f" on each of {group.size} ranks"
        if group.options.stages == 1
        else f" on the first of {group.size} ranks"
    )


def read_prompt(prompt: str) -> str:
    """The text of `--prompt`, or what comes on stdin for "-".

    Raises:
        InputError: bytes that are no text in the encoding of this terminal.
    """
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode("utf-8")  # bytes that were none came as surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        where = "on stdin" if prompt == "-" else "of --prompt"
        encoding = sys.stdin.encoding if prompt == "-" else sys.getfilesystemencoding()
        raise InputError(
            f"the prompt {where} is no text in {encoding}, at character {error.start}"
        ) from error
    return text


def encode(tokenizer: Any, text: str, chat: bool) -> Any:
    """input_ids and attention_mask [1, S] of a prompt, in the model's chat format if it has one."""
    if chat and getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    tokens = tokenizer(text, return_tensors="pt")
    if tokens["input_ids"].shape[1] == 0:
        raise ModelError("the prompt is empty")
    tokens.pop("token_type_ids", None)
    return tokens


@dataclass
class Clock:
    """When each new token came; seconds of time.perf_counter()."""

    start: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)

    def summary(self) -> str:
        count = len(self.times)
        if not count:
            return "no new tokens"
        text = f"{count} token{'s' if count > 1 else ''}, the first after {self.times[0] - self.start:.2f} s"
        if count == 1:
            return text
        return f"{text}, then {(count - 1) / max(self.times[-1] - self.times[0], 1e-9):.1f} tokens/s"


def streamer(tokenizer: Any, clock: Clock) -> Any:
    """Prints new text to stdout as it comes and notes the time of every token."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def put(self, value: Any) -> None:
            if not self.next_tokens_are_prompt:
                clock.times.append(time.perf_counter())
            super().put(value)  # type: ignore[no-untyped-call]

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
