"""What happens to modules, forwards, hooks and attributes of the original once it is optimized: told, or no matter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import InputError
from tests.support.budget import as_original
from tests.support.models import NanoGPT, make, tiny_hf

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off", "max_tokens": 64}
IDS = torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(0))


class Lora(nn.Module):
    """A layer with an adapter of somebody's own beside it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.down, self.up = nn.Linear(linear.in_features, 2), nn.Linear(2, linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def wrapped(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj = Lora(model.model.layers[1].self_attn.q_proj)


def other_head(model: Any) -> None:
    model.lm_head = nn.Linear(48, 61, bias=False)


def other_embedding(model: Any) -> None:
    model.set_input_embeddings(nn.Embedding(61, 48))


def fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


def a_layer_less(model: Any) -> None:
    del model.model.layers[1]


def a_layer_more(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


def layers_in_turn(model: Any) -> None:
    first, second = model.model.layers
    model.model.layers[0], model.model.layers[1] = second, first


def another_function(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def own_forward(model: Any) -> None:
    before = model.lm_head.forward
    model.lm_head.forward = lambda x: 2 * before(x)


def another_class(model: Any) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model.lm_head.__class__ = Twice


REPLACED: dict[Callable[[Any], None], str] = {
    wrapped: r"layers\.1\.self_attn\.q_proj is a Lora and was a Linear",
    other_head: "lm_head is another Linear",
    other_embedding: r"model\.embed_tokens is another Embedding",
    fewer_layers: r"model\.layers is another ModuleList",
    a_layer_less: r"model\.layers\.1 is none and was a LlamaDecoderLayer",
    a_layer_more: r"model\.layers has 3 modules and had 2",
    layers_in_turn: r"model\.layers\.0 is another LlamaDecoderLayer",
    another_function: r"layers\.0\.mlp\.act_fn is a ReLU and was a",
    own_forward: r"lm_head\.forward is another function",
    another_class: "lm_head is a Twice and was a Linear",
}


@pytest.mark.parametrize("change", REPLACED, ids=lambda change: change.__name__)
def test_other_modules_and_forwards_are_refused(change: Callable[[Any], None]) -> None:
    model: Any = tiny_hf("llama")
    fast = kvcompile.optimize(model, **EAGER)
    fast(IDS)
    change(model)
    for call in (lambda: fast(IDS[:, :1]), lambda: fast.generate(IDS, max_new_tokens=2)):
        with pytest.raises(InputError, match=f"{REPLACED[change]}.*call kvcompile.optimize again"):
            call()


def test_a_class_with_another_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make(NanoGPT)
    fast = kvcompile.optimize(model, **EAGER)
    before = type(model.h[0]).forward
    monkeypatch.setattr(type(model.h[0]), "forward", lambda self, x: 2 * before(self, x))
    with pytest.raises(InputError, match=r"NanoBlock\.forward is another function"):
        fast(IDS)
    monkeypatch.undo()
    fast(IDS)


def test_another_model_in_the_place_of_the_original() -> None:
    fast = kvcompile.optimize(make(NanoGPT), **EAGER)
    fast.model = make(NanoGPT)
    with pytest.raises(InputError, match="`model` is another one now"):
        fast(IDS)


def epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2


def in_the_config(model: Any) -> None:
    model.config.final_logit_softcapping = 1.0


def in_a_list(model: Any) -> None:
    model.config.layer_types[0] = "full_attention"


def buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.9


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, given, result: 2 * result)


def hook_of_all(model: Any) -> None:
    nn.modules.module.register_module_forward_hook(lambda module, given, result: None)


VALUES: dict[Callable[[Any], None], str] = {
    epsilon: r"model\.norm\.\w*eps\w* ",
    scaling: r"layers\.0\.self_attn\.scaling was [\d.]+ and is [\d.]+",
    in_the_config: r"config\.final_logit_softcapping was 30\.0 and is 1\.0",
    in_a_list: r"config\.layer_types was \['sliding_attention', .*and is \['full_attention', ",
    buffer: r"model\.rotary_emb\.\w*inv_freq has changed",
    hook: r"hooks of the original: model\.layers\.0 \(<lambda>\) came",
    hook_of_all: r"hooks of the original: every module \(<lambda>\) came",
}


@pytest.mark.parametrize("change", VALUES, ids=lambda change: change.__name__)
def test_other_values_and_hooks_are_told_once(
    change: Callable[[Any], None], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(nn.modules.module._global_forward_hooks.clear)
    gemma = change in (in_the_config, in_a_list)
    model: Any = tiny_hf("gemma2", "eager") if gemma else tiny_hf("llama")
    fast = kvcompile.optimize(model, **EAGER)
    fast(IDS)
    change(model)
    with pytest.warns(UserWarning, match=f"{VALUES[change]}.*call kvcompile.optimize again"):
        fast(IDS[:, :1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(IDS[:, :1])


class Counted(nn.Module):
    """Counts its calls, and keeps a table as long as the longest text, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make(NanoGPT)
        self.calls, self.lengths = 0, [0]
        self.table = torch.arange(1)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.calls += 1
        self.lengths.append(input_ids.shape[1])
        if len(self.table) < input_ids.shape[1]:
            self.table = torch.arange(input_ids.shape[1])
        return self.inner(input_ids)


def counted(model: Any) -> None:
    with torch.no_grad():
        model(IDS)
        model(IDS.repeat(1, 3))


def trained(model: Any) -> None:
    model.train()
    model(IDS)[0].sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.01 * parameter.grad)
            parameter.grad = None


def asked_for_training(model: Any) -> None:
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.config.pad_token_id = model.generation_config.pad_token_id = 5
    model.requires_grad_(False)


def new_names(model: Any) -> None:
    model.value_head, model.label = nn.Linear(48, 1), "mine"


def compiled(model: Any) -> None:
    model.forward = torch.compile(model.forward)


def equal_table(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()


NO_EFFECT: dict[Callable[[Any], None], Callable[[], nn.Module]] = {
    counted: lambda: Counted().eval(),
    trained: lambda: tiny_hf("llama"),
    asked_for_training: lambda: tiny_hf("llama"),
    new_names: lambda: tiny_hf("llama"),
    compiled: lambda: tiny_hf("llama"),
    equal_table: lambda: tiny_hf("llama"),
}


@pytest.mark.parametrize("change", NO_EFFECT, ids=lambda change: change.__name__)
def test_what_changes_nothing_is_not_told(change: Callable[[Any], None]) -> None:
    model: Any = NO_EFFECT[change]()
    fast = kvcompile.optimize(model, **EAGER)
    change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = [fast(IDS[:, :9]), fast(IDS[:, 9:])]
    if change is not compiled:  # which would take a compiler
        found = torch.cat([getattr(answer, "logits", answer) for answer in answers], 1)
        as_original(found, model, IDS)


def test_what_a_table_was_computed_from_may_not_be_written_into() -> None:
    """One layer reads the frequencies where they stand, and the other has a table that was made of them."""
    model: Any = tiny_hf("llama")
    in_cache = {"kind": "sink_window", "sinks": 2, "window": 30, "positions": "in_cache"}
    table = {"where": {"range": [1, 1]}, "cache": {"retention": in_cache}}
    fast, same = (kvcompile.optimize(model, {"layers": layers}, **EAGER) for layers in ([table], []))
    fast(IDS)
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(InputError, match=r"inv_freq was changed in place, and what was computed from it"):
        fast(IDS[:, :1])
    as_original(same(IDS).logits, model, IDS)


def test_a_table_that_grows_with_the_text() -> None:
    """Of dynamic RoPE: another tensor beyond the length that it was made for, and a number that is none at first."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model: Any = tiny_hf("llama", rope_parameters=rope, max_position_embeddings=64)
    fast = kvcompile.optimize(model, **EAGER)
    with torch.no_grad():
        for tokens in (IDS, IDS.repeat(1, 5), IDS):
            model(tokens)
            fast.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = fast(IDS).logits
        as_original(found, model, IDS)
