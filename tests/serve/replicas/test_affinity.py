"""Which replica a prompt goes to: the same one for what begins alike, as long as the load allows it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvcompile.serve.replicas.affinity import PIECE, Places, beginnings, bound, by_rank

REPLICAS = st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=6).map(sorted)
LOADS = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 20), min_size=1)
NAMES = st.lists(st.sampled_from(["x1", "x2", "x3", "y1", "y2"]), max_size=3)


def idle(*replicas: str) -> dict[str, int]:
    return dict.fromkeys(replicas, 0)


@given(st.integers(0, 4 * PIECE), st.integers(0, 2 * PIECE), st.integers(0, 99))
def test_prompts_that_begin_alike_have_beginnings_in_common(shared: int, own: int, start: int) -> None:
    ids = [(start + place * place) % 97 for place in range(shared + own)]
    names = beginnings(ids, "salt")
    assert len(set(names)) == len(names) == len(ids) // PIECE
    assert names[: shared // PIECE] == beginnings(ids[:shared], "salt")
    assert not set(names) & set(beginnings(ids, "other"))
    assert not set(names) & set(beginnings([97, *ids[1:]], "salt"))


def test_a_long_prompt_has_few_beginnings() -> None:
    assert len(beginnings([1] * 100_000, "")) == 64


@given(st.text(max_size=5), REPLICAS, st.data())
def test_only_the_prompts_of_what_goes_move(name: str, replicas: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(replicas))
    before = by_rank(name, replicas)
    assert sorted(before) == replicas
    assert by_rank(name, [one for one in reversed(replicas) if one != gone]) == [
        one for one in before if one != gone
    ]


def test_first_places_are_shared_out_evenly() -> None:
    first = Counter(by_rank(f"prompt {number}", ["a", "b", "c", "d"])[0] for number in range(4000))
    assert min(first.values()) > 850  # 1000 and 5 standard deviations


@given(LOADS, NAMES, NAMES, st.sampled_from("abcde"))
def test_all_replicas_are_asked_and_none_above_its_bound_first(
    loads: dict[str, int], names: list[str], noted: list[str], at: str
) -> None:
    places = Places()
    places.note(noted, at)
    order = places.order(names, loads, 1.25, 2)
    assert sorted(order) == sorted(loads)
    most = bound(loads, 1.25, 2)
    assert loads[order[0]] < most  # the mean is below its own bound, so some replica always is
    if names and names[-1] in noted and at in loads and loads[at] < most:
        assert order[0] == at


def test_a_talk_stays_where_its_longest_beginning_is() -> None:
    places = Places()
    for at in "abc":
        places.note(["x1", f"x2 {at}"], at)
    for at in "abc":
        assert places.order(["x1", f"x2 {at}", "x3"], idle("a", "b", "c"), 1.25, 2)[0] == at
    assert places.order(["x1", "new"], idle("a", "b", "c"), 1.25, 2)[0] == "c"  # where x1 was last
    assert places.order(["x1", "x2 c"], idle("a", "b"), 1.25, 2)[0] == by_rank("x1", "ab")[0]  # c is gone


def test_a_busy_replica_is_passed_over() -> None:
    places = Places()
    places.note(["x"], "a")
    assert places.order(["x"], {"a": 3, "b": 0}, 1.25, 4)[0] == "a"
    assert places.order(["x"], {"a": 4, "b": 0}, 1.25, 4)[0] == "b"
    assert places.order(["x"], {"a": 12, "b": 10}, 1.25, 4)[0] == "a"
    assert places.order([], {"a": 1, "b": 0}, 1.25, 4) == ["b", "a"]


def test_what_was_not_asked_for_longest_is_forgotten() -> None:
    places = Places(most=2)
    places.note(["x"], "a")
    places.note(["y"], "b")
    places.note(["x"], "c")
    places.note(["z"], "b")
    loads = idle("a", "b", "c")
    assert places.order(["x"], loads, 1.25, 2)[0] == "c"
    assert places.order(["y"], loads, 1.25, 2) == by_rank("y", loads)
