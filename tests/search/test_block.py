"""A block as arithmetic sees it."""

import dataclasses

import jax
import toy

from jaxopt_llm.model import param
from jaxopt_llm.model.decoder import param_specs
from jaxopt_llm.search.block import Block


def test_of_experts_a_block_has_what_a_token_meets() -> None:
    """Of layers that differ, the mean."""
    mixed = dataclasses.replace(
        toy.CONFIG, layers=4, experts=8, experts_per_token=3, expert_width=10, shared_expert_width=6, dense_layers=1
    )
    dense = dataclasses.replace(toy.CONFIG, layers=4, mlp_width=(toy.CONFIG.mlp_width + 3 * (3 * 10 + 6)) // 4)
    assert Block.of(mixed, 2, sequence_parallel=False) == Block.of(dense, 2, sequence_parallel=False)
    assert Block.of(mixed, 1, sequence_parallel=False) != Block.of(toy.CONFIG, 1, sequence_parallel=False)


def test_of_latents_a_block_has_its_matrices_and_they_are_whole_on_each_device() -> None:
    latent = dataclasses.replace(
        toy.UNIFORM, layers=1, kv_heads=4, head_dim=10, latent_rank=8, query_rank=6, rotary_head_dim=4, value_head_dim=3
    )
    for model in (latent, dataclasses.replace(latent, query_rank=0), dataclasses.replace(latent, latent_rank=0)):
        block = Block.of(model, 1, sequence_parallel=False)
        matrices = [spec for spec in jax.tree.leaves(param_specs(model)["segment_0"]) if spec.contracting]
        assert sum(block.weights.values()) == param.count(matrices)
    halves, whole = (Block.of(latent, tensor, sequence_parallel=False).elements for tensor in (2, 1))
    divided = {name for name in whole if halves[name] != whole[name]}
    assert divided == {"query", "key", "value", "attention", "mlp_gate", "mlp_up"}
    assert (whole["latent"], whole["rotary_key"], whole["key"], whole["attention"]) == (8, 4, 4 * 6, 4 * 3)
