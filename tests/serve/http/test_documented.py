"""docs/serving_http.md names every field, every error, every option of the limits, and every metric."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2

from kvcompile.serve.http import errors
from kvcompile.serve.http.schemas.chat import ChatRequest
from kvcompile.serve.http.schemas.completions import CompletionRequest
from kvcompile.serve.http.schemas.unsupported import REQUEST
from tests.serve.http.running_server import Running

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "serving_http.md").read_text("utf-8")


def named(heading: str) -> set[str]:
    """What stands between backticks in a section."""
    section = PAGE[PAGE.index(f"## {heading}\n") :].partition("\n## ")[0]
    return set(re.findall(r"`(\w+)`", section))


def test_fields() -> None:
    fields = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert fields | set(REQUEST) | {"best_of"} <= named("Requests")


def test_errors() -> None:
    source = "".join(path.read_text("utf-8") for path in Path(errors.__file__).parent.rglob("*.py"))
    codes = set(re.findall(r'code="(\w+)"', source)) | {code for _, code in errors._KINDS.values()}
    codes |= set(re.findall(r'"(unsupported_parameter)"', source))
    assert codes - {"invalid_request", "method_not_allowed"} <= named("Errors")


def test_metrics(server: Running) -> None:
    text = httpx2.get(f"{server.root}/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    told = {name for name in named("Metrics") if name.startswith("kvcompile_")}
    assert told == {name for name in kinds if not name.endswith("_created")}


def test_the_interface_for_programs(server: Running) -> None:
    paths = httpx2.get(f"{server.root}/openapi.json").json()["paths"]
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == set(CompletionRequest.model_fields)
