"""Calls in other modes and with other weights than a module was optimized with: as the original does, or told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import InputError, KVCompileError
from tests.support.models import NanoGPT, make, tiny_hf

EAGER: dict[str, Any] = {"compile": {"mode": "none"}, "verify": "off", "max_tokens": 64}
IDS = torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(0))


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(logits(got), logits(wanted), atol=2e-5, rtol=1e-4)


@pytest.fixture
def llama() -> nn.Module:
    return tiny_hf("llama", layers=1)


@pytest.mark.few(2)
@pytest.mark.parametrize("modes", [(True, False, True), (False, True, False)], ids=str)
@pytest.mark.parametrize("recipe", ["int8", "paged"])
def test_inference_mode_in_turns_with_none(llama: nn.Module, modes: tuple[bool, ...], recipe: str) -> None:
    """Tensors that are made in inference mode cannot be written to outside of it."""
    more = {"cache": {"placement": {"kind": "paged", "page_size": 16}}} if recipe == "paged" else {}
    fast = kvcompile.optimize(llama, "baseline" if more else recipe, **EAGER, **more)
    start = 0
    with torch.no_grad():
        wanted = llama(IDS)
    outs = []
    for mode, size in zip(modes, (9, 1, 10), strict=True):
        with torch.inference_mode(mode):
            outs.append(logits(fast(IDS[:, start : start + size])))
        start += size
    if more:
        close(torch.cat(outs, 1), wanted)
    for mode in modes:
        with torch.inference_mode(mode):
            found = fast.generate(IDS, max_new_tokens=4, do_sample=False, past_key_values=fast.handle)
            fast.handle.crop(-2)
            fast.handle.reorder_cache(torch.tensor([0]))
    assert torch.equal(found, fast.generate(IDS, max_new_tokens=4, do_sample=False))


def test_a_model_made_and_optimized_in_inference_mode() -> None:
    with torch.inference_mode():
        model = make(NanoGPT)
        fast = kvcompile.optimize(model, **EAGER | {"verify": "quick"})
        close(fast(IDS), model(IDS))
    fast.reset()
    with torch.no_grad():
        close(fast(IDS), model(IDS))


def test_autocast_around_a_call_is_refused_and_around_optimize_has_no_effect(llama: nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        fast = kvcompile.optimize(llama, **EAGER | {"verify": "quick"})
        for call in (lambda: fast(IDS), lambda: fast.generate(IDS, max_new_tokens=2)):
            with pytest.raises(InputError, match=r"torch\.autocast"):
                call()
    assert not fast.cache.columns
    with torch.no_grad():
        close(fast(IDS), llama(IDS))


def test_another_default_device() -> None:
    """Our own tensors are where we make them, and the model's where its user has said."""
    asked: list[str] = []

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make(NanoGPT)

        def forward(self, input_ids: Tensor) -> Tensor:
            asked.append(torch.empty(0).device.type)
            return self.inner(input_ids)

    model = make(Asking)
    with torch.device("meta"):
        fast = kvcompile.optimize(model, **EAGER | {"verify": "quick"})
        found = fast(IDS)
        more = fast.generate(IDS, max_new_tokens=2)
    assert len(asked) > 2 and set(asked) == {"meta"}
    close(found, model(IDS))
    assert torch.equal(more, fast.generate(IDS, max_new_tokens=2))


def exported(fast: Any) -> Any:
    return torch.export.export(fast, (IDS,))


def in_turns(fast: Any) -> Any:
    return torch.vmap(lambda ids: logits(fast(ids[None])))(IDS)


def to_graph(fast: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda ids: logits(fast(ids)))(IDS)


def to_script(fast: Any) -> Any:
    return torch.jit.trace(fast, (IDS,), strict=False, check_trace=False)


@pytest.mark.parametrize("trace", [exported, in_turns, to_graph, to_script])
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_trace_would_have_one_text_in_it(trace: Callable[[Any], Any]) -> None:
    fast = kvcompile.optimize(make(NanoGPT), **EAGER)
    with pytest.raises(InputError, match=r"this call is traced .*kvcompile\.export"):
        trace(fast)
    assert not fast.cache.columns


