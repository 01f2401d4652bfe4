"""Latent attention with a cache, whatever its matrices are and wherever they lie, is what it is without one."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.decode import Decoder, Sampling
from jaxopt_llm.kernels.spans import Spans, of_documents
from jaxopt_llm.model import leaves
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import make_parts
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.training.lora import LoraConfig, adapt

pytestmark = pytest.mark.core

CONFIG = replace(
    toy.UNIFORM, kv_heads=4, head_dim=10, latent_rank=16, query_rank=16, rotary_head_dim=6, value_head_dim=3
)
GROUPED = ("width", "latent_rank", "query_rank", "mlp_width")  # what products of int4 sum over
LENGTH, ROWS = 8, 2
ADAPTED = {
    "dora over nf4": (
        LoraConfig(rank=2, base="nf4", double_quantisation=True, dora=True),
        PrecisionConfig(compute_dtype="float32"),
    ),
    "int4 as in training": (LoraConfig(), PrecisionConfig(compute_dtype="float32", matmul="int4_qat")),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_whatever_matrices_are_the_cache_gives_the_same(name: str) -> None:
    lora, precision = ADAPTED[name]
    sizes = {} if lora.rank else dict.fromkeys(GROUPED, 32) | {"value_head_dim": 32}
    config = replace(CONFIG, layers=1, **sizes)
    parts, _, _ = adapt(make_parts(config), lora, precision)
    random = np.random.default_rng(0)

    def value(path: str, leaf: Any) -> Any:
        return random.normal(scale=0.3, size=leaf.shape).astype(leaf.dtype) if path.endswith("lora_b") else leaf

    initialize = jax.jit(functools.partial(leaves.initialize, parts.specs, 0), compiler_options=toy.QUICK_COMPILE)
    params = tree.map_with_path(value, initialize())
    placement = replace(toy.placement(), precision=precision)
    tokens = random.integers(0, 250, (ROWS, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    forward = jax.jit(functools.partial(scan.forward, parts), compiler_options=toy.QUICK_COMPILE)
    spans = of_documents(jnp.zeros(tokens.shape, jnp.int32))
    expected, _ = forward(params, tokens, Context(positions, spans, placement))
    caches, pieces = scan.make_caches(parts, ROWS, LENGTH, jnp.float32, placement), []
    for first in range(0, LENGTH, 4):
        part = slice(first, first + 4)
        spans = Spans(jnp.zeros((ROWS, 4), jnp.int32), positions[:, part])
        context = Context(positions[:, part], spans, placement, jnp.int32(first))
        piece, caches = forward(params, tokens[:, part], context, caches)
        pieces.append(piece)
    found = np.concatenate(pieces, axis=1)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_devices_that_divide_heads_have_the_cache_whole(axes: dict[str, int]) -> None:
    parts, prompts = make_parts(CONFIG), [np.array(ids, np.int32) for ids in ([256, 7, 9, 30, 2], [256, 5])]
    params = toy.params(parts.specs)

    def written(axes: dict[str, int]) -> tuple[np.ndarray, Any]:
        placement = toy.placement(3, **axes)
        placed = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, placement.parameters(spec)), params, parts.specs)
        decoder = Decoder(parts, placed, placement, CONFIG.vocabulary_size, Sampling(), 0, len(prompts), 12)
        return np.stack([*decoder(prompts, 6)], axis=1), decoder._caches

    expected, _ = written({})
    found, caches = written(axes)
    np.testing.assert_array_equal(found, expected)
    rows = CONFIG.layers, len(prompts) // axes.get("fsdp", 1), 1, 12
    held = [{part.data.shape for part in cache.addressable_shards} for cache in jax.tree.leaves(caches)]
    assert held == [{(*rows, 16)}, {(*rows, 6)}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_heads": 2}, "model.kv_heads=2: with model.latent_rank each query head has keys of its own; set 4"),
        ({"rotary_head_dim": 10}, "model.rotary_head_dim=10: must be even, above 0 and below model.head_dim=10"),
        ({"rotary_head_dim": 3}, "model.rotary_head_dim=3: must be even"),
        ({"value_head_dim": 0}, "model.value_head_dim=0: must be at least 1"),
        ({"latent_rank": -1}, "model.latent_rank=-1: must be at least 0"),
        ({"query_rank": -1}, "model.query_rank=-1: must be at least 0"),
        ({"positions": "learned"}, "model.positions=learned: model.latent_rank goes with rotary alone"),
        ({"norm": "layer"}, "model.norm=layer: model.latent_rank goes with rms alone"),
        ({"qk_norm": "head"}, "model.qk_norm=head: model.latent_rank goes with none alone"),
        ({"biases": "qkv"}, "model.biases=qkv: model.latent_rank goes with none alone"),
        ({"rope_scaling": "yarn", "rope_theta": 1.0}, "model.rope_theta=1.0: must be above 1 with"),
        ({"rope_mscale_all_dim": -1.0}, "model.rope_mscale_all_dim=-1.0: must be at least 0"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named(changes: dict[str, Any], said: str) -> None:
    assert replace(CONFIG).problems() == []
    (found,) = replace(CONFIG, **changes).problems()
    assert found.startswith(said)


def test_its_parameters_are_counted() -> None:
    """DeepSeek-V2-Lite's attention, of one layer."""
    lite = ModelConfig(
        width=2048,
        layers=1,
        heads=16,
        kv_heads=16,
        head_dim=192,
        latent_rank=512,
        rotary_head_dim=64,
        value_head_dim=128,
    )
    specs = make_parts(lite).specs["segment_0"]["block_0"]
    query, down, up, output = 2048 * 16 * 192, 2048 * (512 + 64), 512 * 16 * (128 + 128), 16 * 128 * 2048
    assert leaves.count(specs["attention"]) == query + down + up + output
    assert leaves.count(specs["latent_norm"]) == 512
