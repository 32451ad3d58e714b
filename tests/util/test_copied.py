"""Copies share memory among each other alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcompile.util.copied import copied

VIEWS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5), st.booleans()), min_size=1, max_size=6)


@given(VIEWS)
def test_copies_lie_in_each_other_as_the_originals_do(views: list[tuple[int, int, bool]]) -> None:
    base = torch.arange(12 * 3.0).view(12, 3)
    tensors = {
        str(number): base[start : start + rows].T if turned else base[start : start + rows]
        for number, (start, rows, turned) in enumerate(views)
    }
    tensors["columns"] = base[:, 1:2]
    tensors |= {"whole": base[2:10], "again": base[2:10], "other": torch.ones(3), "none": base[:0]}
    wanted = {name: value.clone() for name, value in tensors.items()}
    found = copied(tensors)
    assert list(found) == list(tensors)
    for name, value in found.items():
        assert torch.equal(value, wanted[name])
        assert not value.numel() or value.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert found["whole"].data_ptr() == found["again"].data_ptr()
    assert found["columns"].is_contiguous()
    held = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in found.values()}
    assert found["whole"].untyped_storage().nbytes() == 8 * 3 * 4
    for name, (start, rows, _) in zip(tensors, views, strict=False):
        inside = start >= 2 and start + rows <= 10 and tensors[name].is_contiguous()
        shared = found[name].untyped_storage().data_ptr() == found["whole"].untyped_storage().data_ptr()
        assert shared >= inside
    assert sum(held.values()) <= sum(value.nbytes for value in tensors.values())
