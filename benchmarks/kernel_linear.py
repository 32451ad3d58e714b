"""Linear layers of one token: what `kernels.py` and `kernel_configurations.py` measure of role linear.

Shapes are those of a decode step: of Llama-3.1-8B, which the model of a machine predicts as well
(`kernels/triton/predict/step.py`), of SmolLM2-135M, whose launches are small, and one in float32. Beside it are the
linear layers of PyTorch, one call each, with what else the launch does in calls beside them. Weights are there so
often that no L2 cache holds what comes next. `kernel_configurations.py` also has shapes of other models: the rule by
which the host cuts layers up is of these measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.compile.linear_forms import ACTIVATIONS
from kvcompile.kernels.triton.device import device_of
from kvcompile.kernels.triton.host import ops_linear
from kvcompile.kernels.triton.host.linear import Norm, added, gated, linears, norm_in
from kvcompile.kernels.triton.linear.linear import loop, places
from kvcompile.kernels.triton.predict.linears import Form, Layers, form_of
from kvcompile.kernels.triton.predict.step import LINEARS, measured_as

PEER = "cuBLAS"  # what PyTorch calls for them on a GPU
_TILE = 16384  # rows of a weight that are in float64 at once
_ROWS, _WARPS = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)
_MOST = 16  # rows of a program that are tried, of both weights of a gate together
_SEED, _EPS = 0, 1e-5


class Case(Layers):
    """Layers of one x, in one launch, under the name of a case."""

    def tiny(self) -> Case:
        """The same with sizes for Triton's interpreter."""
        rows = (33, 9, 9) if len(self.rows) > 1 and not self.activation else (33,) * len(self.rows)
        return replace(self, columns=144, rows=rows)


def _case(of: Layers, name: str) -> Case:
    return Case(name, of.columns, of.rows, of.activation, of.dtype, of.normed, of.added, of.how)


_SMALL = (
    Layers("q, k, v", 576, (576, 192, 192)),
    Layers("o", 576, (576,)),
    Layers("gate, up", 576, (1536, 1536), "silu"),
    Layers("down", 1536, (576,)),
)
_FULL = next(of for of in LINEARS if of.name == "o")
LINEAR = (
    *(_case(of, measured_as(of)) for of in LINEARS),
    *(_case(replace(of, normed=False), f"{measured_as(of)}, no norm") for of in LINEARS if of.normed),
    *(_case(of, f"linear SmolLM2 {of.name}") for of in _SMALL),
    _case(replace(_FULL, dtype=torch.float32, added=False), f"{measured_as(_FULL)} fp32"),
)
# Columns of each layer, and rows: behind a norm queries, keys and values, or a gate and what it opens; and layers whose
# results are added to others. Of models from 1 to 70 billion weights.
_NORMED = (
    (2048, (2048, 512, 512)),
    (3072, (3072, 1024, 1024)),
    (3584, (3584, 512, 512)),
    (5120, (5120, 1024, 1024)),
)
# Of Pythia-1.4B and Phi-2 a LayerNorm, of Gemma-2B and 7B an RMSNorm with 1 + w.
_NORMS = (
    ((2048, (2048, 2048, 2048)), "layer shift"),
    ((2560, (2560, 2560, 2560)), "layer shift"),
    ((2048, (2048, 256, 256)), "wide one"),
    ((3072, (4096, 4096, 4096)), "wide one"),
)
_GATED = ((2048, 8192), (3584, 18944), (5120, 17408))
_ADDED = (
    *((2048, 2048), (3072, 3072), (5120, 5120), (8192, 8192), (8192, 2048), (8192, 3072), (11008, 4096)),
    *((17408, 5120), (18944, 3584), (28672, 8192), (4864, 896)),
)
SWEPT = (
    *(
        Case(f"linear {columns} to {', '.join(map(str, rows))}, normed", columns, rows, normed=True)
        for columns, rows in _NORMED
    ),
    *(
        Case(f"linear {columns} to {', '.join(map(str, rows))}, {how}", columns, rows, normed=True, how=how)
        for (columns, rows), how in _NORMS
    ),
    *(
        Case(f"linear {columns} to {rows}, gate and up, normed", columns, (rows, rows), "silu", normed=True)
        for columns, rows in _GATED
    ),
    *(Case(f"linear {columns} to {rows}, added", columns, (rows,), added=True) for columns, rows in _ADDED),
)


@dataclass(frozen=True)
class Problem:
    """x: [1, columns]; weights: of each copy, [rows, columns] of each layer

    norm: of x; residual: [1, rows], which results are added to
    """

    case: Case
    x: Tensor
    weights: Sequence[list[Tensor]]
    norm: Norm | None
    residual: Tensor | None

    @property
    def bytes(self) -> int:
        """Those that must be read or written."""
        case = self.case
        results = sum(case.rows[:1] if case.activation else case.rows)
        read = self.x.nbytes * (1 + (0 if self.norm is None else len(self.norm.tensors)))
        return case.weight_bytes + read + results * case.dtype.itemsize * (2 if case.added else 1)


