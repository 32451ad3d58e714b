"""kvcompile gives any PyTorch decoder the KV cache you choose.

fast = kvcompile.optimize(model, recipe="long_context.yaml")
fast.generate(**tokens, max_new_tokens=256, streamer=streamer)
print(kvcompile.explain(model, recipe="int8"))
kvcompile.calibrate(model, text, tokenizer=tokenizer).save("scales.json")
print(kvcompile.estimate(model.config, recipe="int8", memory="24GiB"))
print(kvcompile.quality(model, tokenizer, ["int8", "int4"], text))
fast.save("folder"); fast = kvcompile.load("folder")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# These load neither torch nor sympy until they are called. They are bound here because importing the
# submodule of the same name would otherwise put the module in the function's place.
from kvcompile.calibrate import calibrate
from kvcompile.errors import KVCompileError
from kvcompile.report.estimate import estimate
from kvcompile.report.explain import explain
from kvcompile.report.quality import quality
from kvcompile.targets.export import export
from kvcompile.util.tracing import uncollected

if TYPE_CHECKING:
    from kvcompile.api import optimize as optimize
    from kvcompile.recipe import Recipe as Recipe
    from kvcompile.runtime.load import load as load

__version__ = "0.1.0"
__all__ = [
    "KVCompileError",
    "Recipe",
    "calibrate",
    "estimate",
    "explain",
    "export",
    "load",
    "optimize",
    "quality",
]

# torch and transformers are slow to import: `kvcompile --help` and `kvcompile validate` do without.
_HOMES = {
    "optimize": "kvcompile.api",
    "Recipe": "kvcompile.recipe",
    "load": "kvcompile.runtime.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvcompile' has no attribute {name!r}")
    with uncollected():  # a collection while hundreds of modules are imported takes as long as they do
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
