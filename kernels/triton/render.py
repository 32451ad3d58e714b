"""Templates of kernels: jinja2 over `templates/*.jinja`, strict about names, without the lines that only steer.

In every template `jit(params)` prints the decorator. Sizes that change from call to call are not specialised for:
Triton would otherwise compile once more for a size of 1 and for multiples of 16. Strides are: they stay, and that
they are multiples of 16 is what loads of whole vectors rest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvcompile.kernels.triton.params import Param, ScalarParam
from kvcompile.kernels.triton.roles import ROLES
from kvcompile.kernels.triton.spec import KernelSpec

_TEMPLATES = Path(__file__).parent / "templates"


def jit(params: Sequence[Param]) -> str:
    """The decorator of a kernel with these arguments."""
    sizes = [param.name for param in params if isinstance(param, ScalarParam) and param.type != "fp32"]
    listed = ", ".join(f'"{name}"' for name in sizes)
    return f"@triton.jit(do_not_specialize=[{listed}])" if sizes else "@triton.jit"


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Undefined names raise; a line that holds only a statement leaves no line; text ends with a newline."""
    made = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.globals["jit"] = jit
    return made


def rendered(template: str, **values: object) -> str:
    """The text of `templates/<template>` with these values."""
    return environment().get_template(template).render(**values)


def header(spec: KernelSpec, versions: bool = True) -> str:
    """Comment lines before a kernel: what it is for, its spec, and what made it; the same for equal specs."""
    return rendered("header.jinja", spec=spec, role=ROLES[spec.role], versions=_made_by() if versions else "")


@cache
def _made_by() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("kvcompile", "torch", "triton"))
