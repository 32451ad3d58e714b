"""Generated kernels that append and attend, as one op, over every kind of site, against oracles in float64."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings

from tests.triton_attention import Case, cases, check
from tests.triton_write import kernels_folder  # noqa: F401  (a fixture)

# The interpreter is slow: an example that fails is told as it is.
QUIET: Any = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),
}


@settings(max_examples=30, **QUIET)
@given(case=cases())
def test_any_site(case: Case) -> None:
    check(case)


@settings(max_examples=15, **QUIET)
@given(case=cases(scored=True))
def test_any_site_of_a_retention_by_scores(case: Case) -> None:
    check(case)
