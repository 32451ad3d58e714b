"""`kvcompile serve`: a model with the cache of a recipe, over HTTP as OpenAI's interface is."""

from __future__ import annotations

import importlib.util
import logging
import os
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

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
from kvcompile.cli.generate import Verify
from kvcompile.errors import KVCompileError
from kvcompile.util.console import format_bytes, parse_bytes

if TYPE_CHECKING:
    from kvcompile.serve.http import Options
    from kvcompile.serve.stats import Stats

_PACKAGES = ("fastapi", "prometheus_client", "uvicorn")
INSTALL = "pip install 'kvcompile[serve]'"


@command
def serve(
    model: Model = "smollm2",
    recipe: RecipeName = "paged",
    host: Annotated[str, typer.Option(help="The address to serve on; 0.0.0.0: every machine may ask.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="KVCOMPILE_API_KEY",
            show_default=False,
            help="What requests must bring; by the variable, other users of the machine do not see it.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name in requests; by default that of --model.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Of the cache, such as 8GiB; by default the recipe's, or a share of what is free."),
    ] = None,
    max_sequences: Annotated[
        int | None,
        typer.Option(min=1, help="Texts at a time; by default the recipe's, or runtime.max_batch."),
    ] = None,
    max_queue: Annotated[
        int | None,
        typer.Option(min=1, help="Requests that may wait; more get 429. By default the recipe's, or 1024."),
    ] = None,
    prefix_cache: Annotated[
        str | None,
        typer.Option(
            help="auto: where the cache allows it; on: or else refuse; off. By default the recipe's, or auto."
        ),
    ] = None,
    packed: Annotated[
        str | None,
        typer.Option(
            help="All texts of a step in one pass: auto: on GPUs that can; on: or else refuse; off. By default the "
            "recipe's, or auto."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="For texts that give up their pages, and for evicted pages; by default the recipe's, or none: both "
            "are computed again."
        ),
    ] = None,
    snapshot_memory: Annotated[
        str | None,
        typer.Option(
            help="On the host, for what prefixes have in no page; by default the recipe's, or a quarter of the cache's."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="A folder where the prefix cache outlives the server.", show_default=False),
    ] = None,
    store_memory: Annotated[str, typer.Option(help="Of the files in --store.")] = "10GiB",
    max_body: Annotated[str, typer.Option(help="Bytes of a request.")] = "8MiB",
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of one prompt; by default what the cache takes.")
    ] = None,
    max_completion_tokens: Annotated[int, typer.Option(min=1, help="Of one text.")] = 16384,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds of a request, the queue included.")
    ] = 600.0,
    drain: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds that running requests have once the server is told to stop."),
    ] = 30.0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that this server goes by, repeatable. On loopback it knows only loopback's own; elsewhere any."
        ),
    ] = None,
    tensor: Annotated[
        int,
        typer.Option(
            min=1,
            help="Ranks that have the model together; this command is run by as many processes of torchrun.",
        ),
    ] = 1,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...; of ranks, cuda is the one of each rank's number.")
    ] = "cpu",
    dtype: Dtype = None,
    settings: Settings = None,
    scales: ScalesFile = None,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Run the rewritten graph as it is: slower, starts at once.")
    ] = False,
    verify: Annotated[
        Verify | None,
        typer.Option(help="How much is compared with the original model; the recipe's by default."),
    ] = None,
    top: Annotated[
        bool, typer.Option("--top", help="Show requests, pages, hits and tokens a second.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Serve a model with the KV cache of a recipe over HTTP, as OpenAI's interface is.

    Example: kvcompile serve --model smollm2 --recipe paged --port 8000 --top

    Example: torchrun --nproc-per-node 3 -m kvcompile.cli serve --tensor 3
    """
    _check_packages()
    overrides = overrides_from(settings, scales)
    if no_compile:
        overrides["compile"] = {**overrides.get("compile", {}), "mode": "none"}
    if verify is not None:
        overrides["verify"] = verify.value
    if api_key == "" or os.environ.get("KVCOMPILE_API_KEY") == "":  # typer takes an empty variable for none
        raise KVCompileError("the API key is empty: give one, or none at all")
    if tensor > 1 and int(os.environ.get("RANK", 0)):
        _follow(model, recipe, overrides, dtype, device, tensor)
        return
    from kvcompile.serve.http import LOOPBACK, Limits, Options, bind, create_app, url
    from kvcompile.serve.http import serve as serve_http

    hosts = (*LOOPBACK, *(allow_host or ())) if allow_host or host in LOOPBACK else None
    options = Options(
        name=served_model_name or model,
        api_key=api_key,
        hosts=hosts,
        limits=Limits(
            body_bytes=parse_bytes(max_body),
            prompt_tokens=max_prompt_tokens,
            completion_tokens=max_completion_tokens,
            seconds=timeout,
            drain_seconds=drain,
        ),
    )
    bound = bind(host, port)  # a port that is taken shows before the model loads
    with closing(bound), closing(_engine(
        model, recipe, overrides, dtype, device, tensor,
        name=options.name,
        memory=memory,
        max_sequences=max_sequences,
        max_queue=max_queue,
        prefix_cache=prefix_cache,
        host_memory=host_memory,
        snapshot_memory=snapshot_memory,
        store=store,
        store_memory=store_memory,
        packed=packed,
    )) as engine:  # fmt: skip
        # Not before: models' libraries tell much.
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        _tell(options, url(bound), engine.stats(), host)
        view: AbstractContextManager[Any] = nullcontext()
        if top:
            from kvcompile.serve.top import Top

            view = Top(engine.stats, f"{options.name} at {url(bound)}").shown()
        with view:
            serve_http(create_app(engine, options), bound)
    stderr().print("stopped", style="dim")


def _check_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise KVCompileError(f"serve needs {' and '.join(missing)}; run: {INSTALL}")


def _optimized(
    model: str, recipe: str, overrides: dict[str, Any], dtype: str | None, device: str, tensor: int
) -> tuple[Any, Any]:
    """The optimized module, and the model's tokenizer."""
    with waiting("starting"):
        import kvcompile
        from kvcompile.models import load_model
        from kvcompile.recipe import Recipe

        loaded_recipe = Recipe.load(recipe, **overrides)  # a mistake in it shows before the model loads
    parallel, device = on_ranks(tensor, device)
    with waiting(f"loading {model}"):
        loaded = load_model(model, dtype, device)
    with stages() as progress:
        fast = kvcompile.optimize(loaded.model, loaded_recipe, progress=progress, parallel=parallel)
    return fast, loaded.tokenizer


def _engine(
    model: str,
    recipe: str,
    overrides: dict[str, Any],
    dtype: str | None,
    device: str,
    tensor: int,
    **more: Any,
) -> Any:
    """An engine that has compiled what it needs."""
    fast, tokenizer = _optimized(model, recipe, overrides, dtype, device, tensor)
    from kvcompile.serve.engine import Engine

    engine = Engine(fast, tokenizer=tokenizer, **more)
    try:
        with waiting("compiling"):
            engine.warmup()
    except BaseException:
        engine.close()
        raise
    return engine


def _follow(
    model: str, recipe: str, overrides: dict[str, Any], dtype: str | None, device: str, tensor: int
) -> None:
    """Serve as one of the ranks behind rank 0, which has the port."""
    fast, _ = _optimized(model, recipe, overrides, dtype, device, tensor)
    from kvcompile.serve.ranks import follow

    follow(fast)


def _tell(options: Options, address: str, stats: Stats, host: str) -> None:
    """Where it serves, and what one should know of it."""
    console = stderr()
    console.print(f"serving {options.name} at {address}", style="bold", highlight=False, soft_wrap=True)
    console.print(
        f"{stats.pages:,} pages, {format_bytes(stats.bytes)}; prefix cache {stats.prefix_cache}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    if options.hosts is None and options.api_key is None:
        console.print(
            f"everybody who reaches {host} may ask: no API key is set (KVCOMPILE_API_KEY)",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
