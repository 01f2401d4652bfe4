"""Latent attention with a cache gives the same logits as without one, for all leaf classes and meshes."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.config import LoraConfig, MLAConfig, ModelConfig, PrecisionConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.by_layer import split_layers
from jaxopt_llm.execution.decode import TokenGenerator
from jaxopt_llm.kernels.attention_types import KeyRanges, make_document_ranges
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.parallel.zero import parameter_sharding
from jaxopt_llm.step.lora import adapt_model

pytestmark = pytest.mark.core

CONFIG = replace_fields(
    toy.UNIFORM,
    {
        "kv_heads": 4,
        "head_dim": 10,
        "mla.kv_rank": 16,
        "mla.query_rank": 16,
        "mla.rotary_head_dim": 6,
        "mla.value_head_dim": 3,
    },
)
GROUPED = ("width", "mla.kv_rank", "mla.query_rank", "mlp_width")  # dimensions that int4 matmuls sum over
LENGTH, ROWS = 8, 2
ADAPTED = {
    "dora over nf4": (
        LoraConfig(rank=2, base="nf4", double_quantisation=True, dora=True),
        PrecisionConfig(compute_dtype="float32"),
    ),
    "int4_qat": (LoraConfig(), PrecisionConfig(compute_dtype="float32", matmul="int4_qat")),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_cached_logits_match_uncached_logits_with_other_leaf_classes(name: str) -> None:
    lora, precision = ADAPTED[name]
    sizes = {} if lora.rank else dict.fromkeys(GROUPED, 32) | {"mla.value_head_dim": 32}
    config = replace_fields(CONFIG, {"layers": 1, **sizes})
    model, _, _ = adapt_model(Decoder(config), lora, precision)
    random = np.random.default_rng(0)

    def value(path: str, leaf: Any) -> Any:
        return random.normal(scale=0.3, size=leaf.shape).astype(leaf.dtype) if path.endswith("lora_b") else leaf

    initialize = jax.jit(functools.partial(leaves.initialize, model.specs, 0), compiler_options=toy.QUICK_COMPILE)
    params = tree.map_with_path(value, initialize())
    placement = replace(toy.placement(), precision=precision)
    tokens = random.integers(0, 250, (ROWS, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    forward = jax.jit(functools.partial(scan.forward, model), compiler_options=toy.QUICK_COMPILE)
    key_ranges = make_document_ranges(jnp.zeros(tokens.shape, jnp.int32))
    expected, _ = forward(params, tokens, Context(positions, key_ranges, placement))
    caches, pieces = scan.make_caches(model, ROWS, LENGTH, jnp.float32, placement), []
    for first in range(0, LENGTH, 4):
        part = slice(first, first + 4)
        key_ranges = KeyRanges(jnp.zeros((ROWS, 4), jnp.int32), positions[:, part])
        context = Context(positions[:, part], key_ranges, placement, jnp.full(ROWS, first, jnp.int32))
        piece, caches = forward(toy.by_layer(params), tokens[:, part], context, caches)
        pieces.append(piece)
    found = np.concatenate(pieces, axis=1)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_devices_that_split_heads_hold_the_whole_cache(axes: dict[str, int]) -> None:
    model, prompts = Decoder(CONFIG), [np.array(ids, np.int32) for ids in ([256, 7, 9, 30, 2], [256, 5])]
    params = toy.params(model.specs)

    def generate(axes: dict[str, int]) -> tuple[np.ndarray, Any]:
        placement = toy.placement(3, **axes)
        placed = jax.tree.map(
            lambda leaf, spec: jax.device_put(leaf, parameter_sharding(spec, placement)), params, model.specs
        )
        by_layer = split_layers(placed)
        generator = TokenGenerator(model, by_layer, placement, CONFIG.vocabulary_size, len(prompts), 12)
        return toy.continue_prompts(generator, prompts, 6), generator._caches

    expected, _ = generate({})
    found, caches = generate(axes)
    np.testing.assert_array_equal(found, expected)
    rows = len(prompts) // axes.get("fsdp", 1), 1, 12
    shards = [{part.data.shape for part in cache.addressable_shards} for cache in jax.tree.leaves(caches)]
    assert shards == [{(*rows, 16 + 6)}] * CONFIG.layers


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        (
            {"kv_heads": 2},
            "model.kv_heads=2: with model.mla.kv_rank each query head has its own keys; set --model.kv-heads 4",
        ),
        ({"mla.rotary_head_dim": 10}, "model.mla.rotary_head_dim=10: must be even and below model.head_dim=10"),
        ({"mla.rotary_head_dim": 3}, "model.mla.rotary_head_dim=3: must be even"),
        ({"mla.value_head_dim": 0}, "model.mla.value_head_dim=0: must be at least 1"),
        ({"mla.kv_rank": -1}, "model.mla.kv_rank=-1: must be at least 0"),
        ({"mla.query_rank": -1}, "model.mla.query_rank=-1: must be at least 0"),
        ({"positions": "learned"}, "model.positions=learned: must be rotary with model.mla.kv_rank"),
        ({"norm": "layer"}, "model.norm=layer: must be rms with model.mla.kv_rank"),
        ({"qk_norm": "head"}, "model.qk_norm=head: must be none with model.mla.kv_rank"),
        ({"biases": "qkv"}, "model.biases=qkv: must be none with model.mla.kv_rank"),
        ({"attention_sinks": True}, "model.attention_sinks=True: must be False with model.mla.kv_rank"),
        ({"attention_gate": "element"}, "model.attention_gate=element: must be none with model.mla.kv_rank"),
        ({"mlp": "xielu", "moe.experts": 4}, "model.mlp=xielu: experts have no learned values of an activation; set"),
        ({"rope.scaling": "yarn", "rope.theta": 1.0}, "model.rope.theta=1.0: must be above 1 with"),
        ({"rope.mscale_all_dim": -1.0}, "model.rope.mscale_all_dim=-1.0: must be at least 0"),
    ],
)  # fmt: skip
def test_invalid_settings_are_reported(changes: dict[str, Any], start: str) -> None:
    assert replace(CONFIG).problems() == []
    (found,) = replace_fields(CONFIG, changes).problems()
    assert found.startswith(start)


def test_parameter_count_of_deepseek_v2_lite() -> None:
    # The attention of one layer.
    lite = ModelConfig(
        width=2048,
        layers=1,
        heads=16,
        kv_heads=16,
        head_dim=192,
        mla=MLAConfig(kv_rank=512, rotary_head_dim=64, value_head_dim=128),
    )
    specs = Decoder(lite).specs["segment_0"]["block_0"]
    query, down, up, output = 2048 * 16 * 192, 2048 * (512 + 64), 512 * 16 * (128 + 128), 16 * 128 * 2048
    assert leaves.count_parameters(specs["attention"]) == query + down + up + output
    assert leaves.count_parameters(specs["latent_norm"]) == 512
