"""In which type products of queries with keys, and of probabilities with values, are computed.

Tensor cores multiply float16 and bfloat16 and sum in float32. Integers and fp8 numbers become float16: that costs the
fewest instructions on sm_90 (a bfloat16 takes a conversion per element more), and it holds all their values exactly,
but for the levels of a codebook, which it rounds as a model in float16 would.
Its narrow range is kept safe: queries are divided by their largest channel first, scales of values by the largest one
seen. Models in float32 have float32 products. Triton's interpreter has no bfloat16 products: there it is float32.
"""

from __future__ import annotations

from kvcompile.kernels.triton.spec import DotType, KernelSpec
from kvcompile.layouts import Storage


def of_model(spec: KernelSpec) -> DotType:
    """The type for vectors in the model's dtype."""
    match spec.dtype:
        case "float16":
            return "float16"
        case "bfloat16" if "interpreted" not in spec.options:
            return "bfloat16"
        case _:
            return "float32"


def of_codes(storage: Storage, spec: KernelSpec) -> DotType:
    """The type for what `storage` keeps, before its scales."""
    code = storage.element
    if code.kind == "float":
        # The wider of the two, so that neither loses bits.
        return of_model(spec) if code.dtype in (None, spec.torch_dtype) else "float32"
    return "float32" if spec.dtype == "float32" else "float16"


def precision(kind: DotType) -> str:
    """The last argument of a `tl.dot` of numbers in `kind`: float32 is not to be multiplied as tf32."""
    return ', input_precision="ieee"' if kind == "float32" else ""
