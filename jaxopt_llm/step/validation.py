"""Sizes that the mesh divides, and all other rules on a configuration that need the model, the mesh or JAX."""

import functools
import math
from typing import get_args

from jaxopt_llm.checkpoint.pretrained import TEACHER, make_teacher_config
from jaxopt_llm.config import BATCH_AXES, Config, MeshConfig, ModelConfig, ShardingConfig, TrainingConfig
from jaxopt_llm.config.fields import METADATA, WITH_IN_BACKWARD, get_field, normalize_names, wrong_types
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.model import GATED_DELTA
from jaxopt_llm.config.parallel import Policy
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution import stage_layout, trace
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import VOCABULARY_MULTIPLE, list_segments, pad_vocabulary_size, param_specs
from jaxopt_llm.model.linear import quantised
from jaxopt_llm.parallel.mesh import make_abstract_mesh
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step import lora, moments, optimizer


def validate(config: Config) -> None:
    """Raise one InputError that names all problems, before any device is used or any array allocated."""
    problems = wrong_types(config) or [*config.problems(), *_allow_change_problems(config)]
    if not problems:
        problems = [
            *lora.problems(param_specs(config.model), config.lora, config.training.trainable),
            *size_problems(config.model, config.training, config.mesh, config.sharding),
            *(
                stage_layout.split_problems(list_segments(config.model), config.mesh.pipeline, config.pipeline)
                or _remat_group_problems(config)
            ),
            *_remat_name_problems(config),
            *_in_backward_problems(config),
            *_quantisation_problems(config),
        ]
    if not problems:
        decoder = Decoder(config.model)
        trained = lora.adapt_model(decoder, config.lora, config.precision, config.training.trainable)[1]
        mesh = make_abstract_mesh(config.mesh)
        placement = Placement(mesh, config.sharding, config.precision)
        problems = [
            *optimizer.group_problems(config.optimizer, trained),
            *moments.problems(config.optimizer.state_dtype, trained, placement),
            *quantised.problems(config.precision.matmul, decoder.specs, placement),
        ]
    if not problems and config.runs_teacher:
        problems = _teacher_problems(config)
    if problems:
        raise InputError("; ".join(problems))


def _teacher_problems(config: Config) -> list[str]:
    """Check the sizes of the teacher against the mesh, its stages, the sequence and its storage."""
    own, name = make_teacher_config(config), f"{TEACHER}={config.distillation.teacher}"
    model, length = own.model, own.training.sequence_length
    found = [
        *size_problems(model, own.training, own.mesh, own.sharding),
        *stage_layout.split_problems(list_segments(model), own.mesh.pipeline, own.pipeline),
        *own.crossing_problems(),
        *(
            each.replace("lora.base", "distillation.teacher_base")
            for each in lora.base_problems(param_specs(model), own.lora)
        ),
    ]
    if model.positions == "learned" and length > model.max_positions:
        found.append(
            f"it has {model.max_positions} positions: set --training.sequence-length to at most {model.max_positions}"
        )
    return [f"{name}: {each}" for each in found]


def _allow_change_problems(config: Config) -> list[str]:
    allowed = normalize_names(config.run.allow_change)
    fixed = [name for name in allowed if name in METADATA and METADATA[name].resume == "never"]
    return [
        *(f"run.allow_change: {name}: no such field" for name in allowed if name not in METADATA),
        *(f"run.allow_change: {name} shapes the checkpoint, so no resume can change it" for name in fixed),
    ]


def _remat_group_problems(config: Config) -> list[str]:
    """Check that the layers of a segment, or of its part in one chunk, form whole groups of remat.every layers."""
    every, period = config.remat.every, config.model.period
    if every == 1:
        return []
    if every % period:
        remedy = f"set --remat.every to a multiple of {period}, the number of layers of a period"
        return [f"remat.every={every} does not divide into periods: {remedy}"]
    segments = list_segments(config.model)
    layouts = stage_layout.split_periods(segments, config.mesh.pipeline, config.pipeline)
    chunks, stages, _ = layouts[0].shape
    where = f" in each of {stages} stages" if stages > 1 else ""
    where = f" in each of the {chunks} chunks of {stages} stages" if chunks > 1 else where
    slots = [layout.shape[-1] for layout in layouts]
    return [
        f"remat.every={every} does not divide the {repeats * len(segment.kinds)} layers{where}: choose one of "
        + ", ".join(str(size * len(segment.kinds)) for size in range(1, repeats + 1) if repeats % size == 0)
        for segment, repeats in zip(segments, slots, strict=True)
        if repeats % config.remat.group_size(len(segment.kinds), repeats)
    ]


