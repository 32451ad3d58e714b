"""examples/run_artifact.py generates what the session generates, in a process without PyTorch and kvcompile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import kvcompile
from kvcompile.targets.manifest import Manifest
from kvcompile.targets.onnx.session import Session
from tests.support.exports import small, tiny
from tests.support.marks import cases

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "run_artifact.py"
ALONE = """
import runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "kvcompile", "transformers", "onnx"):
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# In order; pages and scores; a ring, whose prompts swap; chosen from whole prompts; groups of tokens.
FAST = ("int8", "long_context")
RECIPES = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in ("streaming", "snapkv", "kivi2"))]
PROMPTS = [[5, 17, 3, 9, 44, 22, 8, 13, 20, 11, 31, *range(30, 60)], [7, 8, 9, 10, 33]]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    known: dict[str, Path] = {}
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(61)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2")

    def make(recipe: str) -> Path:
        if recipe not in known:
            known[recipe] = tmp_path_factory.mktemp(recipe) / "artifact"
            chosen = small(recipe, prefill_chunk=32)
            kvcompile.export(tiny(layers=1), known[recipe], "onnx", recipe=chosen, tokenizer=tokenizer)
        return known[recipe]

    return make


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALONE, str(EXAMPLE), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("recipe", cases(RECIPES, ("int8",)))
def test_it_generates_what_the_session_generates(artifact: Callable[[str], Path], recipe: str) -> None:
    """A batch of two lengths, its prompt in two passes, over every ring and budget."""
    folder = artifact(recipe)
    longest = max(map(len, PROMPTS))
    assert longest > Manifest.read(folder).limits.prefill_chunk
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    wanted = Session(folder).generate(ids, mask, max_new_tokens=40)[:, longest:].tolist()
    given = [word for prompt in PROMPTS for word in ("--ids", *prompt)]
    done = run(folder, *given, "--max-new-tokens", 40)
    assert done.returncode == 0, done.stderr
    assert [[int(word) for word in line.split()] for line in done.stdout.splitlines()] == wanted


def test_one_sequence_and_text(artifact: Callable[[str], Path]) -> None:
    folder = artifact("int8")
    wanted = Session(folder).generate("w5 w17 w3 w9", max_new_tokens=9)
    assert len(wanted.split()) > 3
    done = run(folder, "--text", "w5 w17 w3 w9", "--max-new-tokens", 9)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == wanted


def test_mistakes_are_one_line(artifact: Callable[[str], Path], tmp_path: Path) -> None:
    folder = artifact("int8")
    for words, message in (
        ((tmp_path, "--ids", 1), "no artifact, it has no manifest.json"),
        ((folder, "--ids", 1, "--max-new-tokens", 1000), "the manifest's limits are"),
        ((folder, "--ids", 1, "--max-new-tokens", 0), "--max-new-tokens of 1 or more"),
        ((folder, "--ids", 5, -3), "expected token ids from 0 to 60"),
        ((folder, *(word for _ in range(5) for word in ("--ids", 1))), "5 sequences of 24 tokens"),
    ):
        done = run(*words)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
