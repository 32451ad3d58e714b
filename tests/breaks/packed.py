"""Breaks of packed steps: the op, its kernels, the program and the engine."""

from __future__ import annotations

from tests.breaks.broken import broken

REFERENCE, TRITON, ENGINE = (
    "tests/kernels/packed/test_reference.py",
    "tests/kernels/packed/test_triton.py",
    "tests/serve/test_packed.py",
)

PACKED = (
    broken(
        "sequences of a row have one page table",
        "kernels/packed.py",
        "None if x.page_table is None else x.page_table[which]",
        "None if x.page_table is None else x.page_table[:1].expand(x.page_table[which].shape)",
        REFERENCE,
    ),
    broken(
        "tokens of a row stand where those of the first sequence do",
        "kernels/packed.py",
        "v=v, positions=x.positions[:, start:end])",
        "v=v, positions=x.positions[:, : end - start])",
        REFERENCE,
    ),
    broken(
        "a row that does not fit its sequences is taken",
        "kernels/packed.py",
        "    if starts[: first + 1] != list(range(first + 1)):",
        "    if False:",
        REFERENCE,
    ),
    broken(
        "a kernel of a row begins at its first position",
        "kernels/triton/packed.py",
        '"positions_ptr = positions_ptr + query_start"',
        '"positions_ptr = positions_ptr + 0"',
        TRITON,
    ),
    broken(
        "a kernel of a row writes the results of all sequences to the first",
        "kernels/triton/attend/context.py",
        'f"(query_start + token) * {heads} + heads"',
        'f"(0 + token) * {heads} + heads"',
        TRITON,
    ),
    broken(
        "a kernel of a row reads the first sequence's new tokens",
        "kernels/triton/tile/addressing.py",
        "row_tokens + query_start + {self.at}",
        "row_tokens + {self.at}",
        TRITON,
    ),
    broken(
        "a kernel of a row encodes the first sequence's tokens",
        "kernels/triton/packed.py",
        'far = begin if param.rank == 3 else f"{begin} * {name}_s2"',
        'far = "0"',
        TRITON,
    ),
    broken(
        "the logits of a packed step are those of first tokens",
        "kvcompile/runtime/packed.py",
        "starts[1:].to(device) - 1",
        "starts[:-1].to(device)",
        ENGINE,
    ),
    broken(
        "texts of a packed step have the tables of the first rows",
        "kvcompile/serve/rows.py",
        "name: buffer if name in whole else buffer[rows.to(buffer.device)]",
        "name: buffer if name in whole else buffer[: len(texts)]",
        ENGINE,
    ),
    broken(
        "steps are never packed",
        "kvcompile/serve/loop.py",
        "if self._packs and len(plan.chunks)",
        "if False and len(plan.chunks)",
        ENGINE,
    ),
    broken(
        "what fails after a packed step takes all of it along",
        "kvcompile/serve/loop.py",
        "self._guarded(plan.decodes, partial(self._choose, lives, decoded))",
        "self._choose(lives, decoded)",
        ENGINE,
    ),
    broken(
        "tokens chosen by scores are packed",
        "kvcompile/layouts/packing.py",
        "    if layout.retention.by_score:",
        "    if False:",
        ENGINE,
    ),
    broken(
        "tokens in full are packed",
        "kvcompile/layouts/packing.py",
        "        if storage.residual or storage.sinks:",
        "        if False:",
        ENGINE,
    ),
    broken(
        "a model that counts positions itself is packed",
        "kvcompile/runtime/packed.py",
        "    if not program.ragged:",
        "    if False:",
        ENGINE,
    ),
    broken(
        "deterministic steps are packed",
        "kvcompile/serve/packing.py",
        "    if deterministic:",
        "    if False:",
        ENGINE,
    ),
    broken(
        "codes of two sequences in one row stand in the same places",
        "kernels/triton/packed.py",
        "(query_start // 16 + batch) * 16",
        "(query_start // 16) * 16",
        TRITON,
    ),
)
