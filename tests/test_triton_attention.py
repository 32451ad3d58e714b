"""Generated kernels that append and attend, as one op, over every kind of site, against oracles in float64."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.triton_attention import Case, cases, check
from tests.triton_write import kernels_folder  # noqa: F401  (a fixture)

QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@settings(max_examples=30, **QUIET)
@given(case=cases())
def test_any_site(case: Case) -> None:
    check(case)


@settings(max_examples=15, **QUIET)
@given(case=cases(scored=True))
def test_any_site_of_a_retention_by_scores(case: Case) -> None:
    check(case)