def filled(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Numbers of a model: results are about as large as x."""
    return torch.randn(shape, generator=random, device=random.device, dtype=dtype) * shape[-1] ** -0.5


def problem_of(case: Case, device: torch.device, room: int) -> Problem:
    """As many copies of the weights as are read `room` bytes of together."""
    random = torch.Generator(device).manual_seed(_SEED)
    copies = max(1, -(-room // case.weight_bytes))
    weights = [
        [filled((count, case.columns), case.dtype, random) for count in case.rows] for _ in range(copies)
    ]
    x = filled((1, case.columns), case.dtype, random) * case.columns**0.5
    norm = norm_in(case.how, _EPS, ())
    each = norm.form.tensors if case.normed else ()
    own = [torch.rand(case.columns, generator=random, device=device).to(case.dtype) + 0.5 for _ in each]
    norm = norm._replace(tensors=tuple(own))
    residual = filled((1, case.rows[0]), case.dtype, random) if case.added else None
    return Problem(case, x, weights, norm if case.normed else None, residual)


def call_of(problem: Problem, copy: int = 0) -> Callable[[], list[Tensor]]:
    """Their kernel, in the form that the host takes."""
    x, weights, activation = problem.x, problem.weights[copy], problem.case.activation
    norm, residual = problem.norm, problem.residual
    if residual is not None:
        return lambda: [added(x, weights[0], None, [residual])]
    if activation:
        return lambda: [gated(x, weights, [], activation, norm)]
    return lambda: linears(x, weights, [], norm)


def peer_of(problem: Problem, copy: int = 0) -> Callable[[], list[Tensor]]:
    """The same by PyTorch."""
    weights = problem.weights[copy]
    return lambda: _plain(problem, problem.x.dtype, lambda x: [F.linear(x, weight) for weight in weights])


def _plain(problem: Problem, dtype: torch.dtype, layers: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """What stands around the layers, by PyTorch in a dtype."""
    x, norm, activation = problem.x.to(dtype), problem.norm, problem.case.activation
    found = layers(x if norm is None else _normed(x, norm))
    if activation:
        return [ACTIVATIONS[activation](found[0]) * found[1]]
    return found if problem.residual is None else [problem.residual.to(dtype) + found[0]]


def _normed(x: Tensor, norm: Norm) -> Tensor:
    """A norm, by one call of PyTorch."""
    shape, given = (
        x.shape[-1:],
        dict(zip(norm.form.tensors, (of.to(x.dtype) for of in norm.tensors), strict=True)),
    )
    weight = given.get("norm")
    if norm.form.layer:
        return F.layer_norm(x, shape, weight, given.get("shift"), norm.form.eps)
    one = weight is not None and "one" in norm.form.words
    return F.rms_norm(x, shape, 1.0 + weight if one else weight, norm.form.eps)  # type: ignore[operator]


def exact(problem: Problem) -> list[Tensor]:
    """What the first copy gives in float64, nothing rounded between."""

    def layers(x: Tensor) -> list[Tensor]:
        return [
            torch.cat([F.linear(x, part.double()) for part in weight.split(_TILE)], -1)
            for weight in problem.weights[0]
        ]

    return _plain(problem, torch.float64, layers)


def error_of(made: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The relative error of the layer that has the largest."""
    pairs = zip(made, expected, strict=True)
    return max(float((one.double() - true).norm() / true.norm()) for one, true in pairs)


def allowed(problem: Problem, expected: Sequence[Tensor]) -> float:
    """Twice what PyTorch is off by in the same dtype, and rounding (`tests/support/budget.py`)."""
    return 2 * error_of(peer_of(problem)(), expected) + torch.finfo(problem.case.dtype).eps


def form_now(problem: Problem) -> Form:
    spec, warps = form_of(problem.case, device_of(problem.x.device))
    return Form(spec.block_m, spec.block_n, warps)


def forms(problem: Problem) -> list[Form]:
    """That which the host takes, then others: rows of a program x warps, whose threads load 16 bytes of a row."""
    case, sides = problem.case, 2 if problem.case.activation else 1
    now, wide = form_now(problem), 32 * 16 // case.dtype.itemsize
    others = [
        Form(rows, warps * wide, warps)
        for rows in _ROWS
        for warps in _WARPS
        if rows * sides <= _MOST and (warps == 1 or warps * wide <= case.columns)
    ]
    if case.normed:  # not in turns: the norm is of all columns
        spec, _ = form_of(case, device_of(problem.x.device))
        others = [one for one in others if not loop(replace(spec, block_m=one.rows, block_n=one.block))[1]]
    others.sort(key=lambda one: abs(one.rows * one.block - now.rows * now.block))
    return list(dict.fromkeys((now, *others)))


def call_in(form: Form, problem: Problem, copy: int = 0) -> Callable[[], list[Tensor]]:
    """Their kernel in another form."""
    case, x, weights = problem.case, problem.x.view(-1), problem.weights[copy]
    spec, _ = form_of(case, device_of(x.device))
    text = replace(spec, block_m=form.rows, block_n=form.block).to_json()
    rows = case.rows[:1] if case.activation else case.rows
    parts = list(zip(places(rows), rows, strict=False))
    norm = [] if problem.norm is None else list(problem.norm.tensors)
    residuals = [] if problem.residual is None else [problem.residual.view(-1)]

    def run() -> list[Tensor]:
        out = ops_linear.linear(x, weights, [], norm, residuals, form.warps, text)
        return [out[None, first : first + count] for first, count in parts]

    return run
