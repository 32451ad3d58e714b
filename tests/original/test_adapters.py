"""Weights that others have made: torchao's quantized ones, peft's adapters, and layers written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import InputError, ModelError
from tests.support.models import tiny_hf

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "max_tokens": 64}


def model(layers: int = 1) -> nn.Module:
    return tiny_hf("llama", layers=layers, hidden_size=96, head_dim=32, intermediate_size=128)


def ids() -> Tensor:
    return torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))


def check(original: Any, **options: Any) -> Any:
    """A prompt and single tokens give what one pass of the original gives."""
    fast = kvcompile.optimize(original, **{**EAGER, **options})
    text = ids()
    with torch.no_grad():
        right = original(text).logits
        found = [fast(text[:, :34]).logits, *(fast(text[:, i : i + 1]).logits for i in range(34, 40))]
    torch.testing.assert_close(torch.cat(found, 1), right, atol=2e-5, rtol=1e-4)
    return fast


def int8(original: nn.Module) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(original, quantization.Int8WeightOnlyConfig())


def int4(original: nn.Module) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(original, quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4))


@pytest.mark.parametrize("quantize", [int8, int4])
def test_weights_of_torchao(quantize: Callable[[nn.Module], None]) -> None:
    layers = 2 if quantize is int8 else 1
    original = model(layers)
    quantize(original)
    before = {name: type(p.data).__name__ for name, p in original.named_parameters()}
    fast = check(original)
    assert {name: type(p.data).__name__ for name, p in original.named_parameters()} == before
    weights = list(fast.executor.regions.weights.values())
    assert sum(w.dtype is torch.int8 for w in weights) >= 7 * layers, "no weight is dequantized ahead"
    assert all(type(w) is Tensor for w in weights)


def test_a_text_is_saved_with_the_identity_of_quantized_weights(tmp_path: Path) -> None:
    original = model()
    int8(original)
    fast = kvcompile.optimize(original, verify="off", **EAGER)
    with torch.no_grad():
        fast(ids())
        fast.handle.save(tmp_path / "text")
        after = fast(ids()[:, :1]).logits
        fast.reset()
        fast.handle.load(tmp_path / "text")
        torch.testing.assert_close(fast(ids()[:, :1]).logits, after)
    original.lm_head.weight.data.qdata.add_(1)
    with pytest.raises(InputError, match="other weights"):
        fast.handle.load(tmp_path / "text")


def test_quantized_weights_that_are_replaced_are_told() -> None:
    original: Any = model()
    int8(original)
    fast = kvcompile.optimize(original, verify="off", **EAGER)
    with torch.no_grad():
        before = fast(ids()).logits
        original.lm_head.weight.qdata.zero_()  # in place: shared
        fast.reset()
        after = fast(ids()).logits
        assert not after.any() and before.any()
        original.lm_head.weight = nn.Parameter(original.lm_head.weight.dequantize(), requires_grad=False)
    with pytest.raises(InputError, match=r"lm_head\.weight is another tensor now"):
        fast(ids()[:, :1])


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [int8, int4])
def test_weights_of_torchao_compiled(quantize: Callable[[nn.Module], None]) -> None:
    original = model()
    quantize(original)
    check(original, compile={"mode": "default"})


class Rounded(nn.Module):
    """A linear layer of int8 weights with a scale per channel, as one writes it by hand."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = nn.Buffer(linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Buffer((linear.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Packed(nn.Module):
    """Two weights of 4 bits in a byte, in blocks of 32 with an absolute maximum each, as bitsandbytes keeps them."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        blocks = linear.weight.detach().reshape(-1, 32)
        self.shape = tuple(linear.weight.shape)
        self.absmax = nn.Buffer(blocks.abs().amax(1, keepdim=True))
        self.code = nn.Buffer(torch.linspace(-1, 1, 16))
        number = (blocks / self.absmax)[..., None].sub(self.code).abs().argmin(-1).to(torch.uint8)
        self.packed = nn.Buffer(number[:, ::2] << 4 | number[:, 1::2])
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        number = torch.stack([self.packed >> 4, self.packed & 15], -1).flatten(1)
        weight = (self.code[number.long()] * self.absmax).view(self.shape)
        return nn.functional.linear(x, weight.to(x.dtype), self.bias)


@pytest.mark.parametrize("kind", [Rounded, Packed])
def test_quantized_layers_by_hand(kind: type[Rounded] | type[Packed]) -> None:
    original = model()
    for module in list(original.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, kind(child))
    check(original)


def adapted(layers: int = 1, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options
    )
    return peft.get_peft_model(model(layers), config).eval()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"task_type": "CAUSAL_LM"}, {"use_dora": True}, {"use_rslora": True, "lora_dropout": 0.1}],
    ids=str,
)
def test_adapters(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    original = adapted(layers=2, **options)
    with torch.no_grad():
        fast = check(original)
        with original.disable_adapter():
            plain = original(ids()).logits
    assert (fast(ids()[:, :1]).logits.shape[-1]) == plain.shape[-1]
    assert fast.generate(ids()[:1, :9], max_new_tokens=3, do_sample=False).shape == (1, 12)


def test_other_adapters_than_it_was_optimized_with_are_refused() -> None:
    peft = pytest.importorskip("peft")
    original = adapted()
    original.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    fast = check(original)
    original.set_adapter("second")
    with pytest.raises(InputError, match=r"adapters were default .* and are second"):
        fast(ids())
    original.set_adapter("default")
    fast.reset()
    fast(ids())
    original.merge_adapter()  # its weights change in place, and the graph would add the adapter again
    with pytest.raises(InputError, match="merged: default"):
        fast(ids())
    original.unmerge_adapter()
    with original.disable_adapter(), pytest.raises(InputError, match="switched off"):
        fast(ids())


def test_a_merged_adapter_is_a_model() -> None:
    original = adapted()
    original.merge_adapter()
    check(original)
    check(original.merge_and_unload())


def test_prompts_that_are_no_tokens_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ModelError, match=r"PROMPT_TUNING: it puts keys"):
        kvcompile.optimize(peft.get_peft_model(model(), config), **EAGER)


def test_a_model_in_the_wrapper_of_torch_compile_is_the_model_inside() -> None:
    original = model()
    fast = kvcompile.optimize(torch.compile(original), **EAGER)
    assert fast.model is original
