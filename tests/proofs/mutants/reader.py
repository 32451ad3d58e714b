"""Rules of passes/score_mod/reader.py made wrong."""

# ruff: noqa: E501

from __future__ import annotations

from tests.proofs.heads import heads
from tests.proofs.mutants.base import made

# fmt: off
READER = [
    *made(
        "reader", (heads,),
        ('if any(places[dim] is not place for dim, place in wanted.items()):', 'if False:'),
        ('group = integer(num_heads // heads)', 'group = integer(heads)'),
        ('head = integer(0) if heads == 1 else make("floordiv", torch.int64, H, group)', 'head = integer(0) if heads == 1 else make("mod", torch.int64, H, group)'),
        ('is found\n        except (Untranslatable, Refused):\n            return False', 'is not None\n        except (Untranslatable, Refused):\n            return False'),
        ('zip(order, (B, head, Q, integer(0) if channels == 1 else R), strict=True)', 'zip(order[:3], (B, head, Q), strict=True)'),
        ('whole = (*rows, R, Q) if transposed else (*rows, Q, R)', 'whole = (*rows, Q, R)'),
    ),
]
# fmt: on
