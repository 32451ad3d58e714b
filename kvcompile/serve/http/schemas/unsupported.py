"""Fields of OpenAI's interface that are refused by name and with a reason, because ignoring them would mislead.

A field is let through where its value asks for nothing: clients send defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcompile.serve.http.errors import FieldError

_NOTHING: tuple[Any, ...] = (None, [], {}, False, "")
_NO_TOOLS = "no tools are offered"
_STORES_NOTHING = "nothing is stored"

# name -> (why it is refused, further values that ask for nothing)
REQUEST: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "tools": (_NO_TOOLS, ()),
    "tool_choice": (_NO_TOOLS, ("none",)),
    "parallel_tool_calls": (_NO_TOOLS, ()),
    "functions": (_NO_TOOLS, ()),
    "function_call": (_NO_TOOLS, ("none",)),
    "logit_bias": ("logits are not changed one by one", ()),
    "modalities": ("texts are all that there is", (["text"],)),
    "audio": ("texts are all that there is", ()),
    "prediction": ("predicted outputs are not used", ()),
    "reasoning_effort": ("the model's reasoning is not controlled", ()),
    "verbosity": ("the model's verbosity is not controlled", ()),
    "web_search_options": ("nothing is searched", ()),
    "store": (_STORES_NOTHING, ()),
    "metadata": (_STORES_NOTHING, ()),
    "service_tier": ("there is one tier", ("auto", "default")),
    "prompt_cache_key": ("give cache_salt to keep caches apart", ()),
    "prompt_cache_retention": ("pages stay until their room is needed", ()),
    "safety_identifier": ("nothing is moderated", ()),
    "moderation": ("nothing is moderated", ()),
    "suffix": ("the model does not fill in", ()),
}

MESSAGE: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "tool_calls": (_NO_TOOLS, ()),
    "tool_call_id": (_NO_TOOLS, ()),
    "function_call": (_NO_TOOLS, ()),
    "audio": ("texts are all that there is", ()),
    "refusal": ("it is no part of a text", ()),
    "annotations": ("they are no part of a text", ()),
}


def without(given: Any, table: Mapping[str, tuple[str, tuple[Any, ...]]]) -> Any:
    """`given` without the fields of the table, which ask for nothing.

    Raises:
        FieldError: one asks for something; the name, and why it is refused.
    """
    if not isinstance(given, dict):
        return given
    for name, (reason, harmless) in table.items():
        value = given.get(name)
        if not any(value is nothing or value == nothing for nothing in (*_NOTHING, *harmless)):
            raise FieldError(name, f"is not supported: {reason}", "unsupported_parameter")
    return {name: value for name, value in given.items() if name not in table}
