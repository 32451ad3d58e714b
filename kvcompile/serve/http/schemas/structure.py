"""`response_format`, `guided_regex` and `guided_grammar`: what a text must look like."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvcompile.serve.http.errors import FieldError
from kvcompile.serve.sampling import Structure


class JsonSchema(BaseModel):
    """OpenAI's named schema. A text follows it whether `strict` is true or not."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Any text, any JSON object, or JSON that a schema describes."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structure(self) -> Structure | None:
        """What it asks of the text.

        Raises:
            FieldError: a schema without its type, or a type without its schema.
        ValueError: a schema that is no JSON.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError("response_format.json_schema", "goes with type 'json_schema', and only with it")
        if self.json_schema is not None:
            return Structure(kind="json_schema", text=json.dumps(self.json_schema.schema_, allow_nan=False))
        return Structure(kind="json") if self.type == "json_object" else None


def _not_empty(value: Any) -> Any:
    if value == "":
        raise ValueError("must not be empty")
    return value


Pattern = Annotated[str, BeforeValidator(_not_empty)]


def structure_of(
    response_format: ResponseFormat | None, regex: str | None, grammar: str | None
) -> Structure | None:
    """The one structure that a request asks for.

    Raises:
        FieldError, ValueError: more than one, or an incomplete one.
    """
    asked = [
        found
        for found in (
            response_format.structure() if response_format else None,
            Structure(kind="regex", text=regex) if regex is not None else None,
            Structure(kind="grammar", text=grammar) if grammar is not None else None,
        )
        if found is not None
    ]
    if len(asked) > 1:
        raise FieldError("response_format", "goes without guided_regex and guided_grammar: give one of them")
    return asked[0] if asked else None
