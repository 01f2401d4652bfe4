"""Small decoder with two segments and two kinds of block, packed rows for it, and simulated devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
import reference
from texts import stream

from jaxopt_llm.config import (
    Config,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    RematConfig,
    RopeConfig,
    RunConfig,
    ScheduleConfig,
    ShardingConfig,
    TrainingConfig,
    XlaConfig,
)
from jaxopt_llm.config.fields import get_field, walk_fields
from jaxopt_llm.core import tree
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer
from jaxopt_llm.execution.decode import Request, TokenGenerator
from jaxopt_llm.execution.executor import Executor
from jaxopt_llm.execution.sampling import Sampling
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder_specs import list_mtp_modules, list_segments
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.param import ParamSpec, zeros
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step import program, step
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import StateSpecs
from jaxopt_llm.step.step import StepSettings, make_decoder_advance
from jaxopt_llm.step.update import SectionOptimizers

CONFIG = ModelConfig(
    vocabulary_size=ByteTokenizer.vocabulary_size,
    width=16,
    layers=5,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp_width=24,
    pattern=("sliding", "global"),
    window=3,
    norm_epsilon=0.1,  # as large as the mean square of an embedding, so that a dropped epsilon shows
    rope=RopeConfig(theta=100.0),
)

# One kind of block, in stages of unequal lengths. It compiles in a third of the time of CONFIG, which has three.
UNIFORM = dataclasses.replace(CONFIG, layers=3, pattern=("sliding",))

QUICK_COMPILE = {"xla_backend_optimization_level": 0}  # LLVM's optimisations take half of a small compile


def make_program(
    model: ModelConfig,
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    remat: RematConfig,
    lora: LoraConfig,
    placement: Placement,
    seed: int = 0,
    keep_frozen: bool = True,
    pipelined: PipelineConfig | None = None,
    xla: XlaConfig | None = None,
) -> Program:
    """Return the program of a configuration with these sections."""
    config = Config(
        run=RunConfig(seed=seed),
        model=model,
        training=training,
        optimizer=optimizer,
        schedule=schedule,
        remat=remat,
        lora=lora,
        pipeline=pipelined or PipelineConfig(),
        xla=xla or XlaConfig(),
    )
    return program.make_program(config, placement, keep_frozen)


def make_step(
    model: Model,
    specs: StateSpecs,
    optimizers: SectionOptimizers,
    schedule: optax.Schedule,
    executor: Executor,
    placement: Placement,
    settings: StepSettings,
) -> Any:
    """Return the jitted step of a decoder from its parts."""
    advance = make_decoder_advance(model, executor, placement, lambda _: optimizers, specs, settings)
    function = step.ModelStep(advance, lambda _: schedule, placement).step
    jitted = step.jit_step(function, specs, placement, placement.activation(None, "batch", "sequence"))
    return step.BoundStep(jitted, None, placement)


def continue_prompts(
    generator: TokenGenerator, prompts: Sequence[np.ndarray], count: int, sampling: Sampling | None = None
) -> np.ndarray:
    """Return `count` tokens after each prompt, [B, count]."""
    requests = [Request(prompt, count, sampling or Sampling(), number) for number, prompt in enumerate(prompts)]
    drawn = [(each.request.number, each.token) for each in generator.run(requests, lambda request: False)]
    return np.array([[token for number, token in drawn if number == row] for row in range(len(prompts))])


def by_layer(params: Params) -> Params:
    """Return stacked parameters by layer, as they rest for generation."""

    def split(segment: Params) -> tuple[Params, ...]:
        periods = jax.tree.leaves(segment)[0].shape[0]
        return tuple(jax.tree.map(lambda x, row=row: x[row], segment) for row in range(periods))

    return {name: part if name == "non_layer" else split(part) for name, part in params.items()}


def params(specs: Params) -> Params:
    """Return random values of the size of an initialisation.

    Scales and biases are away from 1 and 0, so that a dropped or swapped one shows.
    """
    random = np.random.default_rng(0)

    def values(spec: ParamSpec) -> np.ndarray:
        if spec.contracting:
            draw = random.normal(size=spec.shape) / np.sqrt(spec.fan_in)
        else:
            draw = random.uniform(0.5, 1.5, spec.shape) - (spec.init is zeros)
        return draw.astype(np.float32)

    return jax.tree.map(values, specs)


def on_stages(specs: Params, leaves: Params) -> Params:
    """Convert leaves [repeats, ...] to a pipeline's, [virtual, stages, slots, ...]; slots without a layer are 0."""

    def move(spec: ParamSpec, leaf: np.ndarray) -> np.ndarray:
        if spec.leading < 3:
            return leaf
        padded = np.concatenate([leaf, np.zeros_like(leaf[:1])])
        return padded[np.asarray(spec.layers)]

    return jax.tree.map(move, specs, leaves)


