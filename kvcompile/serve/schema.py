"""JSON schemas as xgrammar keeps them: what it would leave out without a word is refused.

A text that was asked to follow a schema must do so, but xgrammar (0.2) ignores some keywords (`not`, `uniqueItems`,
`contains`), keywords beside others (`anyOf` beside `type`), and characters that JSON must escape in patterns. A
schema may always be made narrower: objects with `properties` have no others, patterns match whole strings, and
strings of some length hold no escapes.

`tests/serve/test_structure.py` tries each keyword with texts that are valid, and texts that are not.
"""

from __future__ import annotations

import json
from typing import Any

from kvcompile.errors import InputError
from kvcompile.serve.regexes import MOST_TEXT, SPELLED, misread, parts_of

MOST_NESTED = 32

_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "object": {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties",
    },
    "boolean": set(),
    "null": set(),
}  # fmt: skip
_ALONE = {"$ref", "const", "enum", "anyOf", "oneOf", "allOf"}
_IGNORED = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired", "dependentSchemas",
    "dependencies", "additionalItems", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
_ASSERTIONS = set.union(*_OF_TYPE.values()) | _ALONE | _IGNORED


def schema_of(text: str) -> str:
    """The schema that xgrammar is given, as JSON.

    Raises:
        InputError: no schema, or one of which something would be ignored; all problems at once.
    """
    if len(text) > MOST_TEXT:
        raise InputError(f"structure: a schema of {len(text):,} characters; at most {MOST_TEXT:,}")
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"structure: the schema is no JSON: {error}") from None
    reader = _Reader(root)
    narrower = reader.read(root, "schema", 0)
    if reader.problems:
        raise InputError("structure: " + "; ".join(reader.problems))
    return json.dumps(narrower)