def _remat_name_problems(config: Config) -> list[str]:
    """Check the names of intermediates against those that the model has."""
    remat = config.remat
    given = {"remat.policy": () if isinstance(remat.policy, str) else remat.policy, "remat.offload": remat.offload}
    if not any(given.values()):
        return []
    known = _list_intermediates(config.model)
    policies = {"remat.policy": f"one of {', '.join(get_args(Policy))}, or to ", "remat.offload": ""}
    return [
        f"{setting}: {name} is no intermediate of this model: set --{setting} to {policies[setting]}some of "
        + ", ".join(known)
        for setting, names in given.items()
        for name in names
        if name not in known
    ]


@functools.cache
def _list_intermediates(model: ModelConfig) -> list[str]:
    return [*trace.list_intermediates(Decoder(model))]


def _quantisation_problems(config: Config) -> list[str]:
    """Check precision.matmul and its exempt layers against the other settings."""
    exempt, layers, problems = config.precision.compute_dtype_layers, config.model.layers, []
    threshold = config.precision.outlier_threshold
    if threshold and config.model.moe.experts:
        problems.append(
            f"precision.outlier_threshold={threshold} does not support experts: set --precision.outlier-threshold 0"
        )
    name, remedy = f"precision.compute_dtype_layers={exempt}", "set --precision.compute-dtype-layers 0"
    if exempt and 2 * exempt >= layers:
        problems.append(f"{name} at each end exempts all of model.layers={layers}: set at most {(layers - 1) // 2}")
    if exempt and config.mesh.pipeline > 1:
        problems.append(
            f"{name} does not support mesh.pipeline={config.mesh.pipeline}, whose stages all run the same program: "
            + remedy
        )
    if exempt and config.remat.every > 1:
        problems.append(f"{name} does not support remat.every={config.remat.every}: {remedy} or --remat.every 1")
    return problems


def _in_backward_problems(config: Config) -> list[str]:
    if not config.optimizer.in_backward:
        return []
    changes = [
        f"--{name.replace('_', '-')} {'' if value == () else value} (it is {get_field(config, name)})"
        for name, value in WITH_IN_BACKWARD.items()
        if get_field(config, name) not in (value, AUTO)
    ]
    if config.precision.scales_loss:  # an overflow is known too late to skip the step
        changes.append("--precision.compute-dtype bfloat16 (it is float16)")
    if not changes:
        return []
    return [
        "optimizer.in_backward=True updates a layer and frees its gradients before those of other layers exist, "
        f"and runs each layer again from only its input: set {', '.join(changes)}, or --optimizer.in-backward False"
    ]


def size_problems(
    model: ModelConfig, training: TrainingConfig, mesh: MeshConfig, sharding: ShardingConfig
) -> list[str]:
    """Check the rows of a microbatch, the sequence, the experts, and the sizes that mesh.tensor splits."""
    batch = {"training.accumulation": training.accumulation} | {f"mesh.{axis}": mesh.size(axis) for axis in BATCH_AXES}
    over = " × ".join(f"{name}={size}" for name, size in batch.items() if size > 1)
    problems = _divisibility_problems(
        f"training.batch_size={training.batch_size}", training.batch_size, math.prod(batch.values()), over
    )
    fewer = _choose_accumulation(training, mesh.batch_shards)
    if problems and fewer:
        problems = [f"{problems[0]}; or set --training.accumulation {fewer}"]

    length = training.sequence_length
    exchanges = ("ring", "all_to_all") if sharding.context_exchange == AUTO else (sharding.context_exchange,)
    by_exchange = [_context_problems(model, length, mesh, each) for each in exchanges]
    fewest = min(by_exchange, key=len)
    problems += fewest

    if experts := model.moe.experts:
        over_expert = f"mesh.expert={mesh.expert}"
        problems += _divisibility_problems(f"model.moe.experts={experts}", experts, mesh.expert, over_expert)

    def over_tensor(tensor: int) -> list[str]:
        return tensor_problems(model, length, sharding.sequence_parallel, tensor, mesh.context)

    if split := over_tensor(mesh.tensor):
        fewer = next(tensor for tensor in range(mesh.tensor - 1, 0, -1) if not over_tensor(tensor))
        problems += [*split, f"or set mesh.tensor={fewer}, which divides all of these sizes"]
    return problems


