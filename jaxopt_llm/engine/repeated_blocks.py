"""Repeated blocks of a user's model: equal layers in a list, found by the paths of their parameters."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from jaxopt_llm.engine.frontends import ArrayInfo
from jaxopt_llm.execution.weight_uses import CONVOLUTION, PRODUCT, Use

_NUMBERED = re.compile(r"(.*?)\d+")  # an item of a list, `3`, or a numbered name, `Block_3`
_PRODUCTS = 2  # of a block: rematerialising a single product saves nothing but its activation function


def name_blocks(parameters: Sequence[ArrayInfo], uses: Sequence[Sequence[Use]]) -> tuple[str, ...]:
    """Return the name of each parameter's block, such as `layers/3`; "" for a parameter of none.

    Blocks are the items of a list of layers: numbered parts of the model, at least two of which have parameters of the
    same names and shapes, and which compute at least two products each. If blocks contain blocks, the outer ones count.

    Args:
        uses: how the loss reads each parameter.
    """
    names = [""] * len(parameters)
    paths = [info.path.split("/") for info in parameters]
    for depth in range(max(map(len, paths))):
        lists: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))  # list -> item -> parameters
        for index, path in enumerate(paths):
            match = _NUMBERED.fullmatch(path[depth]) if depth < len(path) - 1 and not names[index] else None
            if match:
                lists["/".join([*path[:depth], match[1]])]["/".join(path[: depth + 1])].append(index)
        for items in lists.values():
            shapes = Counter(
                tuple(("/".join(paths[index][depth + 1 :]), parameters[index].shape) for index in indices)
                for indices in items.values()
            )
            for name, indices in items.items() if max(shapes.values()) > 1 else ():
                products = sum(use.kind in (PRODUCT, CONVOLUTION) for index in indices for use in uses[index])
                for index in indices if products >= _PRODUCTS else ():
                    names[index] = name
    return tuple(names)