def packed(rows: int, length: int, seed: int = 0) -> Batch:
    """Return a batch of fields [rows, length]. Documents begin and end within rows and continue in the next row."""
    random = np.random.default_rng(seed)
    documents = [random.bytes(int(size)) for size in random.integers(1, length // 2, 8 * rows)]
    source = PackedRows(stream(documents), length, ByteTokenizer.vocabulary_size)
    return jax.tree.map(lambda *fields: np.stack(fields), *(source[row] for row in range(rows)))


def one_document_per_row(batch: Batch) -> Batch:
    """Return rows with one document each, at the start of its row, followed by padding."""
    rows = []
    for row in range(len(batch.tokens)):
        for document in range(1, int(batch.segment_ids[row].max()) + 1):
            (slots,) = np.nonzero(batch.segment_ids[row] == document)
            kept = jax.tree.map(lambda field, row=row, slots=slots: field[row, slots], batch)
            rows.append(jax.tree.map(lambda field: np.pad(field, (0, batch.tokens.shape[1] - len(field))), kept))
    return jax.tree.map(lambda *fields: np.stack(fields), *rows)


def microbatches(batch: Batch, count: int) -> Batch:
    """Reshape fields [B, S, ...] to [count, B / count, S, ...]."""
    return jax.tree.map(lambda field: field.reshape(count, -1, *field.shape[1:]), batch)


def reference_config(config: ModelConfig) -> reference.ReferenceConfig:
    values = {name: get_field(config, name) for name, _, _ in walk_fields(ModelConfig)}
    flat = {name.replace("rope.", "rope_").rpartition(".")[2]: value for name, value in values.items()}
    derived = {"layout", "mtp_kinds", "mtp_weight"}
    same = {field.name for field in dataclasses.fields(reference.ReferenceConfig)} - derived
    segments = tuple((segment.kinds, segment.repeats) for segment in list_segments(config))
    kinds = tuple(kind for module in list_mtp_modules(config) for kind in module.kinds)
    return reference.ReferenceConfig(
        **{name: flat[name] for name in same}, layout=segments, mtp_kinds=kinds, mtp_weight=TrainingConfig().mtp_weight
    )


def reference_mean(config: ModelConfig, params: Params, batch: Batch) -> tuple[float, Params]:
    """Return the reference's mean loss per real token of a batch [B, S], and its gradients.

    The gradient of a router's bias is a count, not a mean.
    """
    where = (batch.loss_mask, batch.segment_ids, batch.positions)
    loss, gradients = reference.loss_and_gradients(
        params, reference_config(config), batch.tokens, batch.targets, *where
    )
    tokens = np.sum(batch.loss_mask)

    def mean(path: str, gradient: np.ndarray) -> np.ndarray:
        return gradient if path.endswith("router_bias") else gradient / tokens

    return loss / tokens, tree.map_with_path(mean, gradients)


def placement(
    zero_stage: int = 0, compute_dtype: str = "float32", sequence_parallel: bool = False, **axes: int
) -> Placement:
    """Return a placement on the first devices, as many as the mesh needs."""
    mesh = MeshConfig(**axes)
    precision = PrecisionConfig(compute_dtype=compute_dtype)  # type: ignore[arg-type]
    return Placement(
        make_mesh(mesh, jax.devices("cpu")[: mesh.devices]), ShardingConfig(zero_stage, sequence_parallel), precision
    )  # type: ignore[arg-type]


def distance(found: Any, expected: Any) -> float:
    """Return ‖found - expected‖ / ‖expected‖ over all leaves, in float64."""

    def norm(leaves: Any) -> float:
        return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(leaves))))

    found, expected = (jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), each) for each in (found, expected))
    return norm(jax.tree.map(np.subtract, found, expected)) / norm(expected)


def pairs(rows: int, length: int) -> Batch:
    """Return rows of whole pairs of a chosen and a rejected document, fields [rows, length], with a reference."""
    random, fields = np.random.default_rng(0), []
    for _ in range(rows):
        segments, positions, counts = (np.zeros(length, np.int32) for _ in range(3))
        end, segment = 0, 0
        while True:
            sizes = random.integers(3, 9, 2)
            if end + sizes.sum() > length:
                break
            for size in sizes:
                segment += 1
                segments[end : end + size], positions[end : end + size] = segment, np.arange(size)
                counts[end + int(random.integers(0, size - 1)) : end + size] = 1  # the prompt does not count
                end += size
        fields.append((segments, positions, counts.astype(bool)))
    segment_ids, positions, counts = map(np.stack, zip(*fields, strict=True))
    ids = random.integers(0, CONFIG.vocabulary_size, (2, rows, length)).astype(np.int32)
    return Batch(
        tokens=np.where(segment_ids > 0, ids[0], 0),
        targets=np.where(segment_ids > 0, ids[1], 0),
        loss_mask=counts,
        segment_ids=segment_ids,
        positions=positions,
        reference=-random.exponential(1.0, segment_ids.shape).astype(np.float32),
    )
