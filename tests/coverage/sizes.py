"""Sizes that decide what a token sees or where positions end: what they are called, and what they are set to.

Every one of them is tried on both sides of the text of `TEXT` tokens, and with texts on both sides of it: of one token
less, of as many and of one more. Sizes of what a token sees get a configuration below the text and one above it. Tables
of positions cannot be below a text that the original computes, so there it is the text that goes beyond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

TEXT = 27
BELOW, ABOVE = 8, 64
TABLE = 80
LONGEST = TABLE + 1  # tokens of the longest text

# What a token sees: windows, chunks, the best keys, relative tables, and positions from which a temperature rises.
# For each name that configs use: how many tokens one of it is.
SEEN: dict[str, int] = {
    "sliding_window": 1,
    "sliding_window_size": 1,
    "attention_window_size": 1,
    "attention_chunk_size": 1,
    "window_size": 1,
    "local_attention": 1,
    "local_attention_window_len": 1,
    "keep_window_size": 1,
    "index_topk": 1,
    "index_topk_blocks": 4,
    "index_topk_compressed": 4,  # deepseek_v4 calls it index_topk
    "indexer_budget": 1,
    "rel_extent": 1,
    "floor_scale": 1,
    "log_scaling_n_floor": 1,
    "llama_4_scaling": 1,  # ministral3 calls it rope_parameters.original_max_position_embeddings
}
# Recurrences and linear attention are computed in pieces of so many tokens, which must not show in the numbers.
PIECES = ("chunk_size", "mamba_chunk_size", "block_size")
PIECE = 8
# How many positions there are, where they are a table.
TABLES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "max_source_positions",
    "model_max_length",
    "context_length",
    "original_max_position_embeddings",
)


class Tried(TypedDict):
    """One configuration of a type.

    name:    what it is called beside the type; empty for the type as it is by default
    sizes:   of what a token sees and of pieces, in tokens, by their names in the config; only those with an effect
    texts:   lengths at which the logits of the whole text were compared with the original's for a text of that length
    end:     the longest text that the original computes, or up to which its tokens keep their meaning; null: none was
             found up to the longest text
    limit:   the longest text that may be asked for; null: longer ones than were tried. A longer one was refused
    """

    name: str
    sizes: dict[str, int]
    texts: list[int]
    end: int | None
    limit: int | None


def seen(tokens: int, names: Iterable[str] = SEEN) -> dict[str, int]:
    """Values of sizes with which a token sees so many tokens."""
    return {name: tokens // SEEN[name] for name in names}


def lengths(sizes: Iterable[int]) -> list[int]:
    """The texts that go with these sizes, shortest first."""
    return sorted({TEXT} | {size + more for size in (*sizes, TABLE) for more in (-1, 0, 1)})


def chunks(texts: Sequence[int]) -> list[int]:
    """One text, cut so that it ends where each of these does."""
    return [end - start for start, end in zip((0, *texts), texts, strict=False)]


def one_sided(tested: Sequence[Tried]) -> list[str]:
    """What was tried on one side only, in words; empty where nothing was."""
    problems = []
    by_name: dict[str, set[int]] = {}
    for setting in tested:
        for name, size in setting["sizes"].items():
            if name not in PIECES:
                by_name.setdefault(name, set()).add(size)
            problems += _texts(name, size, setting)
        end = _end(setting)
        if end is not None and not {end - 1, end} <= {*setting["texts"]}:
            problems.append(f"texts may have {end} tokens, and ended at {_list(setting['texts'])} only")
    for name, sizes in by_name.items():
        if not min(sizes) < TEXT < max(sizes):
            problems.append(f"{name} was {_list(sizes)} with texts of {TEXT} tokens: one side only")
    return problems


def told(tested: Sequence[Tried]) -> str:
    """The sizes of a type in a few words, for the table."""
    by_name: dict[str, list[int]] = {}
    for setting in tested:
        for name, size in setting["sizes"].items():
            by_name.setdefault(name, []).append(size)
    ends = [setting["end"] for setting in tested if setting["end"] is not None]
    limits = [setting["limit"] for setting in tested if setting["limit"] is not None]
    words = [f"{name} {_list(sizes)}" for name, sizes in by_name.items()]
    words += [f"positions end at {_list(ends)}"] if ends else []
    words += [f"at most {_list(limits)} tokens"] if limits and limits != ends else []
    return "; ".join(words)


def _end(setting: Tried) -> int | None:
    """The longest text that there can be; None: longer ones than were tried."""
    return min((end for end in (setting["end"], setting["limit"]) if end is not None), default=None)


def _texts(name: str, size: int, setting: Tried) -> list[str]:
    end = _end(setting)
    wanted = {size - 1, size, *(() if end is not None and end <= size else (size + 1,))}
    if wanted <= {*setting["texts"]}:
        return []
    return [f"{name} was {size}, and texts ended at {_list(setting['texts'])} only"]


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(str(number) for number in sorted({*numbers}))
