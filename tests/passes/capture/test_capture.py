"""Capture: any decoder becomes one clean graph over its own weights, and is left as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from kvcompile.errors import CaptureError, ModelError
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.graph import target_name
from kvcompile.passes.probe.evaluate import depends_on, evaluate
from tests.support.models import NanoGPT, TinyLlama, TinyLlamaPositions, make, tiny_hf


def run(captured: Captured, input_ids: Tensor) -> Tensor:
    """Logits of the captured graph for all positions."""
    batch, size = input_ids.shape
    values = {
        "input_ids": input_ids,
        "position_ids": torch.arange(size).expand(batch, size),
        "logits_to_keep": torch.arange(size),
    }
    with torch.no_grad():
        outputs = captured.graph_module(*(values[name] for name in captured.inputs.names))
    assert isinstance(outputs, tuple) and all(isinstance(output, Tensor) for output in outputs)
    return outputs[captured.logits_index]


@pytest.mark.few(2)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", [NanoGPT, TinyLlama, TinyLlamaPositions])
def test_plain_modules(kind: type[nn.Module], eager: bool) -> None:
    model = make(kind, eager=eager)
    captured = capture(model)
    assert captured.inputs.names == ("input_ids", "position_ids")[: 2 if kind is TinyLlamaPositions else 1]
    for batch, size in ((1, 1), (2, 17), (5, 40)):
        ids = torch.randint(0, 61, (batch, size))
        torch.testing.assert_close(run(captured, ids), model(ids))
    logits = model(ids)
    assert captured.rebuild([logits]) is logits


def test_hugging_face_output_class_and_inputs() -> None:
    model = tiny_hf("llama", layers=1)
    captured = capture(model)
    assert captured.inputs.names == ("input_ids", "position_ids", "logits_to_keep")
    placeholders = [n for n in captured.graph_module.graph.nodes if n.op == "placeholder"]
    assert (
        tuple(n.name for n in placeholders) == tuple(n.target for n in placeholders) == captured.inputs.names
    )
    ids = torch.randint(0, 61, (2, 13))
    reference = model(ids)
    output = captured.rebuild([run(captured, ids)])
    assert type(output) is type(reference)
    torch.testing.assert_close(output.logits, reference.logits)


def test_logits_to_keep_and_positions_are_inputs() -> None:
    model = tiny_hf("llama", layers=1)
    graph_module = capture(model).graph_module
    ids, positions = torch.randint(0, 61, (2, 13)), torch.arange(4, 17).expand(2, 13)
    keep = torch.tensor([3, 12])
    with torch.no_grad():
        found = graph_module(ids, positions, keep)[0]
        torch.testing.assert_close(found, model(ids, position_ids=positions).logits[:, keep])


@pytest.mark.parametrize("model", [make(NanoGPT), tiny_hf("llama", layers=1)], ids=["nano", "llama"])
def test_weights_are_the_models_own(model: nn.Module) -> None:
    graph_module = capture(model).graph_module
    own = {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()}
    captured = dict(graph_module.named_parameters())
    assert captured
    for name, parameter in captured.items():
        assert own[name] == parameter.data_ptr(), name


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_hf("llama", "eager", layers=1).train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    config = dict(model.config.__dict__)
    capture(model)
    assert flags == [module.training for module in model.modules()]
    assert config == model.config.__dict__
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_an_opaque_attention_implementation_is_traced_under_sdpa() -> None:
    model = tiny_hf("llama", layers=1)
    model.config._attn_implementation_internal = "flash_attention_2"
    captured = capture(model)
    assert captured.route.startswith("export, sdpa")
    assert "'flash_attention_2' is opaque" in captured.reasons[0]
    assert model.config._attn_implementation == "flash_attention_2"


@pytest.mark.parametrize("factor", (1.0, 1.5))
def test_another_attention_implementation_must_compute_the_same(factor: float) -> None:
    """What cannot be traced under sdpa is not replaced by what eager happens to compute (PaliGemma)."""

    class Two(NanoGPT):
        def forward(self, input_ids: Tensor) -> Tensor:
            logits = super().forward(input_ids)
            if self.config._attn_implementation == "sdpa":
                logits = logits * (factor if bool(logits.isfinite().all()) else 1.0)
            return logits

    model = make(Two)
    model.config = SimpleNamespace(_attn_implementation="sdpa")
    if factor == 1.0:
        assert capture(model).route.startswith("export, eager")
    else:
        with pytest.raises(
            CaptureError, match="something else under the attention implementation that it has"
        ):
            capture(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_position_table_bounds_the_sequence() -> None:
    assert capture(make(NanoGPT)).max_seq_len == 128
    assert capture(make(TinyLlama)).max_seq_len is None


def test_no_guards_no_casts_no_dropout_left() -> None:
    class Dropping(NanoGPT):
        def forward(self, input_ids: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(input_ids).float().detach(), 0.3, self.training)

    graph = capture(make(Dropping).train()).graph_module.graph
    names = {target_name(node) for node in graph.nodes}
    assert not names & {"_assert_tensor_metadata", "dropout", "to", "detach", "view"}
    assert all(node.users or node.op in ("placeholder", "output") for node in graph.nodes)


def test_outputs_that_are_no_tensors_come_back() -> None:
    class Pair(NanoGPT):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[None, Tensor]:  # type: ignore[override]
            return None, super().forward(idx)

    model = make(Pair)
    captured = capture(model)
    ids = torch.randint(0, 61, (2, 9))
    nothing, logits = captured.rebuild([run(captured, ids)])
    assert nothing is None
    torch.testing.assert_close(logits, model(ids)[1])


def test_in_place_operators_are_functionalized() -> None:
    class InPlace(NanoGPT):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = super().forward(input_ids)
            x /= 2.0
            x[:, :, 0] = 1.0
            return x

    model = make(InPlace)
    ids = torch.randint(0, 61, (2, 9))
    torch.testing.assert_close(run(capture(model), ids), model(ids))


def test_refused_before_tracing() -> None:
    class Encoder(nn.Module):
        def forward(self, pixels: Tensor, size: int) -> Tensor:
            return pixels

    with pytest.raises(
        ModelError, match=r"Encoder.forward must be callable with input_ids alone; it takes \(pixels, s"
    ):
        capture(Encoder())
    model = make(NanoGPT)
    model.config = type("Config", (), {"is_encoder_decoder": True})()
    with pytest.raises(ModelError, match="encoder-decoder"):
        capture(model)


def test_an_untraceable_model_names_what_was_tried_and_where() -> None:
    class Branching(NanoGPT):
        def forward(self, input_ids: Tensor) -> Tensor:
            if input_ids.sum() > 3:
                return super().forward(input_ids)
            return super().forward(input_ids) + 1

    with pytest.raises(
        CaptureError, match=r"(?s)Branching could not be traced.*- export, input_ids: .*test_capture.py:\d+"
    ):
        capture(make(Branching))


def test_evaluate_runs_only_what_is_needed() -> None:
    captured = capture(make(TinyLlamaPositions))
    graph = captured.graph_module.graph
    cos = next(node for node in graph.nodes if target_name(node) == "cos")
    positions = torch.arange(5)[None]
    (found,) = evaluate(captured.graph_module, [cos], {"position_ids": positions})
    assert found.shape[-2:] == (5, 8)
    assert depends_on(cos, ["position_ids"]) and not depends_on(cos, ["input_ids"])
    with pytest.raises(KeyError, match="position_ids"):
        evaluate(captured.graph_module, [cos], {})
