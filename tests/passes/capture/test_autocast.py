"""Contexts within a forward: autocast becomes casts, gradient modes and checkpoints nothing, control flow a refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kvcompile
from kvcompile.errors import ModelError
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.graph import target_name
from tests.passes.capture.test_trace import EAGER, VOCAB, Body, Rows, logits
from tests.support.models import NanoGPT, make

BF16 = torch.bfloat16


def half(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        return self.head(x)[..., :32].float()


def einsum(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    with torch.amp.autocast("cpu", dtype=BF16):
        return torch.einsum("bsi,ij->bsj", x, self.embed.weight.T).float()[..., :32]


def mixed(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    """A list of dtypes: cat promotes."""
    with torch.autocast("cpu", dtype=BF16):
        y = x[..., :16] @ x.new_ones(16, 16)
        return torch.cat([y, x[..., 16:]], -1)


def nested(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        y = self.head(x)
        with torch.autocast("cpu", enabled=False):
            y = y.float() @ self.embed.weight
        z = F.scaled_dot_product_attention(y, y, y, is_causal=True)
    return z.float()


@torch.autocast("cpu", dtype=BF16)
def decorated(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    return self.head(x).float()[..., :32]


def of_another_device(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=BF16, enabled=False):
        return self.head(x)[..., :32]


@pytest.mark.parametrize("body", [half, einsum, mixed, nested, decorated, of_another_device])
def test_autocast_is_seen_through(body: Body) -> None:
    model = Rows(body)
    captured = capture(model)
    ids = torch.randint(0, VOCAB, (2, 19))
    with torch.no_grad():
        assert torch.equal(logits(captured, ids), model(ids))
    casts = [n for n in captured.graph_module.graph.nodes if target_name(n) == "to" and n.args[1] is BF16]
    assert bool(casts) == (body is not of_another_device)


def test_a_decoder_under_autocast() -> None:
    class Half(NanoGPT):
        def forward(self, input_ids: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=BF16):
                return super().forward(input_ids).float()

    model = make(Half)
    fast = kvcompile.optimize(model, **{**EAGER, "verify": "off"})
    ids = torch.randint(0, VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(ids)
        plain = NanoGPT.forward(model, ids)
    found = torch.cat([fast(part) for part in ids.split((13, 1, 16), dim=1)], dim=1)
    noise = float((wanted - plain).square().mean().sqrt())
    assert float((found - wanted).square().mean().sqrt()) < noise


def no_grad(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def enable_grad(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    with torch.enable_grad():
        return x * 2


def inference_mode(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


def set_grad(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    with torch.set_grad_enabled(True), torch.autocast("cpu", dtype=BF16):
        return self.head(x)[..., :32].float()


def checkpointed(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    found = checkpoint(lambda y: y * 2, x, use_reentrant=False)
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("body", [no_grad, enable_grad, inference_mode, set_grad, checkpointed])
def test_contexts_that_compute_nothing(body: Body) -> None:
    model = Rows(body)
    captured = capture(model)
    higher = [
        node
        for node in captured.graph_module.graph.nodes
        if isinstance(node.target, torch._ops.HigherOrderOperator) or node.op == "call_module"
    ]
    assert not higher
    ids = torch.randint(0, VOCAB, (2, 19))
    with torch.no_grad():
        assert torch.equal(logits(captured, ids), model(ids))


def branch(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    found = torch.cond(ids.sum() > 3, lambda y: y * 2, lambda y: y + 1, (x,))
    assert isinstance(found, Tensor)
    return found


def loop(self: Rows, x: Tensor, ids: Tensor) -> Tensor:
    from torch._higher_order_ops import while_loop

    count = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2.0), (count, x))[1]


@pytest.mark.parametrize(("body", "name"), [(branch, "cond"), (loop, "while_loop")])
def test_control_flow_is_refused_by_name(body: Callable[..., Tensor], name: str) -> None:
    with pytest.raises(ModelError, match=rf"the model uses {name} \(.*test_trace.py:"):
        capture(Rows(body))


def test_casts_are_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast that is not seen does not go unnoticed."""
    from kvcompile.passes.capture import autocast

    monkeypatch.setattr(autocast, "_registered", lambda target, device: True)
    with pytest.raises(ModelError, match=r"what torch.autocast does to aten.einsum"):
        capture(Rows(einsum))
