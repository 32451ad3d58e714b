"""`kvcompile kernels`: the generated kernels of a recipe, their files, and what their machine code is like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcompile.cli import cpp_kernels, predict
from kvcompile.cli.common import (
    Debug,
    Json,
    RecipeName,
    Settings,
    command,
    overrides_from,
    show,
    stderr,
    waiting,
)
from kvcompile.errors import InputError, PlanError

if TYPE_CHECKING:
    from rich.table import Table

    from kvcompile.kernels.cpp.isa import Isa
    from kvcompile.kernels.spec import SiteSpec
    from kvcompile.kernels.triton.host.launches import Launch
    from kvcompile.util.machines import Machine

# With multiprocessors of the largest.
ARCHES = {
    80: ("sm_80", 108),
    86: ("sm_86", 84),
    89: ("sm_89", 142),
    90: ("sm_90", 132),
    100: ("sm_100", 148),
    120: ("sm_120", 188),
}
_MANY = 64
_ARCH = 90

Heads = Annotated[
    str, typer.Option(metavar="Q/KV", help="Query heads and KV heads of the model's attention, such as 32/8.")
]
Dim = Annotated[int, typer.Option("--head-dim", min=16, max=576, help="Channels of a key and a value.")]
Arch = Annotated[
    int | None,
    typer.Option(help="The GPU's compute capability, times ten: 80, 86, 89, 90, 100, 120; else 90."),
]
Assemble = Annotated[
    bool,
    typer.Option("--assemble", help="Compile them (no GPU is needed) and show registers, loops and spills."),
]
Target = Annotated[str, typer.Option(help="triton, for NVIDIA GPUs, or cpp, for CPUs.")]
IsaName = Annotated[
    str | None,
    typer.Option(
        "--isa", help="Of a CPU: amx_bf16, avx512_bf16, avx512, avx2 or portable; this machine's by default."
    ),
]
Predict = Annotated[
    str | None,
    typer.Option(
        "--predict",
        metavar="GPU",
        help="Say what their launches are predicted to take on a GPU (h200, h100, a100, l40s, rtx4090, b200, ...).",
    ),
]
Goals = Annotated[
    bool,
    typer.Option(
        "--goals", help="With --predict: the goals that benchmarks judge, in place of the recipe's layers."
    ),
]
Batch = Annotated[int, typer.Option(min=1, help="With --predict: sequences.")]
Context = Annotated[int, typer.Option(min=1, help="With --predict: tokens of each sequence.")]
Prompt = Annotated[int, typer.Option(min=0, help="With --predict: new tokens of a prompt; 0: no prompt.")]
Prefix = Annotated[
    int,
    typer.Option(
        min=0, help="With --predict: of the context, tokens that all sequences have on the same pages."
    ),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="A folder to write their sources to.")]


@command
def kernels(
    recipe: RecipeName = "baseline",
    heads: Heads = "32/8",
    head_dim: Dim = 128,
    target: Target = "triton",
    arch: Arch = None,
    isa: IsaName = None,
    assemble: Assemble = False,
    predict_on: Predict = None,
    goals: Goals = False,
    batch: Batch = 32,
    context: Context = 4096,
    prompt: Prompt = 0,
    prefix: Prefix = 0,
    json: Json = False,
    out: Out = None,
    settings: Settings = None,
    debug: Debug = False,
) -> None:
    """Show which generated kernels a recipe's layers with full attention run, for a token and for a prompt in bf16.

    Example: kvcompile kernels --recipe int8 --heads 32/8 --target cpp --isa avx2 --assemble

    With --predict, what they take: kvcompile kernels --recipe int8 --predict h200 --batch 1 --context 32768
    """
    queries, keys = heads_of(heads)
    if target not in ("triton", "cpp"):
        raise InputError(f"--target: expected triton or cpp, got {target!r}")
    if predict_on is None and (goals or json):
        raise InputError(f"{'--goals' if goals else '--json'} is of predictions: add --predict, with a GPU")
    if predict_on is not None:
        on = _predicts_on(predict_on, target, arch, assemble, out)
        if goals:
            predict.of_goals(on, json)
        else:
            named, site = _with_kernels(recipe, settings, (queries, keys), head_dim)
            asked = predict.Asked(batch, context, prompt, prefix)
            predict.of_recipe(named, site, (queries, keys), head_dim, asked, on, json)
        return
    if target == "cpp":
        own = cpp_kernels.isa_named(isa)
        with waiting("generating"):
            kernels_of_cpu = _of_cpu(recipe, settings, (queries, keys), head_dim, own)
        if out is not None:
            cpp_kernels.written(kernels_of_cpu, out, own)
        show((cpp_kernels.assembled if assemble else cpp_kernels.listed)(kernels_of_cpu, own))
        return
    if isa is not None:
        raise InputError("--isa is of a CPU: add --target cpp")
    arch = arch or _ARCH
    if arch not in ARCHES:
        raise InputError(f"--arch: expected {', '.join(map(str, ARCHES))}, got {arch}")
    with waiting("generating"):
        found = _launches(recipe, settings, (queries, keys), head_dim, arch)
    if out is not None:
        _written(found, out)
    show(_assembled(found, arch) if assemble else _listed(found))


def heads_of(text: str) -> tuple[int, int]:
    """ "32/8" -> (32, 8).

    Raises:
        InputError: not two numbers, or no whole number of query heads for each KV head.
    """
    queries, _, keys = text.partition("/")
    if not (queries.isdigit() and keys.isdigit() and int(keys) and int(queries) % int(keys) == 0):
        raise InputError(
            f"--heads: expected query heads / KV heads, a multiple of them, such as 32/8; got {text!r}"
        )
    return int(queries), int(keys)


def _launches(
    name: str, settings: list[str] | None, heads: tuple[int, int], dim: int, arch: int
) -> list[tuple[str, Launch]]:
    import torch

    from kvcompile.kernels.triton.config import Device
    from kvcompile.kernels.triton.host.launches import launches

    _, site = _with_kernels(name, settings, heads, dim)
    dims, dtype = (dim, dim), torch.bfloat16
    device = Device(ARCHES[arch][0], arch, ARCHES[arch][1])
    return [
        (when, launch)
        for when, tokens in (("a token", 1), ("a prompt", _MANY))
        for launch in launches(site, heads, dims, dtype, device, tokens)
    ]


def _with_kernels(
    name: str, settings: list[str] | None, heads: tuple[int, int], dim: int
) -> tuple[str, SiteSpec]:
    """As `_site`, of layers that Triton kernels run.

    Raises:
        PlanError: none do; says why.
    """
    import torch

    from kvcompile.kernels.triton.supports import refusal

    recipe, site = _site(name, settings, dim)
    if problem := refusal(site, heads, (dim, dim), torch.bfloat16):
        raise PlanError(f"{recipe}: there are no kernels for these layers: {problem}")
    return recipe, site


def _predicts_on(name: str, target: str, arch: int | None, assemble: bool, out: Path | None) -> Machine:
    """The machine of --predict; options that it knows nothing to do with are refused."""
    if target == "cpp":
        raise InputError("--predict is of GPUs: leave out --target cpp")
    if assemble or out is not None:
        raise InputError(f"{'--assemble' if assemble else '--out'}: leave it out with --predict, or run both")
    return predict.machine_named(name, arch)


def _of_cpu(
    name: str, settings: list[str] | None, heads: tuple[int, int], dim: int, own: Isa
) -> list[cpp_kernels.Found]:
    import torch

    from kvcompile.kernels.cpp.host.launches import launches
    from kvcompile.kernels.cpp.host.source import text_of
    from kvcompile.kernels.cpp.supports import refusal

    recipe, site = _site(name, settings, dim)
    dims, dtype = (dim, dim), torch.bfloat16
    if problem := refusal(site, heads, dims, dtype):
        raise PlanError(f"{recipe}: there are no kernels for these layers: {problem}")
    return [
        cpp_kernels.Found(one.when, one.role, text_of(one.spec), ", ".join(one.options))
        for one in launches(site, heads, dims, dtype, own)
    ]


def _site(name: str, settings: list[str] | None, dim: int) -> tuple[str, SiteSpec]:
    """The recipe's name, and a layer with full attention of it.

    Raises:
        PlanError: vectors of `dim` channels cannot be kept like that.
    """
    from kvcompile.kernels.spec import SiteSpec
    from kvcompile.recipe import load_recipe
    from kvcompile.recipe.retention import LayerContext
    from kvcompile.specs import RotaryForm

    recipe = load_recipe(name, **overrides_from(settings))
    layout = recipe.cache_for(0, 1, "causal")[0].build(
        LayerContext(tokens=recipe.runtime.max_tokens or 32768)
    )
    for storage in (layout.keys, layout.values):
        if problem := storage.check(dim):
            raise PlanError(f"{recipe.name}: {problem}")
    return recipe.name, SiteSpec(layout, dim**-0.5, rotary=RotaryForm("half", 0, dim))


def _written(found: list[tuple[str, Launch]], folder: Path) -> None:
    from kvcompile.kernels.triton.generate import generate
    from kvcompile.kernels.triton.render import header

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for _, launch in found:
            spec = launch.spec
            path = folder / f"{spec.role}_{spec.key}.py"
            path.write_text(f"{header(spec)}\n{generate(spec).text}", "utf-8")
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error}") from error
    count = len({launch.spec for _, launch in found})
    stderr().print(f"{folder}: {count} kernels", style="dim", highlight=False, soft_wrap=True)


def _listed(found: list[tuple[str, Launch]]) -> Table:
    from kvcompile.kernels.triton.roles import ROLES
    from kvcompile.util.console import table

    shown = table("for", "role", "key", "tile", "warps", "stages", "options", right=("warps", "stages"))
    for when, launch in found:
        spec = launch.spec
        tile = f"{spec.block_m} x {spec.block_n}" if ROLES[spec.role].tiled else ""
        numbers = (str(launch.num_warps), str(launch.num_stages))
        shown.add_row(when, spec.role, spec.key, tile, *numbers, ", ".join(spec.options))
    return shown


def _assembled(found: list[tuple[str, Launch]], arch: int) -> Table:
    from kvcompile.kernels.triton.tools.assemble import Request, assemble, table

    distinct = list(dict.fromkeys(launch for _, launch in found))
    with waiting(f"assembling {len(distinct)} kernels"):
        made = assemble(Request(one.spec, arch, one.num_warps, one.num_stages, one.known) for one in distinct)
    return table(made)
