"""`kvcompile calibrate`: the scales of fp8 with one scale per layer or head, measured on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcompile.calibrate import CONTEXT
from kvcompile.cli.common import Debug, Dtype, command, stages, stderr, waiting
from kvcompile.errors import InputError, ModelError


@command
def calibrate(
    model: Annotated[str, typer.Argument(help="A model as for generate: 'smollm2', a .gguf file, a folder.")],
    text: Annotated[
        Path, typer.Option("--text", "-t", help="A UTF-8 text file, of the kind that the model will see.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The scales file to write; an old one is replaced.")
    ] = Path("scales.json"),
    tokens: Annotated[
        int | None, typer.Option("--tokens", "-n", min=1, help="Of the text, from its start; all by default.")
    ] = None,
    context: Annotated[
        int, typer.Option(min=1, help="Tokens in one sequence at most, as long as yours will be.")
    ] = CONTEXT,
    dtype: Dtype = None,
    debug: Debug = False,
) -> None:
    """Measure how large keys and values get on a text, for fp8 with scale: tensor or scale: head.

    Example: kvcompile calibrate smollm2 --text book.txt --tokens 8192 -o scales.json
    """
    if not output.parent.is_dir():
        raise InputError(f"{output.parent}: no such folder, so {output.name} cannot be written")
    try:
        content = text.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{text}: cannot be read as UTF-8 text: {error}") from error
    with waiting("starting"):
        from kvcompile.calibrate import calibrate as run
        from kvcompile.models import load_model
    with waiting(f"loading {model}"):
        loaded = load_model(model, dtype)
    if loaded.tokenizer is None:
        raise ModelError(
            f"{model}: has no tokenizer beside it, which calibrate needs; kvcompile.calibrate takes token ids"
        )
    with stages() as progress:
        scales = run(
            loaded.model,
            content,
            tokenizer=loaded.tokenizer,
            tokens=tokens,
            context=context,
            progress=progress,
        )
    scales.save(output)
    stderr().print(
        f"{output}: {len(scales.layers)} layers, {scales.text.tokens:,} tokens, {scales.digest()}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
