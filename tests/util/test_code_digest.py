"""What Inductor keeps is kept for kvcompile's code as it is: the bodies of its ops are no part of a graph."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import codecache
from torch.fx import GraphModule, symbolic_trace

from kvcompile.compile import inductor
from kvcompile.compile.inductor import ShapeClass, Tracer, compile_region
from kvcompile.kernels.cpp.isa import ISAS, isa

module = importlib.import_module("kvcompile.util.code_digest")


def test_any_file_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(module, "KVCOMPILE", (str(tmp_path),))
    found = set()
    for name, text in (
        ("a.py", "1"),
        ("a.py", "2"),
        ("kernels/a.h", ""),
        ("kernels/b.cpp.jinja", "x"),
        ("data.bin", ""),
    ):
        (tmp_path / name).write_text(text)
        module.code_digest.cache_clear()
        found.add(module.code_digest())
    module.code_digest.cache_clear()
    assert len(found) == 4, "what is no text of ours does not count"


def test_other_code_compiles_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph, whose op has another body, or calls kernels of another instruction set."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hits: list[str] = []
    found = codecache.FxGraphCache._lookup_graph

    def lookup(key: str, *args: Any, **kwargs: Any) -> Any:
        result = found(key, *args, **kwargs)
        hits.append("hit" if result[0] is not None else "miss")
        return result

    monkeypatch.setattr(codecache.FxGraphCache, "_lookup_graph", staticmethod(lookup))

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 3 + 1,)  # type: ignore[return-value]

    def compiled(code: str) -> None:
        monkeypatch.setattr(inductor, "code_digest", lambda: code)
        graph: GraphModule = symbolic_trace(Layer())
        tracer = Tracer(ShapeClass(True, True, True, 64))
        compile_region(graph, [tracer.empty((4, 8), torch.float32, torch.device("cpu"))], tracer, "default")

    for code in ("one", "one", "another"):
        compiled(code)
    assert hits == ["miss", "hit", "miss"]
    monkeypatch.setattr(inductor, "isa", lambda: ISAS[-1] if isa() != ISAS[-1] else ISAS[0])
    compiled("another")
    assert hits[3:] == ["miss"]
    assert not torch.compiler.config.cache_key_tag
