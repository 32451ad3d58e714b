"""The symbols every layout's address and byte expressions are written in.

pos     position of a token in its sequence, 0-based
slot    index into a layer's array of slots
table   a function: the page of a pool that stands at an entry of the sequence's page table
length  tokens a sequence has seen
query, key  positions of a query and of a key that it may see
held    position of the token in a slot, where the cache itself notes it
given_up  slot that a retention by scores gives up
B       sequences          T   limit on tokens per sequence
H       KV heads of a layer
D, Dv   channels of one K / V vector
P       bytes of one model-dtype element
"""

from __future__ import annotations

import sympy

pos, slot = sympy.symbols("pos slot", integer=True)
query, key = sympy.symbols("query key", integer=True)
held, given_up = sympy.symbols("held given_up", integer=True)
table = sympy.Function("table", integer=True, nonnegative=True)
length = sympy.Symbol("length", integer=True, nonnegative=True)
B, T, H, D, Dv, P = sympy.symbols("B T H D Dv P", integer=True, positive=True)
