"""Where the code of this package and of PyTorch lies: what a trace of calls passes through is not the model's own."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch


def _folders(*packages: str) -> tuple[str, ...]:
    specs = [find_spec(name) for name in packages]
    places = [place for spec in specs if spec is not None for place in spec.submodule_search_locations or ()]
    return tuple(os.path.abspath(place) + os.sep for place in places)


# `passes` and `kernels` may lie beside the package, as they do where it is installed in place.
KVCOMPILE = _folders("kvcompile", "kvcompile.passes", "kvcompile.kernels")
TORCH = os.path.dirname(torch.__file__) + os.sep
