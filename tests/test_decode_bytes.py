"""What writing a token needs beside weights and cache, read off the program compiled for H200s."""

import jax
import jax.numpy as jnp
import pytest

from jaxopt_llm.execution import scan
from jaxopt_llm.execution.decode import Sampling, make_step
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import make_parts
from jaxopt_llm.parallel import topology
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement, ShardingConfig

ROWS, LENGTH, LAYERS = 4, 2048, 16
CONFIG = ModelConfig(vocabulary_size=512, width=128, layers=LAYERS, heads=4, kv_heads=2, head_dim=64, mlp_width=256)
CACHE = 2 * LAYERS * ROWS * LENGTH * CONFIG.kv_heads * CONFIG.head_dim * 2


@pytest.mark.parametrize("axes", [{}, {"tensor": 2}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_the_cache_is_there_once_and_divided(axes: dict[str, int]) -> None:
    mesh, parts = MeshConfig(**axes), make_parts(CONFIG)
    devices = topology.gpu_topology("h200", 1, mesh.devices)
    placement = Placement(make_mesh(mesh, devices), ShardingConfig(3), PrecisionConfig(compute_dtype="bfloat16"))

    def abstract(x: jax.Array, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement.activation(*axes))

    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16, sharding=placement.parameters(spec)), parts.specs
    )
    empty = jax.eval_shape(lambda: scan.make_caches(parts, ROWS, LENGTH, jnp.bfloat16, placement))
    caches = jax.tree.map(lambda x: abstract(x, None, "batch", "kv_heads", None, "head_dim"), empty)
    step = make_step(parts, placement, CONFIG.vocabulary_size, Sampling(), caches)
    tokens, padding = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement.replicated) for shape in ((ROWS, 1), (ROWS,))
    )
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=placement.replicated)
    memory = topology.compile(
        topology.lower(step, params, caches, tokens, padding, number, number, number, number)
    ).memory_analysis()
    assert memory.alias_size_in_bytes == CACHE // mesh.devices
    # Of one layer keys and values are read out of it, and two layers are on their way.
    assert memory.temp_size_in_bytes < 4 * CACHE // LAYERS // mesh.devices
