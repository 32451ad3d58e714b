"""Rules of the proofs made wrong in turn, by module: one of the checks that are named must find each.

Rules that only say less where they are left out (an operator that becomes a function of which nothing is known) are
no mutants: what is not proved is not used.
"""

from __future__ import annotations

from tests.proofs.mutants.classify import CLASSIFY
from tests.proofs.mutants.hiding import HIDING
from tests.proofs.mutants.make import MAKE
from tests.proofs.mutants.normal_form import NORMAL_FORM
from tests.proofs.mutants.prove import PROVE
from tests.proofs.mutants.ranges import RANGES
from tests.proofs.mutants.reader import READER
from tests.proofs.mutants.site import SITE
from tests.proofs.mutants.tables import TABLES
from tests.proofs.mutants.weights import WEIGHTS

MUTANTS = (*CLASSIFY, *HIDING, *MAKE, *NORMAL_FORM, *PROVE, *RANGES, *READER, *SITE, *TABLES, *WEIGHTS)

__all__ = ["MUTANTS"]