def _choose_accumulation(training: TrainingConfig, shards: int) -> int:
    """Return the largest accumulation, up to the configured one, with which the batch divides; 0 if none does.

    shards: number of devices that the batch is split over.
    """
    most = training.accumulation
    return next((each for each in range(most, 0, -1) if training.batch_size % (each * shards) == 0), 0)


def _context_problems(model: ModelConfig, length: int, mesh: MeshConfig, exchange: str) -> list[str]:
    """Check the sequence that `context` splits, and what an exchange of attention requires."""
    zigzag = mesh.context > 1 and exchange == "ring"
    parts, over = (2 if zigzag else 1) * mesh.context, f"{'2 × ' * zigzag}mesh.context={mesh.context}"
    problems = _divisibility_problems(f"training.sequence_length={length}", length, parts, over)
    if mesh.context > 1 and GATED_DELTA in model.pattern:
        problem = "a gated_delta layer (model.pattern) passes its state from token to token on one device"
        problems.append(f"mesh.context={mesh.context}: {problem}; set --mesh.context 1")
    return problems + (_heads_problems(model, mesh) if mesh.context > 1 and not zigzag else [])


def _heads_problems(model: ModelConfig, mesh: MeshConfig) -> list[str]:
    """Check that the all-to-all over `context` can split the heads of a device along `tensor`."""
    if model.heads % (mesh.tensor * mesh.context) == 0:
        return []
    over = f"mesh.context={mesh.context}" + f" × mesh.tensor={mesh.tensor}" * (mesh.tensor > 1)
    return [
        f"sharding.context_exchange=all_to_all splits the heads, and model.heads={model.heads} is not divisible by "
        f"{over}: set --sharding.context-exchange ring, or use fewer devices along these axes"
    ]


def tensor_problems(
    model: ModelConfig, sequence_length: int, sequence_parallel: bool, tensor: int, context: int = 1
) -> list[str]:
    """Check the sizes of all logical axes that the placement's tables map to `tensor`."""
    over, heads = f"mesh.tensor={tensor}", model.heads
    kv_heads = {name: count for name in ("kv_heads", "global_kv_heads") if (count := getattr(model, name))}
    of_delta = ("delta.key_heads",) if GATED_DELTA in model.pattern else ()
    padded = pad_vocabulary_size(model.vocabulary_size)
    dense = not all(map(model.moe.has_experts, range(model.blocks)))
    names = ["mlp_width"] * dense + ["moe.expert_width", "moe.shared_expert_width"] * bool(model.moe.experts)
    names += ["layer_input_size"] * bool(model.layer_input_size)
    widths = {f"model.{name}={get_field(model, name)}": get_field(model, name) for name in names}
    if model.mtp_layers:  # the inputs of the projection of an MTP module
        widths[f"2 × model.width={model.width}"] = 2 * model.width
    vocabulary = f"model.vocabulary_size={model.vocabulary_size}, padded to {padded},"
    problems = _divisibility_problems(f"model.heads={heads}", heads, tensor, over, step=math.lcm(*kv_heads.values()))
    widths |= {f"model.{name}={get_field(model, name)}": get_field(model, name) for name in of_delta}
    for name, width in widths.items():
        problems += _divisibility_problems(name, width, tensor, over)
    problems += _divisibility_problems(vocabulary, padded, tensor, over, step=VOCABULARY_MULTIPLE)
    # Fewer key-value heads than `tensor` are replicated; see Placement.replicates.
    for name, count in kv_heads.items():
        if count > tensor and count % tensor:
            valid = [n for n in range(1, heads + 1) if heads % n == 0 and (n < tensor or n % tensor == 0)]
            below, above = [n for n in valid if n < count], [n for n in valid if n > count]
            problems.append(_message(f"model.{name}={count}", over, [*below[-1:], *above[:1]]))
    if sequence_parallel:
        length = f"training.sequence_length={sequence_length}, which sharding.sequence_parallel splits,"
        over = f"mesh.context={context} × {over}" if context > 1 else over
        problems += _divisibility_problems(length, sequence_length, context * tensor, over)
    return problems


def _divisibility_problems(name: str, size: int, divisor: int, over: str, step: int = 1) -> list[str]:
    """Check that a size is divisible.

    Args:
        over: description of the divisor.
        step: the size must also be a multiple of this number.
    """
    if size % divisor == 0:
        return []
    step = math.lcm(divisor, step)
    below = size // step * step
    return [_message(name, over, [near for near in (below, below + step) if near])]


def _message(name: str, over: str, nearest: list[int]) -> str:
    return f"{name} is not divisible by {over} (nearest that are: {' and '.join(map(str, nearest))})"