def test_a_compiler_around_a_call_leaves_it_as_it_is(llama: nn.Module) -> None:
    """Dynamo compiled what looks after the cache, for half a minute."""
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    fast = kvcompile.optimize(llama, **EAGER)
    around = torch.compile(fast, backend=backend)
    outs = [logits(around(part)) for part in (IDS[:, :9], IDS[:, 9:10], IDS[:, 10:])]
    assert not calls
    with torch.no_grad():
        close(torch.cat(outs, 1), llama(IDS))


def test_replicas_would_share_a_cache(llama: nn.Module) -> None:
    with pytest.raises(KVCompileError, match=r"nn\.DataParallel: .*parallel="):
        kvcompile.optimize(llama, **EAGER)._replicate_for_data_parallel()  # as nn.parallel.replicate asks


def test_a_generation_config_that_the_original_gets_later(llama: Any) -> None:
    from transformers import GenerationConfig

    fast = kvcompile.optimize(llama, **EAGER)
    llama.generation_config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(fast.generate(IDS), llama.generate(IDS))
    fast.generation_config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert fast.generate(IDS).shape == (1, 22) and llama.generate(IDS).shape == (1, 23)


def replaced_data(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.data = torch.randn(56, 48)


def replaced_parameter(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(torch.randn(48, 48))


def taken_away(model: Any) -> None:
    model.model.norm._parameters["weight"] = None


@pytest.mark.parametrize("change", [replaced_data, replaced_parameter, taken_away])
def test_weights_that_are_replaced_are_told(llama: nn.Module, change: Callable[[Any], None]) -> None:
    fast = kvcompile.optimize(llama, **EAGER)
    fast(IDS)
    change(llama)
    for call in (lambda: fast(IDS[:, :1]), lambda: fast.generate(IDS, max_new_tokens=2)):
        with pytest.raises(InputError, match=r"(up_proj|q_proj|norm)\.weight is another tensor now"):
            call()


def test_weights_that_change_in_place_are_seen(llama: nn.Module) -> None:
    fast = kvcompile.optimize(llama, **EAGER)
    before = logits(fast(IDS))
    fast.reset()
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.mul_(1.3)
        close(fast(IDS), llama(IDS))
        assert (logits(llama(IDS)) - before).abs().max() > 0.01
        fast.reset()
        llama.load_state_dict({n: 0.5 * t for n, t in llama.state_dict().items()})
        close(fast(IDS), llama(IDS))


def test_a_weight_that_stands_otherwise_in_its_memory(llama: nn.Module) -> None:
    """Its address is what it was, and a kernel that reads it as it was would read other numbers."""
    fast = kvcompile.optimize(llama, **EAGER)
    weight = next(p for name, p in llama.named_parameters() if "o_proj" in name)
    assert weight.shape[0] == weight.shape[1]
    with torch.no_grad():
        weight.t_()
    with pytest.raises(InputError, match="stands otherwise in its memory"):
        fast(IDS)
    with torch.no_grad():
        weight.t_()
    close(fast(IDS), llama(IDS))


def test_a_weight_that_something_was_computed_from() -> None:
    """GPT-OSS' sinks are read when the model is understood: the module would have the old ones."""
    model: Any = tiny_hf("gpt_oss", "eager")
    fast = kvcompile.optimize(model, **EAGER)
    with torch.no_grad():
        model.model.layers[0].self_attn.sinks.add_(3.0)
        try:
            got = fast(IDS)
        except InputError as error:
            assert "sinks was changed in place" in str(error)
        else:
            close(got, model(IDS))


def test_moving_the_original_warns_once(llama: nn.Module) -> None:
    fast = kvcompile.optimize(llama, **EAGER)
    wanted = logits(fast(IDS))
    llama.to(torch.bfloat16)
    fast.reset()
    with pytest.warns(UserWarning, match="the original model was moved"):
        got = fast(IDS)
    close(got, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(IDS[:, :1])
