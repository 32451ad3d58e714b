"""Sparse indexers with the top-k that real ones have: 2,048 keys, in texts that are shorter, as long and longer.

Top-k of 8 and 64 are tried with every type that has one (tests/coverage), and hand-written indexers with up to 2,048
in texts that are shorter (tests/soundness/test_06_top_k.py).
"""

from __future__ import annotations

import pytest

import kvcompile
from tests.coverage.compare import fed
from tests.coverage.configs import SIZES, Sizes, tiny_model
from tests.coverage.original import ALIKE, error, original, text

K, LONGEST = 2048, 2100


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_a_top_k_of_2048(model_type: str) -> None:
    sizes = Sizes(SIZES | {"index_topk": K, "max_position_embeddings": 2 * K})
    model = tiny_model(model_type, sizes=sizes)
    ids = text(1, LONGEST)
    right = original(model, ids, [27, K, K + 1, LONGEST])
    assert right.end is None and "index_topk" in sizes.used
    every = tiny_model(
        model_type, sizes=Sizes(SIZES | {"index_topk": 2 * K, "max_position_embeddings": 2 * K})
    )
    all_keys = original(every, ids, [K + 1])
    assert error(all_keys.logits[K + 1][:, :K], right.logits[K]) <= ALIKE
    assert error(all_keys.logits[K + 1][:, K:], right.logits[K + 1][:, K:]) > ALIKE, (
        "the last token sees all keys"
    )
    fast = kvcompile.optimize(
        model, recipe="baseline", max_batch=1, max_tokens=LONGEST, compile={"mode": "none"}
    )
    # Up to a token before the end of the text that is as long as k, then over it in single tokens and a chunk; and in
    # one prompt from the first token to behind it.
    for way in ([27, K - 28, 1, 1, 1, LONGEST - K - 2], [LONGEST - 9, 9]):
        found = fed(fast, ids, way)
        for length, logits in right.logits.items():
            assert error(found[:, :length], logits) <= ALIKE, f"{length} tokens in chunks of {way}"
