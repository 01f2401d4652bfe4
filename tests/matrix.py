"""A pairwise cover: few cases in which every pair of values of any two factors occurs."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def pairwise(factors: dict[str, Sequence[Any]], possible: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Greedy: each case is the possible one of the full product that covers most pairs not yet seen."""
    names = list(factors)
    product = (dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values()))
    cases = list(filter(possible, product))

    def pairs(case: dict[str, Any]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
        return {
            ((a, str(case[a])), (b, str(case[b]))) for a, b in itertools.combinations(names, 2)
        }  # fmt: skip

    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen
