"""What writing a token needs beside weights and cache, read off the program compiled for H200s."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxopt_llm.compiler import topology
from jaxopt_llm.config import MeshConfig, ModelConfig, PrecisionConfig, ShardingConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.decode import Sampling, make_step
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import parameter_sharding

ROWS, LENGTH, LAYERS = 4, 2048, 16
CONFIG = ModelConfig(vocabulary_size=512, width=128, layers=LAYERS, heads=4, kv_heads=2, head_dim=64, mlp_width=256)
CACHE = 2 * LAYERS * ROWS * LENGTH * CONFIG.kv_heads * CONFIG.head_dim * 2


LATENT = replace_fields(
    CONFIG,
    {
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 48,
        "mla.kv_rank": 48,
        "mla.query_rank": 32,
        "mla.rotary_head_dim": 16,
        "mla.value_head_dim": 40,
    },
)
LATENT_CACHE = LAYERS * ROWS * LENGTH * (48 + 16) * 2
MESHES: list[dict[str, int]] = [{}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_cache_is_there_once_and_divided(axes: dict[str, int]) -> None:
    memory = compiled(CONFIG, MeshConfig(**axes)).memory_analysis()
    devices = MeshConfig(**axes).devices
    assert memory.alias_size_in_bytes == CACHE // devices
    # Of one layer keys and values are read out of it, and two layers are on their way.
    assert memory.temp_size_in_bytes < 4 * CACHE // LAYERS // devices


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_of_latents_nothing_else_is_kept_and_no_key_is_formed(axes: dict[str, int]) -> None:
    """They are whole on the devices along `tensor`, and 18 times smaller than keys and values of the heads."""
    program, rows = compiled(LATENT, MeshConfig(**axes)), ROWS // axes.get("fsdp", 1)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == LATENT_CACHE * rows // ROWS
    assert memory.temp_size_in_bytes < 4 * LATENT_CACHE * rows // ROWS // LAYERS
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"bf16\[([0-9,]+)\]", program.as_text())}
    caches = {(LAYERS, rows, 1, LENGTH, size) for size in (48, 16)}
    assert caches <= shapes
    keys = rows * LENGTH * LATENT.heads // axes.get("tensor", 1) * min(LATENT.key_dim, LATENT.value_dim)
    assert max(math.prod(shape) for shape in shapes - caches) < keys


def compiled(config: ModelConfig, mesh: MeshConfig) -> Any:
    """The program that writes a token."""
    parts = Decoder(config)
    devices = topology.gpu_topology("h200", 1, mesh.devices)
    placement = Placement(make_mesh(mesh, devices), ShardingConfig(3), PrecisionConfig(compute_dtype="bfloat16"))

    def abstract(x: jax.Array, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.activation(*axes))

    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16, sharding=parameter_sharding(spec, placement)),
        parts.specs,
    )
    kept = (None, "batch", "kv_heads" if not config.mla.kv_rank else None, None, "head_dim")
    empty = jax.eval_shape(lambda: scan.make_caches(parts, ROWS, LENGTH, jnp.bfloat16, placement))
    caches = jax.tree.map(lambda x: abstract(x, *kept), empty)
    step = make_step(parts, placement, config.vocabulary_size, Sampling(), caches)
    tokens, padding = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement.replicated) for shape in ((ROWS, 1), (ROWS,))
    )
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=placement.replicated)
    lowered = topology.lower_without_gpu(step, params, caches, tokens, padding, number, number, number, number)
    return topology.compile_without_gpu(lowered)
