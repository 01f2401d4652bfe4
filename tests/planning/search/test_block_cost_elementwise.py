"""Kernels between the products of a block, as XLA fuses them."""

from typing import Any

import pytest

from jaxopt_llm.config import Config, LoraConfig, MeshConfig, ModelConfig, RematConfig, ShardingConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.planning.search.block_cost import BlockCost

WIDTH, MLP, QUERIES, KEYS = 64, 320, 128, 32
MODEL = ModelConfig(width=WIDTH, layers=2, heads=8, kv_heads=2, head_dim=16, mlp_width=MLP, vocabulary_size=256)


def count(tensor: int = 1, policy: Any = "none", **switches: Any) -> tuple[float, float]:
    sharding = ShardingConfig(sequence_parallel=tensor > 1)
    config = Config(model=replace_fields(MODEL, switches), mesh=MeshConfig(tensor=tensor), sharding=sharding)
    return BlockCost.from_config(config).count_streamed(RematConfig(policy))


@pytest.mark.parametrize("tensor", [1, 2])
def test_kernels_of_a_llama(tensor: int) -> None:
    """A norm reads and writes the residual stream, a sum reads twice and writes; both occur twice.

    The gradient of a norm reads the gradient and its input three times: to reduce them, for the gradient of its scale,
    and to write its own. It adds the gradient that comes past it. The gated product of the MLP is formed again together
    with its gradients.
    """
    heads = QUERIES + KEYS
    forward = 10 * WIDTH + 2 * heads + 3 * MLP
    again = (2 + 3 + 2) * WIDTH + 2 * heads + MLP
    gradients = 2 * (3 * 2 + 1 + 1) * WIDTH + 2 * heads + 5 * MLP
    assert count(tensor) == (forward / tensor, (again + gradients) / tensor)


def test_switches_change_what_they_should() -> None:
    plain, biases = count(), count(biases="all")
    assert biases[0] == plain[0], "a product adds its bias"
    assert count(positions="learned")[0] == plain[0] - 2 * (QUERIES + KEYS), "nothing rotates"
    assert count(mlp="gelu")[0] == plain[0] - MLP, "no gate is read"
    assert count(attention_gate="element")[0] == plain[0] + 3 * QUERIES, "made of two arrays"
    # One sum of three in place of two. The norm counts twice, but XLA computes it once.
    assert count(parallel_block=True)[0] == plain[0] - 2 * WIDTH
    normed = count(norm_placement="both")[0], count(qk_norm="head")[0]
    assert normed == (plain[0] + 2 * WIDTH, plain[0] + QUERIES + KEYS), "what a product makes is summed first"


def test_a_policy_decides_what_runs_again() -> None:
    """Also a kernel whose result is kept runs again only if a policy does not keep it."""
    rows = {"moe.experts": 8, "moe.experts_per_token": 3, "moe.expert_width": 96}
    kept, again = (count(policy=policy, **rows) for policy in ("none", "dots"))
    assert kept[0] == again[0]
    assert again[1] - kept[1] > 2 * 3 * WIDTH, "rows are read and written"


def test_what_is_saved_goes_through_stacks() -> None:
    """Zeros are written, and an array is read and written. Attention and products read a copy of the layer's array.

    Attention saves its result, and a float32 number for each of eight heads.
    """
    block = BlockCost.from_config(Config(model=MODEL))
    assert block.count_stacked(RematConfig("full")) == 3 * WIDTH
    assert block.count_stacked(RematConfig(("attention",))) == 3 * WIDTH + 5 * (QUERIES + 2 * 8)


def test_only_thin_matrices_wait_for_memory() -> None:
    """A product of 4096 numbers with a matrix of rank 16 moves more than 1/16 of a byte for each FLOP."""
    wide = replace_fields(MODEL, {"width": 4096, "head_dim": 512, "mlp_width": 16_384})
    plain, adapted = Config(model=wide), Config(model=wide, lora=LoraConfig(rank=16, targets=("down",)))
    assert BlockCost.from_config(plain).count_waiting(None, 1 / 200) == 0
    waiting = BlockCost.from_config(adapted).count_waiting(None, 1 / 200)
    moved, products = 16_384 + 16 + 16 + 4096, 16 * (16_384 + 4096)
    assert waiting == pytest.approx(moved - products / 200)
