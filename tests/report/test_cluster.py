"""Several devices: weights counted, heads divided, and a bound on the speed, by arithmetic done here by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MixtralConfig
from typer.testing import CliRunner

from kvcompile.cli import app
from kvcompile.errors import KVCompileError, ModelError, PlanError
from kvcompile.report.estimate import estimate
from kvcompile.report.estimate.cluster import estimate_cluster
from kvcompile.report.estimate.weights import weights_of
from kvcompile.util.machines import MACHINES, called, machine

LLAMA = LlamaConfig(
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=96,
    vocab_size=128,
    dtype="bfloat16",
)
MATRICES = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
VECTORS = (2 * 4 + 1) * 64
SMALL = replace(MACHINES["h100"], memory=10**7, bandwidth=1e9, link=1e8, seconds=1e-5)


def on(devices: int, config: Any = LLAMA, recipe: object = "baseline", **given: Any) -> Any:
    return estimate_cluster(config, [recipe], SMALL, devices=devices, **{"tokens": 100, **given})


def test_weights_are_those_of_the_model() -> None:
    found = weights_of(LLAMA)
    assert (found.table, found.head, found.experts) == (128 * 64, 128 * 64, 0)
    assert (found.matrices, found.vectors) == (MATRICES, VECTORS)
    assert found.total == sum(p.numel() for p in AutoModelForCausalLM.from_config(LLAMA).parameters())
    assert weights_of({**LLAMA.to_dict(), "tie_word_embeddings": True}).head == 0
    assert found.on_rank(1) == found.total
    assert found.on_rank(4) == 128 * 64 + VECTORS + (MATRICES + 128 * 64) // 4


def test_experts_are_read_as_far_as_tokens_go_through_them() -> None:
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, vocab_size=64,
    )  # fmt: skip
    found = weights_of(config)
    assert found.experts == 2 * 8 * 3 * 32 * 48 and found.expert_share == 0.25
    rest = found.vectors + found.matrices + found.head
    assert found.read(1, 1) == rest + found.experts / 4
    assert found.read(1, 2) == rest + found.experts * (1 - 0.75**2)
    assert found.read(1, 1000) == pytest.approx(rest + found.experts)


def test_one_device_is_the_estimate_beside_the_weights() -> None:
    found = on(1, batch=3)
    (option,) = found.options
    assert (
        option.cache == estimate(LLAMA, "baseline", batch=3, tokens=100).bytes == 3 * 100 * 4 * 4 * 8 * 2 * 2
    )
    assert found.weights == found.all_weights == 2 * weights_of(LLAMA).total
    read = 2 * (MATRICES + VECTORS + 128 * 64)  # the table is looked into, not read
    assert option.read == pytest.approx((read + option.cache) / 1e9) and option.collect == 0
    assert option.tokens_per_second == pytest.approx(3 / option.read)
    assert option.sequences == (found.room // (option.cache // 3))


def test_ranks_divide_heads_and_add_collectives() -> None:
    one, four, eight = on(1), on(4, parallel={"tensor": 4}), on(8, parallel={"tensor": 8})
    assert four.options[0].cache * 4 == one.options[0].cache
    assert eight.options[0].cache == four.options[0].cache and eight.repeats == 2  # 4 KV heads
    assert any("on 2 ranks" in note for note in eight.notes) and four.repeats == 1
    sent = 2 * 4 * 64 * 2 * 2 * 3 / 4 + 128 * 4 * 3 / 4
    assert four.collected == sent
    assert four.options[0].collect == pytest.approx(sent / 1e8 + 9 * 1e-5)
    assert four.options[0].read < one.options[0].read / 3


def test_replicas_and_stages() -> None:
    one = on(1).options[0]
    many = on(5, parallel={"tensor": 2})
    assert many.replicas == 2 and any("1 of the devices" in note for note in many.notes)
    assert on(4).options[0].tokens_per_second == pytest.approx(4 * one.tokens_per_second)
    staged = on(2, parallel={"stages": 2})
    assert staged.options[0].cache * 2 == one.cache and staged.replicas == 1
    assert staged.options[0].tokens_per_second == pytest.approx(2 * one.tokens_per_second)


def test_what_does_not_fit_says_so() -> None:
    tiny = replace(SMALL, memory=2 * weights_of(LLAMA).total)
    found = estimate_cluster(LLAMA, ["baseline", "int8"], tiny, devices=1, tokens=100)
    assert not any(option.fits or option.tokens_per_second for option in found.options)
    assert "does not fit" in str(found) and "weights alone do not fit" in str(found)
    two = estimate_cluster(LLAMA, ["baseline"], tiny, devices=2, parallel={"tensor": 2}, tokens=100)
    assert two.options[0].fits


def test_a_recipe_that_cannot_be_is_a_row() -> None:
    odd = LlamaConfig(**{**LLAMA.to_dict(), "head_dim": 6})
    refused = on(1, odd, {"cache": {"keys": {"dtype": "int4", "group": 32}}})
    assert refused.options[0].refused and not refused.options[0].fits
    assert refused.options[0].refused.split()[0] in str(refused)


def test_a_latent_row_is_on_every_rank() -> None:
    config = DeepseekV3Config(
        num_hidden_layers=2, vocab_size=128, dtype="bfloat16", n_routed_experts=8, n_group=2
    )
    one, four = on(1, config), on(4, config, parallel={"tensor": 4})
    assert one.options[0].cache == four.options[0].cache and four.repeats == 4


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        (
            {"parallel": {"tensor": 3}},
            PlanError,
            "8 query and 4 KV heads, which do not divide over 3 ranks.*Use tensor: 1, 2, 4, 8",
        ),
        ({"parallel": {"tensor": 4, "stages": 4}}, KVCompileError, "needs 16 devices, and there are 8"),
        ({"parallel": {"tensors": 4}}, KVCompileError, "expected tensor and stages, got tensors"),
        ({"batch": 0}, KVCompileError, "batch: expected a whole number"),
        (
            {"config": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}},
            ModelError,
            "model_type",
        ),
    ],
)
def test_bad_input(given: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        on(8, **given)


def test_machines() -> None:
    assert machine("H200").bandwidth == 4.8e12
    assert machine("l4", memory="10GB", link="1GB").link == 10**9
    with pytest.raises(KVCompileError, match="expected one of a100"):
        machine("tpu")
    names = {"NVIDIA H200": "h200", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA GeForce RTX 4090": "rtx4090"}
    names |= {"NVIDIA L40S": "l40s", "NVIDIA L4": "l4"}
    for name, known in names.items():
        assert called(name) is MACHINES[known]
    assert called("NVIDIA L40") is called("Tesla T4") is called("NVIDIA A10") is None


def test_command(tmp_path: Any) -> None:
    LLAMA.save_pretrained(tmp_path)
    where = ["estimate", "--config", str(tmp_path), "--tokens", "100"]
    ran = CliRunner().invoke(
        app,
        [*where, "--recipe", "all", "--devices", "8", "--parallel", "tensor=4", "--device", "a100", "--json"],
    )
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert found["replicas"] == 2 and found["machine"]["name"] == "a100"
    assert {"int8", "kivi2", "quest"} <= {option["recipe"] for option in found["options"]}
    shown = CliRunner().invoke(app, [*where, "--devices", "2"])
    assert "2 replicas of one device" in shown.output
    for wrong in (["--parallel", "tensor=2"], ["--devices", "2", "--parallel", "tensor"]):
        assert CliRunner().invoke(app, [*where, *wrong]).exit_code == 2
