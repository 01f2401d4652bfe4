"""Size of the train state on each device, from the shardings only: exact, and nothing is compiled."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
from jax.sharding import NamedSharding

from jaxopt_llm.checkpoint.pretrained import make_teacher_config
from jaxopt_llm.config import Config, LoraConfig, ModelConfig, OptimizerConfig, PipelineConfig, PrecisionConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution.stage_layout import stack_by_stage
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.mesh import make_abstract_mesh
from jaxopt_llm.parallel.offload import HOST, count_resting_bytes
from jaxopt_llm.parallel.placement import Placement, Spec
from jaxopt_llm.parallel.zero import gathered_sharding, gradient_sharding, master_sharding
from jaxopt_llm.step import moments, state, update
from jaxopt_llm.step.local_steps import has_groups, make_group_specs, place_groups
from jaxopt_llm.step.lora import adapt_model, freeze_model
from jaxopt_llm.step.optimizer import make_optimizer
from jaxopt_llm.step.state import StateSpecs


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters on one device.

    weights: weights as the model uses them, whole except for `tensor`.
    trained: those of the weights that are trained.
    gradients, masters: gradients and master weights, divided as ZeRO does.
    """

    weights: int
    trained: int
    gradients: int
    masters: int

    def __add__(self, other: "ParameterCounts") -> "ParameterCounts":
        return ParameterCounts(
            weights=self.weights + other.weights,
            trained=self.trained + other.trained,
            gradients=self.gradients + other.gradients,
            masters=self.masters + other.masters,
        )


@dataclass(frozen=True)
class StateSizes:
    """Size of the train state on each device, between steps.

    parameters: bytes of parameters, master weights and compute copy together.
    optimizer: bytes of the moments, and of the average of the parameters.
    host: bytes of both that are on the host.
    non_layer_host: the part of `host` that is outside the stacks.
    blocks: parameters in the stacks of this device's stage that all tokens pass.
    experts: parameters of this device's experts.
    non_layer: parameters outside the stacks.
    """

    parameters: int
    optimizer: int
    host: int
    non_layer_host: int
    blocks: ParameterCounts
    experts: ParameterCounts
    non_layer: ParameterCounts

    @functools.cached_property
    def layers(self) -> ParameterCounts:
        return self.blocks + self.experts


def compute_state_sizes(config: Config) -> StateSizes | None:
    """Return the size of the train state.

    Returns None if blocks of 8-bit moments would straddle two devices, which `train` refuses.
    """
    specs = _state_specs(
        *(config.model, config.lora, config.training.trainable, config.optimizer, config.precision),
        *(config.mesh.pipeline, config.pipeline, config.training.ema_decay > 0),
    )
    mesh = make_abstract_mesh(config.mesh)
    placement = place_groups(config, Placement(mesh, config.sharding, config.precision, config.offload))
    if has_groups(config):
        specs = make_group_specs(specs, config.mesh.data)
    if config.runs_teacher:
        specs = replace(specs, teacher=_teacher_specs(make_teacher_config(config)))
    if moments.problems(config.optimizer.state_dtype, specs.masters, placement):
        return None
    return count_state(specs, placement)


def compute_teacher_sizes(config: Config) -> StateSizes:
    """Return the size of the teacher of a distillation: a state that trains nothing."""
    own = make_teacher_config(config)
    placement = Placement(make_abstract_mesh(own.mesh), own.sharding, own.precision, own.offload)
    frozen = _teacher_specs(own)
    nothing = jax.tree.map(lambda spec: None, frozen)
    return count_state(StateSpecs(nothing, {}, frozen, {}, {}), placement)


def _teacher_specs(own: Config) -> Params:
    return _frozen_specs(own.model, own.lora, own.precision, own.mesh.pipeline, own.pipeline)


@functools.cache
def _frozen_specs(
    model: ModelConfig, lora: LoraConfig, precision: PrecisionConfig, stages: int, pipeline: PipelineConfig
) -> Params:
    parts: Model = Decoder(model)
    return freeze_model(stack_by_stage(parts, stages, pipeline) if stages > 1 else parts, lora, precision)[1]


def count_state(specs: StateSpecs, placement: Placement, trained: Params | None = None) -> StateSizes:
    """Return the size of a train state with these specs on each device.

    Args:
        trained: specs of the parameters that a step trains; None for all masters.
    """
    stored = state.abstract_state(specs, placement)
    everything = tree.merge(specs.masters, specs.frozen)
    count = functools.partial(_count_parameters, specs.masters if trained is None else trained, everything, placement)
    stacks = [name for name in specs.masters if name != "non_layer"]
    non_layer = [
        part["non_layer"]
        for part in (stored.masters, stored.moments, stored.compute, stored.average)  # no groups: none are on the host
        if part and "non_layer" in part
    ]
    return StateSizes(
        parameters=count_resting_bytes(stored.all_parameters),
        optimizer=count_resting_bytes(stored.optimizer_state),
        host=count_resting_bytes(stored, HOST),
        non_layer_host=count_resting_bytes(non_layer, HOST),
        blocks=count(stacks),
        experts=count(stacks, of_experts=True),
        non_layer=count(["non_layer"]),
    )


def _count_parameters(
    trained: Params, everything: Params, placement: Placement, sections: list[str], of_experts: bool = False
) -> ParameterCounts:
    """Count the parameters of these sections, either those of experts or all others.

    Args:
        trained: specs of the trained parameters.
        everything: specs of the trained and the frozen parameters.
    """

    def count(specs: Params, sharding: Callable[[Spec, Placement], NamedSharding]) -> int:
        leaves = jax.tree.leaves([specs[name] for name in sections if name in specs])
        chosen = (spec for spec in leaves if bool(spec.expert_dims) is of_experts)
        return sum(math.prod(sharding(spec, placement).shard_shape(spec.shape)) for spec in chosen)

    return ParameterCounts(
        weights=count(everything, gathered_sharding),
        trained=count(trained, gathered_sharding),
        gradients=count(trained, gradient_sharding),
        masters=count(trained, master_sharding),
    )


@functools.cache
def _state_specs(
    model: ModelConfig,
    lora: LoraConfig,
    trainable: tuple[str, ...],
    optimizer: OptimizerConfig,
    precision: PrecisionConfig,
    stages: int,
    pipeline: PipelineConfig,
    averages: bool,
) -> StateSpecs:
    parts: Model = Decoder(model)
    if stages > 1:
        parts = stack_by_stage(parts, stages, pipeline)
    _, trained, frozen = adapt_model(parts, lora, precision, trainable)
    optimizers = update.make_optimizers(
        functools.partial(make_optimizer, optimizer, lambda step: optimizer.learning_rate), trained
    )
    return state.make_state_specs(trained, frozen, optimizers, precision, averages=averages)
