"""Why an attention block cannot be rewritten."""

from __future__ import annotations


class Refused(Exception):
    """Something that no cache serves, or that is not known to be served exactly; the text is the exact reason."""
