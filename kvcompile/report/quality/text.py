"""The text that is predicted, and that needles are hidden in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import QualityError


def help_topics() -> str:
    """The topics of Python's help(): 465 KB of English about Python, the same in every build of a version."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(file: str | Path) -> str:
    """A text file in UTF-8.

    Raises:
        QualityError: missing, unreadable, or not UTF-8.
    """
    try:
        return Path(file).expanduser().read_text("utf-8")
    except UnicodeDecodeError as error:
        raise QualityError(
            [f"text: {file} is not UTF-8 at byte {error.start}: give a plain text file"]
        ) from error
    except OSError as error:
        raise QualityError([f"text: {file} cannot be read: {error.strerror or error}"]) from error


def tokens_of(tokenizer: Any, text: Any) -> Tensor:
    """int64 [n].

    Raises:
        QualityError: it is no str.
    """
    if not isinstance(text, str):
        raise QualityError([f"text: expected the text itself, a str, got {type(text).__name__}"])
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
