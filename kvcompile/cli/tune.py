"""`kvcompile tune`: how kernels are best cut up on this GPU, measured and written to a table."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcompile.cli import predict
from kvcompile.cli.common import Debug, Dtype, command, show, stages, stderr, waiting
from kvcompile.cli.kernels import Dim, Heads, heads_of
from kvcompile.errors import InputError, KernelError
from kvcompile.util.console import table

if TYPE_CHECKING:
    import torch

    from kvcompile.kernels.triton.spec import Role
    from kvcompile.kernels.triton.tools.tune import Subject

NO_GPU = (
    "kvcompile tune measures on an NVIDIA GPU, and there is none here. Of a CPU there is nothing to tune: C++ kernels "
    "cut their slots by how many there are and how many threads, and whoever is free takes the next piece; other sizes "
    "of pieces were no faster (docs/kernels.md)"
)
Recipes = Annotated[
    str,
    typer.Option("--recipes", "-r", help="Shipped recipes or YAML files, separated by commas: their caches."),
]
Batches = Annotated[str, typer.Option("--batch", help="Sequences, separated by commas.")]
Contexts = Annotated[str, typer.Option("--context", help="Tokens in the cache, separated by commas.")]
Prompts = Annotated[int, typer.Option("--prompt", min=16, help="New tokens of a prompt, for prefill.")]
Roles = Annotated[str, typer.Option("--roles", help="decode, prefill, or both.")]
Rounds = Annotated[int, typer.Option(min=1, help="Measurements of each configuration; the median counts.")]
Hopeless = Annotated[
    bool, typer.Option("--hopeless", help="Measure those as well that the model of this GPU calls hopeless.")
]
Predict = Annotated[
    str | None,
    typer.Option(
        "--predict",
        metavar="GPU",
        help="Measure nothing: list what is predicted to run best on a GPU (h200, a100, ...), and write no table.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="The table; by default this GPU's in kvcompile's cache.")
]


@command
def tune(
    recipes: Recipes = "baseline,int8,fp8,int4,paged",
    heads: Heads = "32/8",
    head_dim: Dim = 128,
    batch: Batches = "1,32",
    context: Contexts = "4096,32768",
    prompt: Prompts = 1024,
    roles: Roles = "decode,prefill",
    rounds: Rounds = 10,
    dtype: Dtype = None,
    hopeless: Hopeless = False,
    predict_on: Predict = None,
    out: Out = None,
    debug: Debug = False,
) -> None:
    """Measure how generated Triton kernels run best on this GPU, for the caches of recipes and a model's heads.

    The table it writes is used from then on, by plans that are made on a GPU of this name. Takes some minutes for each
    recipe. Configurations that are predicted to take twice as long as the best are not tried. C++ kernels of CPUs have
    nothing to tune: they compute how their work is best cut.
    Example: kvcompile tune --recipes int8,paged_int8 --heads 32/8 --head-dim 128
    """
    sizes = heads_of(heads)
    batches, contexts = _numbers("--batch", batch), _numbers("--context", context)
    with waiting("starting"):
        import torch

        from kvcompile.kernels.triton import config as configs
        from kvcompile.kernels.triton.tools import tune as tuner
        from kvcompile.original.model_config import dtype_name
    asked = [role.strip() for role in roles.split(",")]
    if unknown := [role for role in asked if role not in tuner.ROLES]:
        raise InputError(f"--roles: expected {' or '.join(tuner.ROLES)}, got {unknown[0]!r}")
    kind = getattr(torch, dtype_name(dtype or "bfloat16"))
    subjects = [
        subject_of(name.strip(), role, sizes, head_dim, kind, batches, contexts, prompt)
        for name in recipes.split(",")
        for role in tuner.ROLES
        if role in asked
    ]
    if predict_on is not None:
        predict.of_tuning(subjects, predict.machine_named(predict_on))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        raise KernelError(NO_GPU)
    with stages() as progress:
        found = tuner.tune(subjects, device, rounds, progress, hopeless)
    where = tuner.write(found, configs.device_of(device), out)
    shown = table("recipe", "role", "configuration", "microseconds", "before", "gain", right=("gain",))
    for one in found:
        said = predict.said(one.best, one.subject.role)
        times = (", ".join(f"{us:,.1f}" for us in values) for values in (one.us, one.before))
        shown.add_row(one.subject.name, one.subject.role, said, *times, f"{one.gain:.2f}")
    show(shown)
    for one in found:
        if one.left_out:
            left = f"{one.left_out} configurations of {one.tried + one.left_out} are predicted to be hopeless"
            said = (
                f"{one.subject.name}, {one.subject.role}: {left}, and were not tried (--hopeless tries them)"
            )
            stderr().print(said, style="dim", highlight=False, soft_wrap=True)
    stderr().print(str(where), style="dim", highlight=False, soft_wrap=True)


def subject_of(
    name: str,
    role: Role,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    prompt: int,
) -> Subject:
    """The cache of a recipe's layers with full attention, at every batch and context."""
    from kvcompile.kernels.spec import SiteSpec
    from kvcompile.kernels.triton.tools.tune import Point, Subject
    from kvcompile.recipe import load_recipe
    from kvcompile.recipe.retention import LayerContext

    layout = load_recipe(name).cache_for(0, 1, "causal")[0].build(LayerContext(tokens=max(contexts)))
    tokens = 1 if role == "decode" else prompt
    points = tuple(Point(b, max(c, tokens), tokens) for b, c in product(batches, contexts))
    return Subject(name, role, SiteSpec(layout, dim**-0.5), heads, (dim, dim), dtype, points)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise InputError(f"{option}: expected numbers separated by commas, such as 1,32; got {text!r}")
    return tuple(map(int, parts))
