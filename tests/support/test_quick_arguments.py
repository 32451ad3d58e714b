"""Arguments that are taken apart have PyTorch's leaves, and are put together to what they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import fake_tensor

from tests.support.quick_arguments import PLAIN, Form, mapped, put_together, taken_apart

LEAF = st.one_of(st.none(), st.booleans(), st.integers(0, 9), st.just(torch.float32), st.just(2.5))
# A list of lists goes PyTorch's own way.
VALUE = st.one_of(
    LEAF, st.lists(LEAF, max_size=3), st.tuples(LEAF, LEAF), st.lists(st.lists(LEAF, max_size=2))
)


@settings(max_examples=100)
@given(st.lists(VALUE, max_size=4).map(tuple), st.dictionaries(st.sampled_from("abcd"), VALUE, max_size=3))
def test_leaves_are_those_of_pytorch(values: tuple[Any, ...], named: dict[str, Any]) -> None:
    leaves, form = taken_apart((values, named))
    expected, _ = PLAIN.flatten((values, named))
    assert leaves == expected and list(map(type, leaves)) == list(map(type, expected))
    again = put_together(leaves, form)
    assert again == (values, named) and list(again[1]) == list(named)
    assert list(map(type, again[0])) == list(map(type, values))


@pytest.mark.parametrize(
    ("tree", "quick"),
    [
        (((torch.zeros(2), [1, 2]), {"dim": 0}), True),
        (((torch.Size([1, 2]),), {}), False),
        ((([[1]],), {}), False),
        ([1, 2], False),
    ],
)
def test_what_is_quick(tree: Any, quick: bool) -> None:
    leaves, form = taken_apart(tree)
    assert (type(form) is Form) == quick
    assert len(leaves) == len(PLAIN.flatten(tree)[0])


def test_it_is_what_fake_tensors_use() -> None:
    assert fake_tensor.pytree.tree_flatten is taken_apart and fake_tensor.tree_map is mapped  # type: ignore[attr-defined]
    assert mapped(lambda x: x + 1, 2) == 3 and mapped(lambda x: x + 1, [2, (3,)]) == [3, (4,)]
    assert mapped(lambda x, y: x + y, [2], [5]) == [7]
