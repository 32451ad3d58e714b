"""The role linear ahead of time: nothing spills, weights come in whole vectors, with time for what is done to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcompile.kernels.triton.host.linear import form, holds_norm
from kvcompile.kernels.triton.linear import linear as role
from kvcompile.kernels.triton.linear.norm import NormForm
from kvcompile.kernels.triton.tools.assemble import Request, assemble
from tests.support.kernel_specs import DEVICES

# Columns, rows of each result, layers, activation, further: Llama-3.1-8B, and what is uneven or long.
NORMED: dict[str, Any] = {"norm": NormForm(1e-5)}
GEMMAS: dict[str, Any] = {"norm": NormForm(1e-6, words=frozenset({"wide", "one"}))}
LAYER_NORM: dict[str, Any] = {"norm": NormForm(1e-5, True, frozenset({"shift"})), "biased": True}
LAYERS: dict[str, tuple[Any, ...]] = {
    "queries, keys and values behind a norm": (4096, (4096, 1024, 1024), 3, None, NORMED),
    "gate and up behind a norm": (4096, (14336,), 2, "silu", NORMED),
    "wide gate and up behind a norm": (8192, (28672,), 2, "silu", NORMED),
    "wide queries behind a norm": (10240, (10240,), 1, None, NORMED),
    "a small model's behind a norm": (576, (576, 192, 192), 3, None, NORMED),
    "Gemma's gate and up behind a norm": (3072, (24576,), 2, "gelu_tanh", GEMMAS),
    "Gemma's queries behind a norm": (2048, (2048, 256, 256), 3, None, GEMMAS),
    "StarCoder2's queries behind a LayerNorm": (3072, (3072, 256, 256), 3, None, LAYER_NORM),
    "Pythia's behind a LayerNorm": (2048, (6144,), 1, None, LAYER_NORM),
    "a gate behind a LayerNorm": (3072, (12288,), 2, "silu", LAYER_NORM),
    "a router behind a norm that is kept": (4096, (64,), 1, None, {**NORMED, "kept": True}),
    "Phi's behind a LayerNorm that is kept": (2560, (2560,) * 3, 3, None, {**LAYER_NORM, "kept": True}),
    "StarCoder2's activated behind a LayerNorm": (3072, (12288,), 1, "gelu_tanh", LAYER_NORM),
    "activated": (6144, (24576,), 1, "gelu", {"biased": True}),
    "a part of it added twice": (16384, (4096,), 1, None, {"added": 2, "factor": 0.22}),
    "output added": (4096, (4096,), 1, None, {"added": 1}),
    "queries, keys and values": (4096, (4096, 1024, 1024), 3, None),
    "output": (4096, (4096,), 1, None),
    "gate and up": (4096, (14336,), 2, "silu"),
    "down": (14336, (4096,), 1, None),
    "head": (4096, (128256,), 1, None),
    "a small model's": (576, (576, 192, 192), 3, None),
    "in turns": (53248, (16384,), 1, None),
    "a gate of tanh": (2560, (10240,), 2, "gelu_tanh"),
    "a gate of erf": (2304, (9216,), 2, "gelu"),
}
QUICK = {
    (90, "queries, keys and values behind a norm", torch.bfloat16),
    (90, "gate and up behind a norm", torch.bfloat16),
    (90, "Gemma's gate and up behind a norm", torch.bfloat16),
    (90, "StarCoder2's activated behind a LayerNorm", torch.bfloat16),
    (90, "Phi's behind a LayerNorm that is kept", torch.bfloat16),
    (90, "a part of it added twice", torch.bfloat16),
    (90, "down", torch.bfloat16),
    (120, "in turns", torch.bfloat16),
}


def taken(arch: int, name: str, dtype: torch.dtype) -> bool:
    """Whether the kernel takes it: a norm's token has to fit the registers."""
    columns, _, _, activation, *further = LAYERS[name]
    sides = 2 if activation and LAYERS[name][2] == 2 else 1
    norm = further[0].get("norm") if further else None
    return norm is None or holds_norm(columns, dtype, DEVICES[arch], norm, sides)


CASES = [
    pytest.param(
        arch,
        name,
        dtype,
        marks=() if (arch, name, dtype) in QUICK else pytest.mark.slow,
        id=f"{arch}-{name}-{dtype}",
    )
    for arch in DEVICES
    for name in LAYERS
    for dtype in (torch.bfloat16, torch.float32)
    if taken(arch, name, dtype)
]


@pytest.mark.parametrize(("arch", "name", "dtype"), CASES)
def test_weights_are_read_as_fast_as_they_come(arch: int, name: str, dtype: torch.dtype) -> None:
    """An H200 has time for 15.6 instructions of a thread for each element of 16 bits, and for 31 of 32."""
    columns, rows, layers, activation, *further = LAYERS[name]
    how = further[0] if further else {}
    device, sides = DEVICES[arch], 2 if activation and layers == 2 else 1
    norm = how.get("norm")
    spec, warps = form(columns, rows, layers, dtype, device, activation=activation, **how)
    (made,) = assemble([Request(spec, arch, warps, 2)])
    assert not made.spills and not made.stack
    # Residuals and biases are single numbers of some threads.
    single = {8 * dtype.itemsize} if how.get("added") or how.get("biased") else set()
    assert set(made.loads) - single == {128}, made.loads
    # Two warps and more meet once, when a row is summed up; of several sums, once for each.
    assert made.shared <= 1024 and made.barriers == 0
    text = role.generate(spec).text
    turns = text.count("for start in") and made.instructions  # some releases of Triton unroll them
    held = spec.block_m * sides * columns / (32 * warps)  # elements of a thread
    held += (1 + len(norm.tensors)) * columns / (32 * warps) if norm else 0
    code = turns or sum(made.opcodes.values())
    if not turns:
        # Besides the sums: a norm, or the polynomials of an error function.
        behind = 500 if norm else 300 if activation == "gelu" else 250
        assert code <= 6 * held + behind, (code, held)
    else:
        assert code <= 6 * role.IN_TURN * 16 // dtype.itemsize + 30, code
    # Two programs are on a multiprocessor at least, so that one reads while the other sums up.
    assert made.registers * 32 * warps <= 65536 // 2
