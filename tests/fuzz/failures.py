"""Every decoder that was ever accepted and wrong, crashed, or was refused without need, made as plain as it can be.

A seed means another decoder once the grammar has grown, so these are specs. `python -m tests.fuzz --shrink SEED` prints
what belongs here.
"""

from __future__ import annotations

from tests.fuzz.parts import Part
from tests.fuzz.spec import DecoderSpec, Layer

EAGER = Part("eager", ("masked_fill", float("-inf"), "matmul", "mask last"))
FLOAT = Part("sdpa float", (float("-inf"),))
ROPE = Part("rope half, arange", ("arange", 10000.0))


SDPA = Part("sdpa bool")


def one(mask: str = "i >= j", spelling: Part = SDPA, **parts: Part) -> DecoderSpec:
    """One layer."""
    return DecoderSpec(layers=(Layer(mask=Part("written", (mask,)), spelling=spelling, **parts),))


def by_hand(**parts: Part) -> DecoderSpec:
    return one(spelling=EAGER, **parts)


FAILURES: dict[str, DecoderSpec] = {
    # accepted and wrong
    "a span that ends at 96": by_hand(weights=Part("written", ("((64 + 32 - d) / 32.0).clamp(0.0, 1.0)",))),
    "a span made 1 again": by_hand(weights=Part("written, again 1", ("torch.where(j < 300, 1.0, 0.7)",))),
    "weights by the key's id": by_hand(
        weights=Part("written", ("torch.where(c.at_k(c.hidden()), 0.0, 1.0)",))
    ),
    "windows that grow with the head": one("(i >= j) & (d < (h + 1) * 75)"),
    "a window of 128 as floats": one("(i >= j) & (i * 1.0 - j * 1.0 < 128)"),
    "neighbouring chunks": one("(i >= j) & (i // 64 - j // 64 < 2)"),
    "xor of positions": one("(i >= j) & ((i ^ j) < 64)"),
    "documents": one("(i >= j) & (c.at_q(c.doc()) == c.at_k(c.doc()))"),
    "hidden keys": one("(i >= j) & (~c.at_k(c.hidden()) | (d == 0))"),
    "since the separator": one("(i >= j) & ((c.at_k(c.since()) < 5) | (d < 20))"),
    "gated keys": one(select=Part("gated keys")),
    "log-n from 256 on": by_hand(
        scale=Part("written", ("torch.log(i + 1.0).clamp(min=math.log(256)) / math.log(256)", "scores"))
    ),
    "a bias by id, far away": by_hand(bias=Part("written", ("c.at_q(c.hidden()) * (d > 100) * -4.0",))),
    "a hinge that each query bends": by_hand(
        bias=Part("written", ("-c.at_q(c.linear('slope', 1)[..., 0].exp()) * F.relu(d - 80)",))
    ),
    "capacity of batch x sequence": DecoderSpec(mixer=Part("capacity", (200,))),
    "pad and slice": DecoderSpec(mixer=Part("pad and slice", (15,))),
    "a dilated convolution": DecoderSpec(layers=(Layer(mixer=Part("convolution", (32, 2))),)),
    "counted ones under padding": DecoderSpec(
        position=Part("learned, ones", ("ones",)), forward="position_ids"
    ),
    "logits by the length": DecoderSpec(output=Part("by length")),
    # crashed
    "bits of a distance": one("(i >= j) & ((d & (d - 1)) == 0)"),
    "bits of a position": one("(i | 7) >= j"),
    "half of the length": one("(i >= j) & ((d < n // 2) | (d == 0))"),
    "a bias once the text is long": by_hand(bias=Part("written", ("d.clamp(min=0) * (n > 300) * -0.1",))),
    "an indexer into zeros": one(select=Part("indexer", (8, "zeros"))),
    "an indexer into hidden scores": one(select=Part("indexer", (64, "full"))),
    "keys hidden by activations, a mask that adds": one(spelling=FLOAT, select=Part("gated keys")),
    "a bias by id in whole numbers": by_hand(bias=Part("written", ("(c.at_q(ids) == c.at_k(ids)) * 1.5",))),
    "a bias of pairs": by_hand(
        bias=Part("written", ("c.at_q(c.linear('a', c.heads_count)) * c.at_k(c.linear('b', c.heads_count))",))
    ),
    "a base that grows with the text": DecoderSpec(position=Part("rope, by the length", (128,))),
    "a table of keys, large": one("(i >= j) & (c.bits(1024, j) | (d == 0))"),
}

# Refused, which was not true: they are exact.
UNTRUE: dict[str, DecoderSpec] = {
    "documents and a window": one("(i >= j) & (c.at_q(c.doc()) == c.at_k(c.doc())) & (d < 64)"),
    "positions of one row counted": DecoderSpec(
        position=Part("learned, ones, cumsum(-1)", ("ones, cumsum(-1)",))
    ),
    "causal by a sign": one("(i - j).sign() >= 0"),
    "learned buckets in a mask": one(
        spelling=FLOAT, bias=Part("written", ("c.table(32, d.clamp(min=0) >> 7)",))
    ),
    "a long dictionary": DecoderSpec(habit=Part("a vocabulary")),
}
