"""YAML as recipes have it: safe, small, and every key once.

PyYAML's safe loader makes no objects, and that is all it promises: it takes the last of two equal keys, counts digits
for as long as there are any, goes as deep as the text does, and lets a few lines of aliases stand for billions of
values. And YAML 1.1 has numbers that nobody means: 0100 is 64, and 1:30 is 90.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

_DEEPEST = 32  # brackets in brackets
_MOST = 10_000  # values, with those that aliases stand for
_LONGEST = 64  # digits of a number
_SCALARS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_UNMEANT = re.compile(r"[-+]?(0[0-7_]+|.*:.*)")  # of base 8, and of base 60


class YamlProblems(Exception):
    """Text that is not read; `problems` has one line for each thing that is wrong with it."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("; ".join(problems))


def read_yaml(text: str) -> Any:
    """What a text of YAML says.

    Raises:
        YamlProblems: no safe YAML, too deep, too large, or with a key that is there twice.
    """
    try:
        loader = _Loader(text)
        data = loader.get_single_data()
    except yaml.YAMLError as error:
        said = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise YamlProblems([f"is not safe YAML: {said}"]) from error
    if loader.twice:
        raise YamlProblems(loader.twice)
    return data


class _Loader(yaml.SafeLoader):
    """The safe loader, with an end to everything."""

    def __init__(self, text: str):
        self.twice: list[str] = []
        self._depth = self._count = 0
        self._sizes: dict[Node, int] = {}  # values in a node, by what aliases stand for
        super().__init__(text)

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        mark, before = self.peek_event().start_mark, self._count  # type: ignore[no-untyped-call]
        alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {_DEEPEST} levels deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias and node not in self._sizes:
            raise yaml.MarkedYAMLError(problem="an alias of what it stands in", problem_mark=mark)
        self._count += self._sizes[node] if alias and node is not None else 1
        if self._count > _MOST:
            raise yaml.MarkedYAMLError(problem=f"more than {_MOST:,} values", problem_mark=mark)
        if not alias and node is not None:
            self._sizes[node] = self._count - before
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        if isinstance(node, ScalarNode) and node.tag in _SCALARS and len(node.value) > _LONGEST:
            raise yaml.MarkedYAMLError(
                problem=f"a number of {len(node.value):,} characters", problem_mark=node.start_mark
            )
        if isinstance(node, ScalarNode) and node.tag in _SCALARS and _UNMEANT.fullmatch(node.value):
            raise yaml.MarkedYAMLError(
                problem=f"{node.value}, which YAML reads as {super().construct_object(node, deep)}: write that number, "
                "or put a text in quotes",
                problem_mark=node.start_mark,
            )
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a date that no calendar has
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from error

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                continue
            line, known = key.start_mark.line + 1, (key.tag, key.value)
            if known in lines:
                self.twice.append(
                    f"{key.value}: stands twice in one mapping, on lines {lines[known]} and {line}: leave one out"
                )
            lines[known] = line
        return node
