"""Snapshots with one alteration each, whole files all of them: for test_saving.py and for the stress test."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from snapshot import Snapshot, digest

Path_ = tuple[Any, ...]


def paths(value: Any, path: Path_ = (), depth: int = 4) -> Iterator[tuple[Path_, Any]]:
    """All parts of a snapshot down to a depth, with the keys that lead to them."""
    if path:
        yield path, value
    if depth and isinstance(value, dict):
        for key, inner in value.items():
            yield from paths(inner, (*path, key), depth - 1)


def altered(snapshot: Snapshot, path: Path_, change: Callable[[dict[Any, Any], Any], None]) -> Snapshot:
    """A copy of a snapshot in which one part is changed; other parts are shared."""
    new = copy.copy(snapshot)
    inner: dict[Any, Any] = new
    for key in path[:-1]:
        inner[key] = copy.copy(inner[key])
        inner = inner[key]
    change(inner, path[-1])
    return new


def removed(parts: dict[Any, Any], key: Any) -> None:
    del parts[key]


def replaced(value: Any) -> Callable[[dict[Any, Any], Any], None]:
    def change(parts: dict[Any, Any], key: Any) -> None:
        parts[key] = value

    return change


def oddities(value: Any) -> list[Any]:
    """What may stand in the place of a value: other types, other sizes, no data, no numbers."""
    if isinstance(value, torch.Tensor):
        one = torch.zeros(1)
        return [
            *(torch.cat([value.reshape(-1), one]), value.double(), value.bfloat16(), value.to("meta"), None, "weights"),
            *(torch.full_like(value, float("nan")), torch.full_like(value, float("inf")), value.to_sparse(), []),
            *(one.expand(*(value.shape or (2,))), one.expand(10**12), value.tolist()),
        ]
    odd = [None, "text", 3, -1, 10**15, 2.5, float("nan"), [], {}, [1, 2], True, torch.ones(2), {"a": {"b": 1}}]
    return [other for other in odd if repr(other) != repr(value)]


def alterations(mine: Snapshot, others: dict[str, Snapshot], share: int = 1) -> list[tuple[str, Snapshot]]:
    """Snapshots with one alteration each, as (what was done, snapshot without a digest).

    Args:
        mine: the genuine one.
        others: by name, those of other runs, whose parts take the place of its own.
        share: of what can stand in the place of an inner part, one in so many; 1: all.
    """
    cases = []
    for number, (path, value) in enumerate(paths(mine)):
        if path == ("format_version",):
            continue
        cases.append((f"{path} removed", altered(mine, path, removed)))
        for index, odd in enumerate(oddities(value)):
            if (number + index) % share == 0 or len(path) == 1:
                cases.append((f"{path} made number {index}", altered(mine, path, replaced(odd))))
        for name, other in others.items():
            if len(path) == 1 and digest(other[path[0]]) != digest(value):
                cases.append((f"{path} of the run with another {name}", altered(mine, path, replaced(other[path[0]]))))
    return cases
