"""Carries out a recipe's section `auto`: plans the candidates one after another and takes the first that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import psutil
import torch

from kvcompile.decide.known import KnownModel
from kvcompile.errors import PlanError
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe, load_recipe
from kvcompile.util.console import format_bytes

_TOKENS_UNKNOWN = 4096


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device; None where nobody says."""
    match device.type:
        case "cuda":
            return int(torch.cuda.mem_get_info(device)[0])
        case "cpu":
            return int(psutil.virtual_memory().available)
        case _:
            return None


def free_for_caches(model: KnownModel) -> int | None:
    """Bytes that the caches of all layers may take of what is free on their devices; None where nobody says.

    Of a model over several devices, equally much is counted for each layer: the fullest device decides.
    """
    if model.device is None:
        return None
    layers = Counter(site.device or model.device for site in model.sites)
    free = {device: free_memory(device) for device in layers}
    known = [size * len(model.sites) // layers[device] for device, size in free.items() if size is not None]
    return min(known) if len(known) == len(free) else None


def choose(
    recipe: Recipe, plan_of: Callable[[Recipe], Plan], max_tokens: int | None, free: int | None
) -> Plan:
    """The plan of the first candidate that fits into the memory; its `notes` say why.

    Args:
        recipe: one with the section `auto`; its runtime, compile and verify hold for whatever is chosen.
        plan_of: plans a recipe for the model.
        max_tokens: the longest sequence the model was made for, where that is known.
        free: bytes free on the model's device; taken by half where the recipe names no memory.

    Raises:
        PlanError: nothing fits, or no memory is known: with what each candidate would need.
    """
    auto = recipe.auto
    assert auto is not None
    memory = auto.bytes
    if memory is None and free is None:
        raise PlanError(
            f"recipe {recipe.name!r} chooses by memory, and how much is free on the model's device is not known: set "
            "auto.memory, e.g. auto: {memory: 8GiB}"
        )
    budget = memory if memory is not None else (free or 0) // 2
    source = "auto.memory" if memory is not None else "half of what is free on the device"
    tokens = auto.tokens or recipe.runtime.max_tokens or max_tokens or _TOKENS_UNKNOWN
    what = f"{auto.batch} sequence{'s' if auto.batch > 1 else ''} of {tokens:,} tokens"
    tried: list[str] = []
    for name in auto.candidates:
        candidate = load_recipe(
            name,
            runtime=_runtime(recipe, tokens, auto.batch),
            compile=recipe.compile.model_dump(exclude_unset=True),
            verify=recipe.verify,
        )
        try:
            plan = plan_of(candidate)
        except PlanError as error:
            reason = str(error).splitlines()
            tried.append(f"{name}: not for this model ({' '.join(reason[-1].split())})")
            continue
        needed = plan.bytes(auto.batch, tokens)
        if needed <= budget:
            notes = (
                f"chosen for {what}, workload {auto.workload}, loss {auto.loss}, in {format_bytes(budget)} ({source})",
                *tried,
                f"{name}: {format_bytes(needed)}, the first that fits",
            )
            return replace(
                plan,
                recipe=f"{recipe.name}: {name}",
                recipe_digest=recipe.digest(),
                notes=(*plan.notes, *notes),
            )
        tried.append(f"{name}: {format_bytes(needed)}")
    lines = "\n".join(f"  - {line}" for line in tried)
    raise PlanError(
        f"recipe {recipe.name!r}: nothing fits {what} into {format_bytes(budget)} ({source}):\n{lines}\n"
        "Give more memory (auto.memory), fewer or shorter sequences (auto.batch, auto.tokens), or allow more loss "
        "(auto.loss)"
    )


def _runtime(recipe: Recipe, tokens: int, batch: int) -> dict[str, int]:
    """The recipe's own settings; buffers hold what the choice was made for, unless it says otherwise."""
    given = recipe.runtime.model_dump(exclude_unset=True)
    assert recipe.auto is not None
    limit = {} if recipe.auto.workload == "stream" else {"max_tokens": tokens}
    return {**limit, "max_batch": max(batch, recipe.runtime.max_batch), **given}
