"""Blocks of a loss, found in its jaxpr by the parameters that its equations read."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Jaxpr

from jaxopt_llm.execution.placed_evaluation import count_live_bytes, find_blocks

pytestmark = pytest.mark.core

ROWS, WIDTH = 4, 8
ACTIVATION = 4 * ROWS * WIDTH  # bytes
Block = dict[str, Any]


def run_block(block: Block, x: jax.Array) -> jax.Array:
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True)) * block["scale"]
    return x + jnp.tanh(normal @ block["up"]) @ block["down"].T


def make_block() -> Block:
    return {"scale": jnp.ones(WIDTH), "up": jnp.ones((WIDTH, 2 * WIDTH)), "down": jnp.ones((WIDTH, 2 * WIDTH))}


def trace(function: Callable[..., Any], blocks: int) -> tuple[Jaxpr, list[str | None]]:
    """Trace a function of (head, blocks, x). Return its jaxpr and the tags of its arguments."""
    given = [make_block() for _ in range(blocks)]
    closed = jax.make_jaxpr(function)(jnp.ones((WIDTH, 32)), given, jnp.ones((ROWS, WIDTH)))
    tags = [f"block {index}" for index in range(blocks) for _ in range(3)]
    return closed.jaxpr, ["", *tags, None]


def test_a_block_is_entered_by_one_activation() -> None:
    def function(head: jax.Array, blocks: list[Block], x: jax.Array) -> jax.Array:
        x = jnp.sin(x)
        for block in blocks:
            x = run_block(block, x)
        return jnp.mean((x @ head) ** 2)

    jaxpr, tags = trace(function, 3)
    blocks = find_blocks(jaxpr, tags)
    assert len(blocks) == 3 and blocks[0].stop == blocks[1].start and blocks[1].stop == blocks[2].start
    for block in blocks[1:]:
        assert {var.aval.shape for var in set(block.entering) - set(jaxpr.invars)} == {(ROWS, WIDTH)}
        assert [var.aval.shape for var in block.leaving] == [(ROWS, WIDTH)] and not block.moves
    # The product with the head, which is of no block, comes after the last one.
    names = [eqn.primitive.name for eqn in jaxpr.eqns[blocks[-1].stop :]]
    assert names.count("dot_general") == 1 and "tanh" not in names
    live = count_live_bytes(jaxpr)
    assert max(live[place] for block in blocks for place in (block.start, block.stop)) == ACTIVATION


def test_a_block_that_is_called_twice_has_two_spans() -> None:
    def function(head: jax.Array, blocks: list[Block], x: jax.Array) -> jax.Array:
        for block in (*blocks, *blocks):
            x = run_block(block, x)
        return x @ head

    jaxpr, tags = trace(function, 2)
    blocks = find_blocks(jaxpr, tags)
    assert len(blocks) == 4
    assert all(before.stop == after.start for before, after in itertools.pairwise(blocks))


def test_a_parameter_of_no_block_may_be_read_within_one() -> None:
    def function(head: jax.Array, blocks: list[Block], x: jax.Array) -> jax.Array:
        for block in blocks:
            x = run_block(block, x) + jnp.sum(head)
        return x

    jaxpr, tags = trace(function, 2)
    first, second = find_blocks(jaxpr, tags)
    assert len(first.leaving) == len(second.leaving) == 1
    assert first.stop < second.start  # a sum with the head lies between them


def test_what_is_rematerialised_already_is_left_alone() -> None:
    def function(head: jax.Array, blocks: list[Block], x: jax.Array) -> jax.Array:
        for block in blocks:
            x = jax.checkpoint(run_block)(block, x)
        return x @ head

    assert find_blocks(*trace(function, 2)) == []


def test_weights_leave_no_block() -> None:
    """Casts of all weights at the beginning, and the transpose of a table between blocks, are not in a block."""

    def function(head: jax.Array, blocks: list[Block], x: jax.Array) -> jax.Array:
        cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), blocks)
        for block in cast[:2]:
            x = run_block(block, x)
        table = head.T.astype(jnp.bfloat16)
        return run_block(cast[2], x) @ table.T

    jaxpr, tags = trace(function, 3)
    found = find_blocks(jaxpr, tags)
    assert [len(block.leaving) for block in found] == [1, 1, 1] and found[0].start >= 9
    moves = [eqn.primitive.name for block in found for eqn in block.moves]
    assert moves == ["transpose", "convert_element_type", "transpose"]
