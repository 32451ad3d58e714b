"""The tensors that a site's expression reads, as kernels take them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvcompile.kernels.cpp.attend import expression
from kvcompile.kernels.spec import SiteSpec


def leaves_of(site: SiteSpec, leaves: Sequence[Tensor] | None) -> list[Tensor]:
    """All of them, those that are read in the dtype that the expression reads; of any strides.

    Raises:
        TypeError: kernels do not compute the expression.
    """
    mod = site.score.mod
    if mod is None:
        return []
    if problem := expression.refusal(mod):
        raise TypeError(f"there are no kernels for this site, and its plan should have said so: {problem}")
    dtypes = expression.read(mod)
    return [leaf.to(dtypes.get(number, leaf.dtype)) for number, leaf in enumerate(leaves or ())]
