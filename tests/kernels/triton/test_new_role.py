"""A kernel role that is added by its template, its file and its line is rendered, launched and right.

It does what the section "Add a kernel role" of CONTRIBUTING.md says, and nothing else.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jinja2 import ChoiceLoader, DictLoader

from kvcompile.kernels.spec import SiteSpec
from kvcompile.kernels.triton import render
from kvcompile.kernels.triton.generate import generate
from kvcompile.kernels.triton.host.launch import recording
from kvcompile.kernels.triton.host.site_kernels import kernels_of
from kvcompile.kernels.triton.host.source import kernel
from kvcompile.kernels.triton.roles import ROLES, KernelRole
from kvcompile.kernels.triton.spec import KernelSpec
from kvcompile.layouts import CacheLayout
from tests.support import dummy_role
from tests.support.triton_write import kernels_folder  # noqa: F401  (a fixture)

DOES = "the mean key of a head"
HEADS, DIM = 3, 16


@pytest.fixture
def role(monkeypatch: pytest.MonkeyPatch) -> str:
    """Its line, and its template beside the others."""
    monkeypatch.setitem(ROLES, "head_means", KernelRole("tests.support.dummy_role", DOES))
    own = DictLoader({"head_means.py.jinja": dummy_role.TEMPLATE})
    environment = render.environment()
    assert environment.loader is not None
    monkeypatch.setattr(environment, "loader", ChoiceLoader([environment.loader, own]))
    return "head_means"


def spec_of(role: str, dtype: torch.dtype = torch.float32) -> KernelSpec:
    """As a site makes it, with what the device decides."""
    site = SiteSpec(CacheLayout(), 0.5, kernels="triton")
    return kernels_of(site, (HEADS, HEADS), (DIM, DIM), dtype, torch.device("cpu"), False).spec(role)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_a_new_role_needs_its_template_its_file_and_its_line(
    role: str, dtype: torch.dtype, tokens: int
) -> None:
    spec = spec_of(role, dtype)
    assert KernelSpec.from_json(spec.to_json()) == spec
    k = (
        torch.randn(2, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(0))
        .to(dtype)
        .transpose(1, 2)
    )
    found = dummy_role.head_means(k, spec.to_json())
    torch.testing.assert_close(found, 0.5 * k.float().mean(2), rtol=1e-5, atol=1e-5)


def test_its_file_says_what_it_does(role: str) -> None:
    made = kernel(spec_of(role))
    text = Path(made.path).read_text("utf-8")
    assert made.path.name.startswith("head_means_") and DOES in text and generate(made.spec).text in text
    compile(text, str(made.path), "exec")


def test_its_launches_are_recorded(role: str) -> None:
    with recording() as found:
        dummy_role.head_means(torch.zeros(2, HEADS, 5, DIM), spec_of(role).to_json())
    assert [(one.kernel.spec.role, one.grid, one.sizes) for one in found] == [
        (role, (HEADS, 2), {"tokens": 5})
    ]
    with pytest.raises(TypeError, match=r"head_means kernel: k is torch\.float64 .* expected torch\.float32"):
        dummy_role.head_means(torch.zeros(2, HEADS, 5, DIM).double(), spec_of(role).to_json())


def test_a_tiled_role_has_the_tiles_of_the_table(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = spec_of(role)
    monkeypatch.setitem(ROLES, role, KernelRole("tests.support.dummy_role", DOES, tiled=True))
    tiled = spec_of(role)
    table = kernels_of(plain.site, (HEADS, HEADS), (DIM, DIM), torch.float32, torch.device("cpu"), False)
    own = table.config(role)
    assert (tiled.block_m, tiled.block_n) == (own.block_m, own.block_n) != (plain.block_m, plain.block_n)
