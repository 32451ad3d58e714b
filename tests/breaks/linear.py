"""Breaks of linear layers of one token on GPUs: the role linear, what it takes, and gates that are joined."""

from __future__ import annotations

from tests.breaks.broken import broken

ROLE, GATES = "tests/kernels/triton/linear/test_linear.py", "tests/compile/test_gates.py"

LINEAR = (
    broken(
        "programs of the second layer count their rows from the first",
        "kernels/triton/linear/linear.py",
        'own["first"] = _picked(["0", *(f"end_{layer}" for layer in range(layers - 1))])',
        'own["first"] = "0"',
        ROLE,
    ),
    broken(
        "results of layers stand side by side",
        "kernels/triton/linear/linear.py",
        "found.append(found[-1] + -(-count // APART) * APART)",
        "found.append(found[-1] + count)",
        ROLE,
    ),
    broken(
        "rows behind the last are read",
        "kernels/triton/templates/linear.py.jinja",
        "there = tl.minimum(row, n - 1)",
        "there = row",
        ROLE,
    ),
    broken(
        "columns behind the last are read",
        "kernels/triton/templates/linear.py.jinja",
        '{{ chunks("", whole, columns, "k + c < %d" % columns) | indent(4) | trim }}',
        '{{ chunks("", whole, columns) | indent(4) | trim }}',
        ROLE,
    ),
    broken(
        "columns behind the turns are left out",
        "kernels/triton/templates/linear.py.jinja",
        "{% if whole > turns * turn %}",
        "{% if not turns %}",
        ROLE,
    ),
    broken(
        "a gate that is no number is closed",
        "kernels/triton/linear/linear.py",
        '"tl.where({0} < 0.0, 0.0, {0})"',
        '"tl.maximum({0}, 0.0)"',
        ROLE,
    ),
    broken(
        "gelu of tanh without its cube",
        "kernels/triton/linear/linear.py",
        "({0} + 0.044715 * {0} * {0} * {0})",
        "({0} + 0.044715 * {0} * {0})",
        ROLE,
    ),
    broken(
        "rows may begin anywhere",
        "kernels/triton/host/linear.py",
        "        and weight.stride(0) % 16 == 0\n",
        "",
        ROLE,
    ),
    broken(
        "a thread holds more rows than registers",
        "kernels/triton/host/linear.py",
        "count * sides * each > (LOADS if count * sides <= 2 and eps is None else _FEW)",
        "count * each > 2 * LOADS",
        ROLE,
    ),
    broken(
        "a gate that somebody else reads is joined",
        "kvcompile/compile/gates.py",
        "all(len(node.users) == 1 for node in (act, gate, up))",
        "all(len(node.users) == 1 for node in (act, gate))",
        GATES,
    ),
    broken(
        "a gate of another vector is joined",
        "kvcompile/compile/gates.py",
        "and gate.args[0] is up.args[0] and _alike",
        "and _alike",
        GATES,
    ),
    broken(
        "the first half is the gate",
        "kvcompile/compile/gates.py",
        "bool(gate.args[1] == 1)",
        "False",
        GATES,
    ),
    broken(
        "one bias of two is forgotten",
        "kvcompile/compile/gates.py",
        "return (argument(gate, 2) is None) == (argument(up, 2) is None)",
        "return True",
        GATES,
    ),
    broken(
        "parts of tokens are parts of channels",
        "kvcompile/compile/gates.py",
        "tuple(cut.args[1:]) != (2, -1)",
        "cut.args[1] != 2",
        GATES,
    ),
    broken(
        "halves that no kernel joins are two products",
        "kvcompile/compile/gemv.py",
        "gate, up = _linear(x, weights[0], biases[0]).chunk(2, -1)",
        "gate, up = (_linear(x, *of) for of in zip(*(_both(own, False) for own in (weights[0], biases[0]))))",
        GATES,
    ),
)
