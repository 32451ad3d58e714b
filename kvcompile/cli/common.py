"""What the commands share: options, `--set`, errors, and progress on stderr."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from kvcompile.errors import DetectionError, KVCompileError
from kvcompile.util.progress import Progress, taken

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Params = ParamSpec("Params")
Result = TypeVar("Result")

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="'smollm2', a .gguf file, a folder of a transformers checkpoint, or random:CONFIG.JSON.",
    ),
]
RecipeName = Annotated[
    str, typer.Option("--recipe", "-r", help="A shipped recipe ('kvcompile recipes list') or a YAML file.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change the recipe, repeatable: runtime.max_tokens=4096, cache.retention.window=252.",
    ),
]
ScalesFile = Annotated[
    str | None,
    typer.Option("--scales", metavar="FILE", help="Calibrated scales, in place of those the recipe names."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, float16 or bfloat16; the model's by default.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def command(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """A command that prints a KVCompileError in red on stderr and exits 1; with `debug=True` it raises."""

    @functools.wraps(function)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            with _ended_by_sigterm():
                return function(*args, **kwargs)
        except KVCompileError as error:
            if kwargs.get("debug"):
                raise
            stderr().print(
                f"error: {_message(error)}", style="red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            stderr().print("stopped", style="red")
            raise typer.Exit(130) from None

    return run


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a command by an exception, as Ctrl-C does: who dies of it leaves folders half-written."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    alone = threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _message(error: KVCompileError) -> str:
    text = str(error)
    misses = error.misses if isinstance(error, DetectionError) else ()
    new = [str(miss) for miss in misses if str(miss) not in text]
    return "\n".join((text, *(f"  {miss}" for miss in new[:20])))


def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def show(renderable: RenderableType) -> None:
    """Print to stdout in at most 100 columns, with colours on a terminal."""
    from rich.console import Console

    from kvcompile.util.console import WIDTH

    console = Console(file=sys.stdout)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    console.print(renderable, highlight=False)


def overrides_from(settings: list[str] | None, scales: str | None = None) -> dict[str, Any]:
    """["a.b=1", "a.c=x"] -> {"a": {"b": 1, "c": "x"}}; the values are YAML. scales: of `--scales`.

    Raises:
        typer.BadParameter: not KEY=VALUE, a value that is not YAML, or settings that contradict each other.
    """
    from kvcompile.recipe.yaml_text import YamlProblems, read_yaml

    merged: dict[str, Any] = {}
    for setting in settings or ():
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise typer.BadParameter(f"expected KEY=VALUE such as runtime.max_tokens=4096, got {setting!r}")
        try:
            value = read_yaml(text)
        except YamlProblems as error:
            raise typer.BadParameter(f"the value of {key}: {error}") from error
        inner = merged
        for part in parts[:-1]:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise typer.BadParameter(f"{setting!r} contradicts an earlier --set")
        inner[parts[-1]] = value
    return merged if scales is None else merged | {"scales": scales}


def on_ranks(tensor: int, device: str, stages: int = 1) -> tuple[dict[str, int] | None, str]:
    """What `optimize` takes as `parallel`, and the device of this process: of ranks on GPUs, each has its own."""
    if tensor * stages == 1:
        return None, device
    parallel = {"tensor": tensor, "stages": stages}
    return parallel, f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time."""
    with stderr().status(what):
        yield


@contextmanager
def stages() -> Iterator[Progress]:
    """A progress bar on stderr; yields progress(stage, done, total)."""
    from rich import progress as rich

    columns = (
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TimeElapsedColumn(),
    )
    with taken(), rich.Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)

        yield progress
