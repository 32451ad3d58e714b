"""Breaks of generated Triton kernels, and of what reads their TTGIR; `kernels.py` has more."""

from __future__ import annotations

from tests.breaks.broken import broken

TRITON = (
    broken(
        "what lines that go have read is read",
        "kernels/triton/dead_lines.py",
        "{name for name, statement in reads if statement not in gone}",
        "{name for name, _ in reads}",
        "tests/kernels/triton/tile/test_block_bounds.py",
    ),
    broken(
        "prompts begin with the tile of queries that sees least",
        "kernels/triton/attend/__init__.py",
        "(tl.num_programs(0) - 1 - tl.program_id(0)) * {spec.block_m}",
        "tl.program_id(0) * {spec.block_m}",
        "tests/kernels/triton/attend/test_queries.py",
    ),
    broken(
        "programs of several heads begin where those of one head would",
        "kernels/triton/append/append.py",
        "{own} * {rows} + tl.arange(0, {rows})",
        "{own} + tl.arange(0, {rows})",
        "tests/kernels/triton/append/test_append.py",
    ),
    broken(
        "a program of several heads divides them by the scale of the first",
        "kernels/triton/append/encode/floats.py",
        "tl.minimum(head, {tile.heads - 1})",
        "tl.minimum(head, 0)",
        "tests/kernels/triton/append/test_append.py",
    ),
    broken(
        "heads look for a slot among those of the first",
        "kernels/triton/retention/evict.py",
        'own = " + head * {name}_s1" if spec.score_heads > 1 else ""',
        'own = ""',
        "tests/kernels/triton/retention/test_evict.py",
    ),
    broken(
        "a head's value is written by another program than found its slot",
        "kernels/triton/append/append.py",
        "    for side in () if slots.evicts(spec) else sides(spec):",
        "    for side in sides(spec)[1:] if slots.evicts(spec) else sides(spec):",
        "tests/kernels/triton/retention/test_evict.py",
    ),
    broken(
        "logits of a step are halves of what they are",
        "kernels/triton/attend/softmax_pv.py",
        'level = tl.where(level > -1.0e30, level, {level})"',
        'level = tl.where(level > -1.0e30, level, 0.0)"',
        "tests/kernels/triton/retention/test_levels.py",
    ),
    broken(
        "a tile of score has the level of the tile before it",
        "kernels/triton/templates/score.py.jinja",
        "tl.load(row + {{ of_level }}{{",
        "tl.load(row + {{ of_level }} - (first > 0){{",
        "tests/kernels/triton/retention/test_evict.py",
    ),
    broken(
        "heads that fill the rows of a product have rows for groups of channels as well",
        "kernels/triton/tile/stacking.py",
        "<= _ROWS:",
        "<= 16 * _ROWS:",
        "tests/kernels/triton/test_config.py",
    ),
    broken(
        "values have as many columns as a product has rows",
        "kernels/triton/tile/tile_loader.py",
        "least=2 * piece.block)",
        "least=piece.block)",
        "tests/kernels/triton/test_config.py",
    ),
    broken(
        "the scales of two halves of the channels are exchanged",
        "kernels/triton/tile/tile_loader.py",
        "{name}0, {name}2 = tl.split(",
        "{name}2, {name}0 = tl.split(",
        "tests/kernels/triton/host/test_attention.py",
    ),
    broken(
        "columns of padding move the groups of channels",
        "kernels/triton/tile/tile_loader.py",
        "2 * piece.width // size)",
        "2 * piece.block // size)",
        "tests/kernels/triton/host/test_attention.py",
    ),
    broken(
        "what an expression goes through has the tile of two warp groups",
        "kernels/triton/config.py",
        "num_warps=max(config.num_warps, 8), block_m=min(config.block_m, 64)",
        "num_warps=max(config.num_warps, 8)",
        "tests/kernels/triton/test_config.py",
    ),
    broken(
        "slots of no token get a share",
        "kernels/triton/templates/score.py.jinja",
        "tl.where(there, before + share, before)",
        "before + share",
        "tests/kernels/triton/retention/test_evict.py",
    ),
    broken(
        "the slot is one of the last tile",
        "kernels/triton/templates/evict.jinja",
        "sooner(lowest, oldest, place, value, token, slot)",
        "value, token, slot",
        "tests/kernels/triton/retention/test_evict.py",
    ),
    broken(
        "a copy that is asked for later comes with the first",
        "kernels/triton/tools/sass.py",
        "copied = now + 1",
        "copied = 1",
        "tests/kernels/triton/tools/test_sass.py",
    ),
    broken(
        "a program gives its level to the first of its tiles alone",
        "kernels/triton/templates/attend.py.jinja",
        "(mine < stop)[None, :]",
        "(mine == begin)[None, :]",
        "tests/kernels/triton/retention/test_levels.py",
    ),
    broken(
        "a buffer that is filled before it is read is no matter",
        "kernels/triton/tools/ttgir.py",
        "if buffers < ahead + (fills[0] < max(reads, default=0)):",
        "if buffers < ahead:",
        "tests/kernels/triton/tools/test_releases.py",
    ),
)
