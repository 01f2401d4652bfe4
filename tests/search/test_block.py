"""A block as arithmetic sees it."""

import dataclasses

import toy

from jaxopt_llm.search.block import Block


def test_of_experts_a_block_has_what_a_token_meets() -> None:
    """Of layers that differ, the mean."""
    mixed = dataclasses.replace(
        toy.CONFIG, layers=4, experts=8, experts_per_token=3, expert_width=10, shared_expert_width=6, dense_layers=1
    )
    dense = dataclasses.replace(toy.CONFIG, layers=4, mlp_width=(toy.CONFIG.mlp_width + 3 * (3 * 10 + 6)) // 4)
    assert Block.of(mixed, 2, sequence_parallel=False) == Block.of(dense, 2, sequence_parallel=False)
    assert Block.of(mixed, 1, sequence_parallel=False) != Block.of(toy.CONFIG, 1, sequence_parallel=False)
