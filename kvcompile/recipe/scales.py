"""The scales file: what `kvcompile calibrate` measured of a model, and what a recipe names by `scales`.

    scale = absmax / 448     per KV head; over all heads of a side for `scale: tensor`

absmax is the largest absolute value that a text gave, of every layer and side, per KV head, in every form that a
recipe can store: keys after RoPE and before it, and each of these after the Hadamard rotation. So one file serves
every recipe of a model. The file is JSON and has a version; what is not finite and positive is no absmax.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvcompile.errors import InputError, RecipeError
from kvcompile.layouts import Storage
from kvcompile.layouts.storage.codes.fp8 import FP8_RANGE
from kvcompile.util.console import shown
from kvcompile.util.whole_file import whole_file

FORMAT, VERSION = "kvcompile.scales", 1
_Count = Annotated[int, Field(ge=1)]
_AbsMax = Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelId(_Strict):
    """Which model: its class, and a digest of the names and shapes of its weights."""

    architecture: str
    digest: str


class Text(_Strict):
    """What it was measured on: tokens in all, a digest of their ids, and how many stood in one sequence at most."""

    tokens: _Count
    digest: str
    context: _Count


class Extent(_Strict):
    """absmax per KV head of vectors as they are, and after the Hadamard rotation (None: none of that head_dim)."""

    plain: _AbsMax
    hadamard: _AbsMax | None


class LayerExtents(_Strict):
    """One attention layer.

    keys:             as the scores use them, after RoPE
    keys_before_rope: None where no rotary embedding was recognised
    values:           None of latent rows, whose values are in the keys
    rows:             the same of the latent rows that may be kept in place of K and V (MLA)
    """

    num_kv_heads: _Count
    head_dim: _Count
    v_head_dim: _Count
    keys: Extent
    keys_before_rope: Extent | None
    values: Extent | None
    rows: LayerExtents | None = None

    @model_validator(mode="after")
    def _one_number_per_head(self) -> LayerExtents:
        for name in ("keys", "keys_before_rope", "values"):
            extent: Extent | None = getattr(self, name)
            for form in ("plain", "hadamard") if extent else ():
                found = getattr(extent, form)
                if found is not None and len(found) != self.num_kv_heads:
                    raise ValueError(
                        f"{name}.{form} has {len(found)} numbers for {self.num_kv_heads} KV heads"
                    )
        return self


class Scales(_Strict):
    """A scales file. Make one with `kvcompile.calibrate`, read one with `Scales.load`."""

    format: Literal["kvcompile.scales"] = "kvcompile.scales"
    version: Literal[1] = 1
    model: ModelId
    dtype: str  # that the model computed in
    text: Text
    layers: tuple[LayerExtents, ...]

    def digest(self) -> str:
        """A short stable hash of all that it says."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write the file, all or nothing.

        Raises:
            InputError: it cannot be written; a file that was there is as it was.
        """
        try:
            with whole_file(path) as made:
                made.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{path}: cannot be written: {error.strerror or error}; what was there is as it was"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Scales:
        """Read and check a file.

        Raises:
            RecipeError: missing, unreadable, no scales file, of another version, or with impossible numbers: all
                of it, each with its path in the file.
        """
        where = str(path)
        try:
            text = Path(path).read_text("utf-8")
        except FileNotFoundError:
            raise RecipeError(
                where, ["no such file; `kvcompile calibrate MODEL --text FILE -o scales.json` makes one"]
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(where, [f"cannot be read: {error}"]) from error
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecipeError(where, [f"is not JSON: {error}"]) from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise RecipeError(where, [f'is no scales file: expected "format": "{FORMAT}"'])
        if data.get("version") != VERSION:
            found = data.get("version")
            raise RecipeError(
                where,
                [f"has version {found!r}, and this kvcompile reads {VERSION}: run kvcompile calibrate again"],
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise RecipeError(where, [_say(item) for item in error.errors()]) from error


def _say(item: object) -> str:
    assert isinstance(item, dict)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).lstrip(".")
    if item["type"] == "value_error":
        return f"{path}: {item['ctx']['error']}"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{path}: {message.replace('input should be', 'expected')}, got {shown(item.get('input'))}"


def scales_of(storage: Storage, extent: Extent) -> tuple[float, ...]:
    """The scale of each KV head for a storage that has calibrated ones."""
    found = extent.hadamard if storage.hadamard else extent.plain
    assert found is not None, "the plan refuses a rotation of a head_dim that has none"
    if storage.calibration == "tensor":
        found = (max(found),) * len(found)
    return tuple(absmax / FP8_RANGE for absmax in found)


__all__ = ["Extent", "LayerExtents", "ModelId", "Scales", "Text", "scales_of"]
