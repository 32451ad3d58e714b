"""The codes, a family a file. To add one, add its file and its line here."""

from __future__ import annotations

from kvcompile.layouts.storage.code import Code
from kvcompile.layouts.storage.codes import e2m1, floats, fp8, integers, nf4

CODES: dict[str, Code] = {
    code.name: code for family in (floats, fp8, integers, nf4, e2m1) for code in family.CODES
}
