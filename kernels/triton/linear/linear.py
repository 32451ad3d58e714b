"""Role linear: one token by the weights of linear layers, which are read once.

    out = x W^T + b                          of each of several layers of the same x, in one launch
    out = act(x G^T + b) * (x U^T + b')      gated: of a gate and what it opens
    out = act(x W^T + b)                     activated: of one layer
    out = r + f (x W^T + b)                  added: to what stands beside a block; the sum to a second r
    x   = n * (y / sqrt(mean(y^2) + eps))    normed: of a token that is not normed yet (RMSNorm; LayerNorm)

A step of one sequence reads all weights for one token: it takes as long as memory does, if enough is on its way. So a
program asks for all that it has of its rows at once, as many 16-byte loads a thread as its registers hold, and adds up
behind them; sums are in float32, and go across the threads once. The token is read by every program, from the
multiprocessor's own cache: weights are marked as those that go first. So can its norm be every program's: the weights
come meanwhile.

| option | means |
|---|---|
| channels[k] | of x: columns of each weight |
| layers[l] | so many weights; without gate, each has results of its own |
| bias | every layer has one |
| silu, gelu, gelu_tanh, relu | gated, of the first of two layers, of equally many rows; activated, of one |
| rms[eps], .. | normed: x is the token before its norm; `linear/norm.py` has all |
| kept | normed: the token behind its norm is a result as well, the last |
| residual, residual[2] | added: one layer, whose results are added to others, and these to others again |
| factor[f] | added: results of the layer are multiplied before |
| interpreted | for Triton's interpreter: bfloat16 is rounded by its bits |

spec.block_m: rows of a program; spec.block_n: columns that its threads read with one load each. Of the rest, the dtype.
Launch: grid(spec, rows of each layer). x [k], weight [n, k], bias [n], norm and shift [k], residuals [n], all of the
model's dtype; out: the results of layer i begin at places(rows)[i].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from kvcompile.kernels.triton import helpers
from kvcompile.kernels.triton.linear.norm import is_option, norm_form
from kvcompile.kernels.triton.params import KernelSource, Param, ScalarParam, TensorParam
from kvcompile.kernels.triton.render import rendered
from kvcompile.kernels.triton.spec import KernelSpec

# Loads of 16 bytes, of 4 registers each, of a thread without a loop; of more, a turn of the loop has fewer.
LOADS, IN_TURN = 32, 8
APART = 64  # results of a layer begin at a multiple: other kernels take vectors to begin at 16 bytes
_OPTION = re.compile(r"(channels|layers)\[(\d+)\]")
_ADDED = re.compile(r"residual|residual\[2\]|factor\[(.+)\]")
_ONE = {"residual", "residual[2]"}
# Of float32 `{0}`, as PyTorch computes them in float32.
ACTIVATIONS = {
    "silu": "{0} / (1.0 + tl.exp(-{0}))",
    "gelu": "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    "gelu_tanh": "{0} / (1.0 + tl.exp(-1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0})))",
    "relu": "tl.where({0} < 0.0, 0.0, {0})",
}


def numbers(spec: KernelSpec) -> tuple[int, int]:
    """Channels of x, and layers.

    Raises:
        ValueError: an option is unknown, or one of these is missing.
    """
    found = {match[1]: int(match[2]) for match in map(_OPTION.fullmatch, spec.options) if match}
    others = {option for option in spec.options if not _OPTION.fullmatch(option)}
    acts, norm, added = (
        others & ACTIVATIONS.keys(),
        {*filter(is_option, others)},
        {*filter(_ADDED.fullmatch, others)},
    )
    unknown = others - {"bias", "kept", "interpreted", *acts, *norm, *added}
    layers = found.get("layers", 0)
    goes = len(acts) <= (layers in (1, 2)) and (
        not added or (layers == 1 and not acts and len(added - _ONE) <= 1)
    )
    if (
        unknown
        or len(found) != 2
        or not goes
        or len(added & _ONE) != bool(added)
        or ("kept" in others and not norm)
    ):
        raise ValueError(
            "linear takes options channels[k], layers[l], bias, a norm, then kept, and one activation of one layer or "
            f"two, or residual or residual[2] of one layer, then factor[f], got {list(spec.options)}"
        )
    return found["channels"], found["layers"]


def activation(spec: KernelSpec) -> str | None:
    """That of a spec that is gated or activated."""
    return next((option for option in spec.options if option in ACTIVATIONS), None)


def gated(spec: KernelSpec) -> bool:
    """Whether a program has rows of two weights, whose results are one."""
    return activation(spec) is not None and "layers[2]" in spec.options


def residuals(spec: KernelSpec) -> tuple[str, ...]:
    """What results are added to, in turn, by name."""
    if "residual[2]" in spec.options:
        return ("residual", "residual_2")
    return ("residual",) if "residual" in spec.options else ()


def places(rows: Sequence[int]) -> list[int]:
    """Where in `out` the results of each layer begin, and how long it is."""
    found = [0]
    for count in rows:
        found.append(found[-1] + -(-count // APART) * APART)
    return found


def grid(spec: KernelSpec, rows: Sequence[int]) -> tuple[int]:
    """rows: of each layer; of a gated spec, of one of both."""
    return (sum(-(-count // spec.block_m) for count in rows),)


def loop(spec: KernelSpec) -> tuple[int, int]:
    """Columns of a turn of a program's loop, and turns: 0 where it has all of its rows at once, without a loop."""
    columns, _ = numbers(spec)
    rows = spec.block_m * (2 if gated(spec) else 1)
    turn = max(1, IN_TURN // rows) * spec.block_n
    at_once = -(-columns // spec.block_n) * rows <= LOADS
    return turn, 0 if at_once else columns // spec.block_n * spec.block_n // turn


def generate(spec: KernelSpec) -> KernelSource:
    """The kernel of a spec of role linear; raises as `numbers`."""
    columns, layers = numbers(spec)
    act, both, biased = activation(spec), gated(spec), "bias" in spec.options
    outs = 1 if both else layers
    params: list[Param] = [TensorParam("x", spec.torch_dtype)]
    params += [TensorParam(f"w_{layer}", spec.torch_dtype, 2) for layer in range(layers)]
    params += [TensorParam(f"b_{layer}", spec.torch_dtype) for layer in range(layers)] if biased else []
    norm, added, (turn, turns) = norm_form(spec.options), residuals(spec), loop(spec)
    factors = [match[1] for match in map(_ADDED.fullmatch, spec.options) if match and match[1]]
    if norm is not None and turns:
        raise ValueError(
            f"a token of {columns} channels is not normed in turns: rows of {spec.block_m} are too many"
        )
    params += [TensorParam(name, spec.torch_dtype) for name in (norm.tensors if norm else ())]
    params += [TensorParam(name, spec.torch_dtype) for name in added]
    params += [TensorParam("out", spec.torch_dtype)]
    params += [ScalarParam(f"n_{layer}") for layer in range(outs)]
    whole = columns // spec.block_n * spec.block_n
    rounded = partial(helpers.stored, dtype=spec.dtype, interpreted="interpreted" in spec.options)
    text = rendered(
        "linear.py.jinja",
        params=params,
        layers=outs,
        columns=columns,
        rows=spec.block_m,
        block=spec.block_n,
        apart=APART,
        own={"n": "n_0"} if both else _own(layers, biased),
        weights=_sides() if both else {"w": _names("weight", "stride", "bias")},
        biased=biased,
        turn=turn,
        turns=turns,
        whole=whole,
        norm=norm,
        kept="kept" in spec.options,
        added=added,
        factor=factors[0] if factors else "",
        gate=ACTIVATIONS[act].format("gate") if both and act else "",
        act=ACTIVATIONS[act].format("result") if act and not both else "",
        rounded=rounded,
        stored=rounded("result"),
    )
    return KernelSource("linear", tuple(params), helpers.module(text))


def _names(weight: str, stride: str, bias: str) -> dict[str, str]:
    return {"weight": weight, "stride": stride, "bias": bias}


def _sides() -> dict[str, dict[str, str]]:
    """Of a gated spec, what a program reads for each side."""
    return {
        side: _names(f"w_{layer}_ptr", f"w_{layer}_s0", f"b_{layer}_ptr")
        for layer, side in enumerate(("gate", "up"))
    }


def _own(layers: int, biased: bool) -> dict[str, str]:
    """What is of the layer that a program has rows of, by name: expressions."""
    found = {"n": "n_{}", "weight": "w_{}_ptr", "stride": "w_{}_s0"} | (
        {"bias": "b_{}_ptr"} if biased else {}
    )
    own = {name: _picked([of.format(layer) for layer in range(layers)]) for name, of in found.items()}
    if layers > 1:
        own["first"] = _picked(["0", *(f"end_{layer}" for layer in range(layers - 1))])
        own["begin"] = _picked(["0", *(f"begin_{layer}" for layer in range(1, layers))])
    return own


def _picked(of: Sequence[str]) -> str:
    """An expression: of[i], in a program of layer i."""
    text = of[-1]
    for layer in range(len(of) - 2, -1, -1):
        text = f"tl.where(program < end_{layer}, {of[layer]}, {text})"
    return text
