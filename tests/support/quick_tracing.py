"""All that tests trace, ONNX exports and compiled regions too, is noted as a model's capture is."""

from __future__ import annotations

from kvcompile.passes.capture.forward_notes import forward_notes

_noted = forward_notes()


def install() -> None:
    """For this process, and all that it forks."""
    _noted.__enter__()
