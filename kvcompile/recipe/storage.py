"""The keys of a recipe that choose a storage: the product of `layouts/storage`, in the words of users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from kvcompile.layouts import CODES, Code, Scale, Storage
from kvcompile.layouts.storage.scale import Per, ScaleDtype
from kvcompile.recipe.retention import WHOLE, Count, Strict

CALIBRATED = ("tensor", "head")
_BY_TITLE = {
    title: tuple(code for code in CODES.values() if code.title == title)
    for title in dict.fromkeys(code.title for code in CODES.values())
}

if TYPE_CHECKING:
    Dtype = str
else:
    Dtype = Literal[tuple(_BY_TITLE)]


class StorageConfig(Strict):
    """How K or V vectors are encoded."""

    dtype: Dtype = "model"
    mode: Literal["symmetric", "asymmetric"] | None = Field(
        None, description="int8: symmetric if absent; smaller integers are asymmetric"
    )
    axis: Literal["token", "channel"] = Field(
        "token", description="what has a scale of its own: tokens, or channels (over a group of tokens)"
    )
    group: Annotated[Literal[0, 32, 64, 128], WHOLE] = Field(
        0,
        description="asymmetric integers, nf4: channels (axis token; 0: the whole head) or tokens per scale",
    )
    residual: Count = Field(0, description="newest tokens kept in the model's dtype")
    sinks: Count = Field(0, description="first tokens kept in the model's dtype")
    scale: Literal["token", "tensor", "head", "none"] = Field(
        "token", description="fp8: one per token and head; calibrated, one per layer or KV head; or none"
    )
    scale_dtype: Literal["float16", "float32"] = "float16"
    rotate: Literal["none", "hadamard"] = Field("none", description="turn vectors before they are rounded")

    @property
    def _code(self) -> Code:
        codes = _BY_TITLE[self.dtype]
        return codes[-1] if self.mode == "asymmetric" else codes[0]

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> StorageConfig:
        """What is given must mean something for the dtype."""
        code = self._code
        floats = is_float(self.dtype)
        if self.mode is not None and len(_BY_TITLE[self.dtype]) == 1:
            raise ValueError(f"mode is for dtype int8 only, not for {self.dtype}")
        if self.group and not _has(code, "group"):
            raise ValueError(f"group is for {_with('group')} only, not for {self.dtype}")
        if self.group and self.group not in code.groups:
            raise ValueError(
                f"group of {self.dtype} is always {' or '.join(map(str, code.groups))}: leave it out"
            )
        if "scale" in self.model_fields_set and code.kind != "fp8":
            raise ValueError(f"scale is for fp8 dtypes only, not for {self.dtype}")
        if "scale_dtype" in self.model_fields_set:
            if floats or self.scale == "none":
                raise ValueError("scale_dtype is for dtypes with a scale only, not for " + self._named)
            if self.scale in CALIBRATED:
                raise ValueError(
                    f"scale_dtype is for scales per token only: scale: {self.scale} is kept in float32"
                )
            if self.scale_dtype not in code.scale_dtypes:
                raise ValueError(
                    f"scale_dtype of {self.dtype} is always {' or '.join(code.scale_dtypes)}: leave it out"
                )
        if self.rotate != "none" and floats:
            raise ValueError(f"rotate is for quantized dtypes only, not for {self.dtype}")
        for name, count in (("residual", self.residual), ("sinks", self.sinks)):
            if count and floats:
                raise ValueError(f"{name} is for quantized dtypes only, not for {self.dtype}")
        if self.axis == "channel":
            self._check_channels()
        return self

    def _check_channels(self) -> None:
        if not _has(self._code, "channel"):
            raise ValueError(f"axis: channel is for {_with('channel')} only, not for {self._named}")
        if not self.group:
            raise ValueError("axis: channel needs a group: how many tokens share the scales, 32, 64 or 128")
        if not self.residual or self.residual % self.group:
            raise ValueError(
                f"axis: channel needs a residual that is a multiple of group {self.group}, got {self.residual}: tokens "
                "are rounded in whole groups, and until then kept in full"
            )

    @property
    def _named(self) -> str:
        return f"{self.dtype} without a scale" if self.scale == "none" else self.dtype

    def build(self) -> Storage:
        """The storage that the keys mean."""
        return Storage(
            self._code.name, self._scale(), self.residual, self.sinks, hadamard=self.rotate == "hadamard"
        )

    def _scale(self) -> Scale:
        code, allowed = self._code, dict(self._code.scales)
        per: Per
        if self.axis == "channel":
            per = "channel"
        elif code.kind == "fp8":
            per = "vector" if self.scale == "token" else self.scale
        else:
            per = code.scales[0][0]
        if per == "none":
            return Scale()
        dtype: ScaleDtype = (
            self.scale_dtype if self.scale_dtype in code.scale_dtypes else code.scale_dtypes[0]
        )
        if per in CALIBRATED:
            dtype = "float32"
        size = self.group or code.groups[0] if per == "group" else self.group
        return Scale(per, size, dtype, allowed[per])


class KeysConfig(StorageConfig):
    """How K vectors are encoded: as V's, and on which side of RoPE."""

    rope: Literal["after", "before"] = Field(
        "after", description="stored after RoPE, or before it and rotated when they are read"
    )

    @model_validator(mode="after")
    def _rope_has_an_effect(self) -> KeysConfig:
        if self.rope == "before" and is_float(self.dtype):
            raise ValueError(f"rope: before is for quantized dtypes only, not for {self.dtype}")
        return self


def is_float(dtype: str) -> bool:
    """Whether a dtype rounds nothing but to a float of 16 or 32 bits."""
    return _BY_TITLE[dtype][0].kind == "float"


def _has(code: Code, per: Per) -> bool:
    return any(own == per for own, _ in code.scales)


def _with(per: Per) -> str:
    """The dtypes that take a scale per group, or per channel, in words; where there is a choice of groups."""
    found: list[str] = []
    asymmetric: list[str] = []
    for title, codes in _BY_TITLE.items():
        if any(_has(code, per) and len(code.groups) > 1 for code in codes):
            (found if len(codes) == 1 else asymmetric).append(title)
    named = sorted(found)
    return f"{', '.join(named)} and {' and '.join(asymmetric)} with mode: asymmetric"
