"""What `optimize` measured on its way."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any


class Report(dict[str, Any]):
    """Seconds of each stage, and `checks`: one record for each comparison with the original."""

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON: each check as a dict."""
        return {
            name: [
                asdict(item) if is_dataclass(item) and not isinstance(item, type) else item for item in value
            ]
            if isinstance(value, (list, tuple))
            else value
            for name, value in self.items()
        }
