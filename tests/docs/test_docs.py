"""The documentation is true: its examples run, its commands parse, its paths exist, its tables are the code's.

A Python block after the line `<!-- run -->` is run, with the blocks of its page in one namespace that starts with
`model` (a tiny random Llama), `tokenizer` and `tokens`. Every other Python block must parse. In the blocks,
`load_model` gives the same tiny model, and nothing is compiled: what compilation does is tested elsewhere.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import torch
import typer.main
import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvcompile
import kvcompile.models
from kvcompile.cli import app
from kvcompile.compile.executor import Executor
from kvcompile.layouts import sharing
from kvcompile.models import LoadedModel
from kvcompile.recipe import Recipe, shipped_recipes
from kvcompile.recipe.schema import LayerRule
from kvcompile.util.console import format_bytes

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
TEXTS = {name: page.read_text("utf-8") for name, page in zip(NAMES, PAGES, strict=True)}

BLOCK = re.compile(
    r"^(?P<run><!-- run -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def blocks(name: str, language: str) -> Iterator[tuple[int, bool, str]]:
    """(line, to be run, code) of each fenced block of a page."""
    for match in BLOCK.finditer(TEXTS[name]):
        if match["language"] == language:
            yield TEXTS[name].count("\n", 0, match.start("code")) + 1, bool(match["run"]), match["code"]


def inline(name: str) -> list[str]:
    """What stands between single backticks, outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", TEXTS[name]))


def table(text: str, heading: str) -> list[list[str]]:
    """The rows below the table header that starts with `heading`."""
    lines = text[text.index(heading) :].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


# ---- Python


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(61))])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = "{% for message in messages %}w1 {{ message['content'] }} w2{% endfor %}"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    return LoadedModel(LlamaForCausalLM(config).eval(), tokenizer, "tiny")


@pytest.mark.parametrize("name", NAMES)
def test_python_blocks(
    name: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kvcompile.models, "load_model", lambda *args, **kwargs: loaded)
    monkeypatch.setattr(Executor, "compiled", property(lambda self: False))
    monkeypatch.chdir(tmp_path)
    tokens = loaded.tokenizer("w1 w2 w3 w4", return_tensors="pt")  # type: ignore[misc]
    tokens.pop("token_type_ids", None)
    namespace = {"model": loaded.model, "tokenizer": loaded.tokenizer, "tokens": tokens}
    for line, run, code in blocks(name, "python"):
        # The line numbers of a traceback are those of the page.
        tree = ast.parse("\n" * (line - 1) + code, filename=name)
        if run:
            exec(compile(tree, str(ROOT / name), "exec"), namespace)


def test_the_pages_have_examples_that_run() -> None:
    for name in ("README.md", "docs/api.md", "docs/recipes.md"):
        assert any(run for _, run, _ in blocks(name, "python")), name


@pytest.mark.parametrize("name", NAMES)
def test_yaml_blocks_are_recipes(name: str) -> None:
    for _, _, code in blocks(name, "yaml"):
        Recipe.load(yaml.safe_load(code))


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_code_exist(name: str) -> None:
    for text in inline(name):
        if re.fullmatch(r"kvcompile(\.\w+)+", text):
            module, _, attribute = text.rpartition(".")
            try:
                importlib.import_module(text)
            except ModuleNotFoundError:
                assert hasattr(importlib.import_module(module), attribute), f"{name}: {text}"


