"""A pairwise cover: few cases in which every pair of values of any two factors occurs."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def pairwise(factors: dict[str, Sequence[Any]], possible: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Greedy: each case is the possible one of the full product that covers most pairs not yet seen."""
    names, values = list(factors), list(factors.values())
    product = itertools.product(*(range(len(each)) for each in values))

    def case(numbers: Sequence[int]) -> dict[str, Any]:
        return {name: each[number] for name, each, number in zip(names, values, numbers, strict=True)}

    numbers = np.array([each for each in product if possible(case(each))])  # [case, factor]: which of its values
    columns, pairs = [], 0
    for a, b in itertools.combinations(range(len(names)), 2):
        columns.append(pairs + numbers[:, a] * len(values[b]) + numbers[:, b])
        pairs += len(values[a]) * len(values[b])
    # [case, pair of factors]: the pair of values that it covers, numbered through all pairs of factors.
    covered_by = np.stack(columns, axis=1)
    missing = np.zeros(pairs, bool)
    missing[covered_by] = True
    chosen = []
    while missing.any():
        best = missing[covered_by].sum(axis=1).argmax()
        chosen.append(case(numbers[best]))
        missing[covered_by[best]] = False
    return chosen
