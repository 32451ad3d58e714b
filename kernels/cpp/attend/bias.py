"""What is added to scores, in C++: `kernels/reference/scores.py: bias_at`."""

from __future__ import annotations

from kvcompile.specs import BiasKind, BiasSpec

# By kind: `values` is the bias's tensor, HEAD its row; `query` and `key` are where these stand, a key at -1 is none.
_TEXTS: dict[BiasKind, str] = {
    "alibi": "-values.as<float>()[HEAD] * static_cast<float>(query - key)",
    "relative": "values.at<float>(HEAD)[std::min(std::max<int64_t>(query - key, 0), values.size[1] - 1)]",
    "columns": "values.at<float>(HEAD)[std::max<int64_t>(key, 0)] - values.at<float>(HEAD)[query]",
    "table": "values.at<float>(HEAD, query)[std::max<int64_t>(key, 0)]",
}


def bias_text(spec: BiasSpec, head: str) -> str:
    """The bias of one score, over the variables `values`, `query`, `key` and the one named `head`."""
    return _TEXTS[spec.kind].replace("HEAD", head)