class _Reader:
    """Walks a schema, makes it narrower where that is needed, and notes problems with their places."""

    def __init__(self, root: Any):
        self.root = root
        self.problems: list[str] = []

    def read(self, schema: Any, where: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            return self._problem(where, f"expected an object or a boolean, got {json.dumps(schema)[:60]}")
        if depth > MOST_NESTED:
            return self._problem(where, f"nested deeper than {MOST_NESTED}")
        asserted = _ASSERTIONS & schema.keys()
        for name in sorted(_IGNORED & asserted):
            self._problem(where, f"`{name}` cannot be kept by xgrammar")
        alone = sorted(_ALONE & asserted)
        if alone:
            self._alone(schema, alone, asserted, where)
        else:
            self._typed(schema, asserted, where)
        return self._inner(schema, where, depth)

    def _problem(self, where: str, what: str) -> None:
        self.problems.append(f"{where}: {what}")

    def _alone(self, schema: dict[str, Any], alone: list[str], asserted: set[str], where: str) -> None:
        name = alone[0]
        beside = sorted(asserted - {name} - _IGNORED)
        beside += ["type"] if "type" in schema and name not in ("const", "enum") else []
        if beside:
            self._problem(where, f"`{name}` beside `{'`, `'.join(beside)}`: xgrammar would keep only one")
        if name == "$ref" and not (schema[name] == "#" or str(schema[name]).startswith("#/")):
            self._problem(where, f"`$ref` must begin with #/, got {schema[name]!r}")
        if name in ("const", "enum") and "type" in schema:
            values = schema["enum"] if name == "enum" else [schema["const"]]
            for value in values if isinstance(values, list) else []:
                if not any(_is(value, kind) for kind in _types(schema)):
                    self._problem(where, f"{json.dumps(value)} is not of the type {schema['type']!r}")
        if name == "allOf" and isinstance(schema[name], list) and len(schema[name]) > 1:
            self._problem(where, "`allOf` of more than one cannot be kept by xgrammar")
        if name == "oneOf" and isinstance(schema[name], list):
            options = schema[name]
            pairs = ((a, b) for place, a in enumerate(options) for b in options[:place])
            if not all(_apart(self._resolved(a), self._resolved(b), self._resolved) for a, b in pairs):
                self._problem(where, "`oneOf` of schemas that one value may both match: say `anyOf`")

    def _typed(self, schema: dict[str, Any], asserted: set[str], where: str) -> None:
        types = _types(schema)
        kept = asserted - _IGNORED
        if not types:
            if kept and not (kept <= _OF_TYPE["object"] or kept <= _OF_TYPE["array"]):
                self._problem(where, f"`{'`, `'.join(sorted(kept))}` needs a `type`")
            types = ["object", "array"]
        if "string" in types and {"pattern", "format"} & kept and {"minLength", "maxLength"} & kept:
            self._problem(where, "lengths beside `pattern` or `format` cannot be kept by xgrammar")
        if "string" in types and {"pattern", "format"} <= kept:
            self._problem(where, "`pattern` beside `format` cannot be kept by xgrammar")
        if "string" in types and "pattern" in kept:
            self._pattern(schema["pattern"], where)
        if {"integer", "number"} & {*types} and "multipleOf" in kept:
            if "number" in types or not isinstance(schema["multipleOf"], int):
                self._problem(where, "`multipleOf` is kept of integers by integers alone")
            elif kept & (_OF_TYPE["integer"] - {"multipleOf"}):
                self._problem(where, "`multipleOf` beside a range cannot be kept by xgrammar")
        if "array" in types and schema.get("uniqueItems"):
            self._problem(where, "`uniqueItems` cannot be kept by xgrammar")
        if "object" in types:
            self._object(schema, where)

    def _object(self, schema: dict[str, Any], where: str) -> None:
        properties = schema.get("properties", {})
        missing = [name for name in schema.get("required", []) if name not in properties]
        if missing:
            self._problem(
                where, f"`required` has {', '.join(map(repr, missing))}, which `properties` has not"
            )
        free = {"additionalProperties", "patternProperties", "propertyNames"} & schema.keys()
        free -= {"additionalProperties"} if schema.get("additionalProperties") is False else set()
        if properties and free:  # JSON may spell a key in many ways: another one may be one of them
            self._problem(
                where, f"`properties` beside `{'`, `'.join(sorted(free))}` cannot be kept by xgrammar"
            )
        if "patternProperties" in schema and (len(schema["patternProperties"]) > 1 or len(free) > 1):
            self._problem(
                where, "`patternProperties` must have one pattern, and no names or others beside it"
            )
        if not properties and schema.get("minProperties", 0) > 1:
            self._problem(where, "`minProperties` of any names cannot be kept: a name may come twice")
        for pattern in schema.get("patternProperties", {}):
            self._pattern(pattern, where)

    def _pattern(self, text: Any, where: str) -> None:
        parts = list(parts_of(str(text)))
        problem = misread(str(text), parts)
        for _, part, inside, negated in parts:
            if inside and negated:  # a class of others never has what JSON escapes
                continue
            if part == '"' or part < " " or part in ("\\\\", '\\"') or part[:2] in SPELLED:
                problem = problem or f"{part!r}, which JSON escapes, cannot be kept by xgrammar"
        if problem:
            self._problem(where, f"pattern {text!r}: {problem}")

    def _inner(self, schema: dict[str, Any], where: str, depth: int) -> Any:
        read = dict(schema)
        for name in ("items", "additionalProperties", "propertyNames"):
            if name in schema:
                read[name] = self.read(schema[name], f"{where}.{name}", depth + 1)
        for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if isinstance(schema.get(name), list):
                each = enumerate(schema[name])
                read[name] = [self.read(one, f"{where}.{name}[{place}]", depth + 1) for place, one in each]
        for name in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(schema.get(name), dict):
                named = schema[name].items()
                read[name] = {key: self.read(one, f"{where}.{name}.{key}", depth + 1) for key, one in named}
        if schema.get("properties"):
            read.setdefault("additionalProperties", False)
        return read

    def _resolved(self, schema: Any) -> Any:
        for _ in range(MOST_NESTED):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            target = self.root
            for key in str(schema["$ref"]).split("/")[1:]:
                key = key.replace("~1", "/").replace("~0", "~")
                target = target.get(key) if isinstance(target, dict) else None
            schema = target
        return schema


def _types(schema: Any) -> list[str]:
    types = schema.get("type", []) if isinstance(schema, dict) else []
    return types if isinstance(types, list) else [types]


def _is(value: Any, kind: str) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = whole or isinstance(value, float)
    python = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
    return (
        whole
        if kind == "integer"
        else number
        if kind == "number"
        else isinstance(value, python.get(kind, ()))
    )


def _apart(a: Any, b: Any, resolved: Any) -> bool:
    """Whether no value can match both: of types, values, or a required property that are apart."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a is False or b is False
    values = [_values(a), _values(b)]
    if values[0] is not None and values[1] is not None:
        return not {json.dumps(value) for value in values[0]} & {json.dumps(value) for value in values[1]}
    types = [{"number" if kind == "integer" else kind for kind in _types(one)} for one in (a, b)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if types != [{"object"}, {"object"}]:
        return False
    both = set(a.get("required", [])) & set(b.get("required", []))
    return any(
        _values(x) is not None and _values(y) is not None and _apart(x, y, resolved)
        for name in both
        for x, y in [[resolved(one.get("properties", {}).get(name)) for one in (a, b)]]
    )


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None
