"""What the loss and its gradients hold and move at 16k tokens on each device × 128k classes, read off programs compiled
for H200s."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import programs
import pytest

from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.compiler.hlo import Collective
from jaxopt_llm.compiler.topology import gpu_topology
from jaxopt_llm.config import MeshConfig, ModelConfig, PrecisionConfig, ShardingConfig, TrainingConfig
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.gathering import attach_shardings, make_perturbations
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import parameter_sharding

TOKENS, VOCABULARY, WIDTH = 16_384, 128_000, 4096
CHUNK = TrainingConfig().logit_tokens
TABLE, ACTIVATION = VOCABULARY * WIDTH, TOKENS * WIDTH
ONE, TENSOR, FSDP = MeshConfig(), MeshConfig(tensor=8), MeshConfig(fsdp=8)


@dataclass(frozen=True)
class Compiled:
    memory: hlo.Memory
    collectives: tuple[Collective, ...]
    text: str

    def moved(self, *axes: str) -> dict[tuple[str, tuple[str, ...]], int]:
        """Bytes of the arrays that collectives over these axes work on, by kind and dtypes."""
        sums: dict[tuple[str, tuple[str, ...]], int] = {}
        for each in self.collectives:
            if each.axes == axes:
                sums[each.kind, each.dtypes] = sums.get((each.kind, each.dtypes), 0) + each.array_bytes * each.times
        return sums


@functools.cache
def compiled(mesh: MeshConfig, stage: int, sequence_parallel: bool = False, differentiated: bool = True) -> Compiled:
    """Final norm, head and loss, with the gradients by the table, the norm and the input."""
    placement = Placement(
        make_mesh(mesh, gpu_topology("h200")[: mesh.devices]),
        ShardingConfig(stage, sequence_parallel),
        PrecisionConfig(),
    )
    model = ModelConfig(vocabulary_size=VOCABULARY, width=WIDTH, tied_head=False, logit_softcap=30.0)
    parts = Decoder(model, CHUNK, z_loss=1e-4)
    specs = {name: parts.specs["non_layer"][name] for name in ("head", "final_norm")}

    def losses(perturbations: Params, x: jax.Array, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        non_layer = attach_shardings(specs, params, perturbations, placement, keep_gathered=True)
        return parts.loss(non_layer, x, batch, parts.make_context(batch, placement), jnp.float32(1 / TOKENS))

    def run(params: Params, x: jax.Array, batch: Batch) -> Any:
        if not differentiated:
            return losses(jax.tree.map(lambda spec: None, specs), x, params, batch)[1]
        return jax.grad(losses, argnums=(0, 1), has_aux=True)(make_perturbations(specs, placement), x, params, batch)

    def argument(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rows, by_row = (mesh.size("fsdp"), TOKENS), placement.activation("batch", "sequence")
    ids, mask = (argument(rows, dtype, by_row) for dtype in (jnp.int32, jnp.bool))
    x = argument((*rows, WIDTH), jnp.bfloat16, placement.activation("batch", "residual_sequence", "embed"))
    params = jax.tree.map(lambda spec: argument(spec.shape, jnp.bfloat16, parameter_sharding(spec, placement)), specs)
    executable = topology.compile_without_gpu(jax.jit(run).lower(params, x, Batch(ids, ids, mask, ids, ids)))
    text = str(executable.as_text())
    return Compiled(hlo.read_memory(executable), hlo.list_collectives(text, placement.mesh), text)


@pytest.mark.parametrize(("mesh", "stage"), [(ONE, 0), (TENSOR, 0), (FSDP, 3)])
def test_beyond_the_weight_and_its_gradient_there_is_less_than_a_gigabyte(mesh: MeshConfig, stage: int) -> None:
    step = compiled(mesh, stage)
    # What fsdp divides at rest is whole while it is used: the weight in 16 bits, its gradient in 32.
    whole = (2 + 4) * TABLE if mesh.size("fsdp") > 1 else 0
    assert step.memory.temporaries - whole < 1e9
    # Not only for want of what it should compute.
    logits = CHUNK * VOCABULARY // mesh.tensor
    assert any(each.bytes == 4 * logits for each in programs.list_array_shapes(step.text))


def test_the_head_is_gathered_once_and_its_gradient_reduced_once() -> None:
    moved = compiled(FSDP, 3).moved("fsdp")
    assert moved.pop(("all-gather", ("bf16",))) == pytest.approx(2 * TABLE, rel=1e-4)  # with the norm's scale
    assert moved.pop(("reduce-scatter", ("f32",))) == pytest.approx(4 * TABLE, rel=1e-4)
    assert sum(moved.values()) <= 4 * 2  # objective and loss


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_over_tensor_go_three_numbers_per_token_and_the_inputs_gradient(sequence_parallel: bool) -> None:
    step = compiled(TENSOR, 0, sequence_parallel)
    moved = step.moved("tensor")
    numbers = moved.pop(("all-reduce", ("f32",)))
    norms = 4 * WIDTH if sequence_parallel else 0  # whose gradient each device has of its part of the sequence
    assert numbers == 4 * 3 * TOKENS + norms
    kinds = ("all-gather", "reduce-scatter") if sequence_parallel else ("all-reduce",)
    assert moved == {(kind, ("bf16",)): 2 * ACTIVATION for kind in kinds}
    assert {each.axes for each in step.collectives} == {("tensor",)}


@pytest.mark.slow
def test_without_gradients_there_is_the_table_and_one_chunks_logits() -> None:
    step = compiled(FSDP, 3, differentiated=False)
    assert step.memory.temporaries < 2 * TABLE + 4 * CHUNK * VOCABULARY + 2 * ACTIVATION + 1e7
    assert step.moved("fsdp").pop(("all-gather", ("bf16",))) == pytest.approx(2 * TABLE, rel=1e-4)
