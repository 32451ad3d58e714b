"""Templates of C++ kernels: jinja2 over `templates/*.jinja`, strict about names."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_TEMPLATES = Path(__file__).parent / "templates"
_GAPS = re.compile(r"\n{3,}")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """Undefined names raise; a line that holds only a statement leaves no line; text ends with a newline."""
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def rendered(template: str, **values: object) -> str:
    """The text of `templates/<template>` with these values."""
    return _GAPS.sub("\n\n", _environment().get_template(template).render(**values))


def real(number: float) -> str:
    """A float32 as C++ has it, exactly."""
    return float(number).hex() + "f" if number == number and abs(number) != float("inf") else "INFINITY"
