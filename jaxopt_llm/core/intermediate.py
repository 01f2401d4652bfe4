"""Intermediates: activations of a block that have a name, which `remat.policy` selects and the planner counts."""

from typing import Literal

# What an intermediate is. A named policy keeps all intermediates of some roles (execution/segments.py).
# input: the norm that products read, or the input of the block. projection: a product that attention reads.
# attention: its result. product: any other product with weights. routing: what a router decides and moves.
Role = Literal["input", "projection", "attention", "product", "routing"]


class Intermediate(str):
    """Name of an activation, with its role and the logical axis of each dimension.

    It is a string, because JAX's policies compare names with strings.
    """

    role: Role
    axes: tuple[str | None, ...]

    def __new__(cls, name: str, role: Role, *axes: str | None) -> "Intermediate":
        made = super().__new__(cls, name)
        made.role, made.axes = role, axes
        return made