def test_attributes_of_the_module_exist(loaded: LoadedModel) -> None:
    fast = kvcompile.optimize(loaded.model, "int8", verify="off", compile={"mode": "none"})
    text = TEXTS["docs/api.md"]
    attributes = [
        name for row in table(text, "| name | what it is |") for name in re.findall(r"`(\w+)`", row[0])
    ]
    methods = [
        name
        for line in re.findall(r"^### (.*`.*)$", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)\(", line)
    ]
    assert {"plan", "report", "cache", "handle"} <= set(attributes)
    assert {"forward", "generate", "warmup", "reset", "release"} <= set(methods)
    for attribute in (*attributes, *methods):
        assert hasattr(fast, attribute), attribute
    (report,) = (row[1] for row in table(text, "| name | what it is |") if row[0] == "`report`")
    assert set(re.findall(r"`(\w+)`", report)) == set(fast.report)
    for fields, what in ((r"`plan`", fast.plan), (r"`cache`", fast.cache)):
        (row,) = (row[1] for row in table(text, "| name | what it is |") if row[0] == fields)
        for attribute in re.findall(r"`(\w+)(?:\([^`]*\))?`", row.partition(":")[2]):
            assert hasattr(what, attribute), f"{fields}: {attribute}"


def test_errors_are_all_there() -> None:
    from kvcompile import errors

    listed = {
        name
        for row in table(TEXTS["README.md"], "| error | when |")
        for name in re.findall(r"`(\w+Error)`", row[0])
    }
    raised = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert listed == raised - {"KVCompileError"}


# ---- Commands


def commands() -> Iterator[tuple[str, str]]:
    for name in NAMES:
        lines = [line for _, _, code in blocks(name, "sh") for line in code.splitlines()]
        for text in (*lines, *inline(name)):
            if text.startswith("kvcompile "):
                yield name, text


COMMANDS = sorted(set(commands()))


@pytest.mark.parametrize(("name", "text"), COMMANDS, ids=[text[:50] for _, text in COMMANDS])
def test_commands_parse(name: str, text: str) -> None:
    """All of it: the names of the commands, the options, and the types of their values."""
    current: Any = typer.main.get_command(app)
    words = shlex.split(text)[1:]
    path = []
    while words and hasattr(current, "commands"):
        assert words[0] in current.commands, f"{name}: {text}"
        path.append(words.pop(0))
        current = current.commands[path[-1]]
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0, result.output
    if words:
        current.make_context(" ".join(path), words)


def test_every_command_is_documented() -> None:
    named = {text.split()[1] for name, text in COMMANDS if name == "README.md"}
    assert named == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    shown = re.findall(r"^    make ([a-z]+)", TEXTS[name], re.MULTILINE)
    shown += [word for text in inline(name) for word in re.findall(r"^make ([a-z]+)", text)]
    assert set(shown) <= targets


# ---- Paths

FOLDERS = "kvcompile|passes|kernels|recipes|tests|examples|benchmarks|docs"
PATH = re.compile(rf"(?:{FOLDERS})/[\w./-]*|\.ci/\w+|LICENSE|Makefile|[A-Z]+\.md|\w+\.toml|setup\.py")


@pytest.mark.parametrize("name", NAMES)
def test_paths_exist(name: str) -> None:
    text = TEXTS[name]
    named = [text for text in inline(name) if PATH.fullmatch(text) and "<" not in text]
    named += re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/-]+\.(?:py|yaml|md|json)", text)
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    missing = [path for path in named if not (ROOT / path).exists()]
    missing += [path for path in linked if not (ROOT / name).parent.joinpath(path).exists()]
    assert not missing, f"{name}: {sorted(set(missing))}"


@pytest.mark.parametrize("name", NAMES)
def test_links_within_a_page_have_a_heading(name: str) -> None:
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", TEXTS[name]), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXTS[name])) <= anchors


def test_tests_that_contributing_names_exist() -> None:
    defined = {
        node.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    for text in inline("CONTRIBUTING.md"):
        if re.fullmatch(r"test_\w+", text):
            assert text in defined, text


def test_contributing_names_the_test_of_each_thing_that_can_be_added() -> None:
    """In the table, and in the section that the test says it follows."""
    text = TEXTS["CONTRIBUTING.md"]
    table, sections = text.partition("\n## Tests\n")[0], re.split(r"\n#{2,3} (?=\w)", text)
    found = sorted((ROOT / "tests").rglob("test_new_*.py"))
    assert len(found) > 8
    for path in found:
        name = path.relative_to(ROOT).as_posix()
        assert name in table, f"the table does not name {name}"
        for followed in re.findall(r'what the section "(.+?)" of CONTRIBUTING', path.read_text("utf-8")):
            (section,) = [each for each in sections if each.startswith(f"{followed}\n")]
            assert name in section, f"{followed!r} does not name {name}"


def test_names_that_contributing_tells_to_change_exist() -> None:
    """Upper-case tables, classes and private functions, in some file of the code or the tests."""
    folders = ("kvcompile", "passes", "kernels", "tests")
    code = "\n".join(p.read_text("utf-8") for folder in folders for p in (ROOT / folder).rglob("*.py"))
    for text in inline("CONTRIBUTING.md"):
        if re.fullmatch(r"_\w+|[A-Z][A-Z_]{3,}|[A-Z][a-z]+[A-Z]\w+", text) and text != "LICENSE":
            assert re.search(rf"^\s*(?:def|class) {text}\b|^{text}\b.*=", code, re.MULTILINE), text


# ---- Tables

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
}


def test_the_table_of_recipes_is_what_estimate_says() -> None:
    rows = {row[0].strip("`"): row for row in table(TEXTS["README.md"], "| recipe | what it keeps |")}
    assert sorted(rows) == sorted(shipped_recipes())
    assert rows.pop("auto")[2:] == ["by its choice"] * 3
    for name, (_, _, exact, per_token, in_all) in rows.items():
        cost = kvcompile.estimate(LLAMA_8B, name, tokens=32768, max_tokens=32768)
        assert (per_token, in_all) == (format_bytes(cost.bytes_per_token), format_bytes(cost.bytes)), name
        stored = {side.code for layer in cost.layers for side in (layer.layout.keys, layer.layout.values)}
        kept = {layer.layout.retention.kind for layer in cost.layers}
        selects = any(layer.layout.selection.selects for layer in cost.layers)
        assert (exact == "yes") == (stored == {"model"} and kept == {"full"} and not selects), name


