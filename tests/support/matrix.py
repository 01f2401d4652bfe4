"""Pairwise cover: few cases that contain every pair of values of any two factors."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def pairwise(factors: dict[str, Sequence[Any]], possible: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Return the cases of a greedy search: each is the possible one that covers most of the missing pairs."""
    names, values = list(factors), list(factors.values())
    product = itertools.product(*(range(len(each)) for each in values))

    def case(numbers: Sequence[int]) -> dict[str, Any]:
        return {name: each[number] for name, each, number in zip(names, values, numbers, strict=True)}

    numbers = np.array([each for each in product if possible(case(each))])  # [case, factor]: index of the value
    columns, pairs = [], 0
    for a, b in itertools.combinations(range(len(names)), 2):
        columns.append(pairs + numbers[:, a] * len(values[b]) + numbers[:, b])
        pairs += len(values[a]) * len(values[b])
    # [case, pair of factors]: the covered pair of values, numbered across all pairs of factors.
    covered_by = np.stack(columns, axis=1)
    missing = np.zeros(pairs, bool)
    missing[covered_by] = True
    chosen = []
    while missing.any():
        best = missing[covered_by].sum(axis=1).argmax()
        chosen.append(case(numbers[best]))
        missing[covered_by[best]] = False
    return chosen
