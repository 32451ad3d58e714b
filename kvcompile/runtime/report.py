"""What `optimize` measured on its way."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any


class Report(dict[str, Any]):
    """Seconds of each stage; `checks`: one record for each comparison with the original; `passes`: one for each pass
    that ran (none of those that a `Front` was made with before)."""

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
