"""Tokenizers that tests of serving share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import kvcompile.models as models


@lru_cache
def smollm2() -> Any:
    """SmolLM2's tokenizer alone: the converted checkpoint's where there is one, which loads without the model."""
    file = models._locate("smollm2")
    folder = models._cached(file)
    return models.load_model("smollm2").tokenizer if folder is None else models._tokenizer(folder)
