"""What a manifest says of a function's caches and pages; `targets/cache_spec.py` reads it back."""

from __future__ import annotations

from kvcompile.targets.functional import Functional
from kvcompile.targets.manifest import Cache, Pages, dtype_name


def caches_of(function: Functional) -> tuple[Cache, ...]:
    """What the manifest says of a function's caches."""
    arguments = {argument.name: argument for argument in function.arguments(one=True)}
    found = []
    for name in function.caches:
        of, argument = function.shape.buffers[name], arguments[name]
        spec = of.spec
        found.append(
            Cache(
                name=name,
                dtype=dtype_name(argument.dtype),
                shape=argument.shape,
                holds=None if argument.dtype == spec.dtype else dtype_name(spec.dtype),
                fill=spec.fill,
                in_order=of.in_order,
                state=name in function.shape.state,
            )
        )
    return tuple(found)


def pages_of(function: Functional) -> tuple[Pages, ...]:
    """What the manifest says of a function's pages."""
    return tuple(
        Pages(
            table=pool.group.name,
            page_size=pool.group.page_size,
            slots=pool.group.slots,
            pages=pool.group.pages,
            dimension=f"pages_{number}",
            layers=pool.group.layers,
            caches=pool.buffers,
        )
        for number, pool in enumerate(function.shape.pools)
    )