def of_type(annotation: Any, metadata: list[Any]) -> str:
    """What a field allows, in the words of the table."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return of_type(inner, [*metadata, *(m for part in more for m in getattr(part, "metadata", [part]))])
    if get_origin(annotation) in (Union, UnionType):
        choices = [choice for choice in get_args(annotation) if choice is not NoneType]
        return " or ".join(of_type(choice, metadata) for choice in choices)
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    least = next((item.ge for item in metadata if isinstance(item, Ge)), None)
    most = next((item.le for item in metadata if isinstance(item, Le)), None)
    if annotation is float and {type(item) for item in metadata} == {Gt, Lt}:
        return "fraction"
    lengths = {getattr(item, "min_length", None) for item in metadata} - {None}
    if get_origin(annotation) is list:
        return f"list of {lengths.pop()} integers" if lengths else "list of integers"
    if get_origin(annotation) is dict:
        return "mapping"
    if most is not None:
        return f"integer {least} to {most}"
    if annotation is bool:
        return "`true`, `false`"
    name = {str: "text", int: "integer", float: "number"}[annotation]
    below = (
        next((item.lt for item in metadata if isinstance(item, Lt)), None) if annotation is float else None
    )
    bounds = [f">= {least}"] * (least is not None) + [f"< {below}"] * (below is not None)
    return f"{name} {' and '.join(bounds)}".rstrip()


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default == "":
        return "empty"
    if isinstance(field.default, bool):  # as YAML has it
        return f"`{str(field.default).lower()}`"
    return "none" if field.default is None else f"`{field.default}`"


def rows_of(
    model: type[BaseModel], path: str = "", note: str = "", default: str = ""
) -> Iterator[tuple[str, str, str]]:
    """(key, allowed, default) of every leaf below `model`, in the order of the schema."""
    for name, field in model.model_fields.items():
        choices = [c for c in (get_args(field.annotation) or (field.annotation,)) if c is not NoneType]
        models = [c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)]
        if field.annotation == tuple[LayerRule, ...]:
            yield from rows_of(LayerRule, f"{path}{name}[].")
        elif field.discriminator:
            kind = str(field.discriminator)
            kinds = [get_args(c.model_fields[kind].annotation)[0] for c in models]
            yield (
                f"`{path}{name}.{kind}`",
                ", ".join(f"`{k}`" for k in kinds),
                f"`{getattr(field.default, kind)}`",
            )
            for chosen, variant in zip(kinds, models, strict=True):
                yield from (
                    row
                    for row in rows_of(variant, f"{path}{name}.", f" (`{chosen}`)")
                    if f".{kind}`" not in row[0]
                )
        elif models:
            given = "follows from the retention" if name == "placement" and field.default is None else ""
            yield from rows_of(models[0], f"{path}{name}.", default=given)
        else:
            annotation: Any = field.annotation
            allowed = of_type(annotation, list(field.metadata))
            # What is given from outside is the default of the kind, which has none of its own.
            yield f"`{path}{name}`{note}", allowed, (field.is_required() and default) or default_of(field)


def test_the_table_of_keys_is_the_schema() -> None:
    text = TEXTS["docs/recipes.md"]
    schema = text[text.index("<!-- schema -->") : text.index("<!-- /schema -->")]
    written = [tuple(row[:3]) for row in table(schema, "| key | allowed |")]
    expected = list(rows_of(Recipe))
    needed = "\n".join(f"| {' | '.join(row)} | |" for row in expected)
    assert written == expected, f"docs/recipes.md, 'Every key', must have the rows\n{needed}"
    assert all(row[3] for row in table(schema, "| key | allowed |")), "every key has a meaning"


def test_environment_variables_are_all_there() -> None:
    code = "\n".join(
        p.read_text("utf-8") for f in ("kvcompile", "passes", "kernels") for p in (ROOT / f).rglob("*.py")
    )
    used = set(re.findall(r'"(KVCOMPILE_\w+)"', code))
    rows = table(TEXTS["README.md"], "| variable | what it does |")
    assert {row[0].strip("`").partition("=")[0] for row in rows} == used | {"TORCH_LOGS"}


def test_the_table_of_what_texts_share_is_the_codes() -> None:
    assert sharing.table() in TEXTS["docs/serving.md"], f"docs/serving.md should have:\n{sharing.table()}"
