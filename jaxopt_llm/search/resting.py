"""What rests on each device between steps, from the shardings alone: exact, and nothing is compiled."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, NamedSharding

from jaxopt_llm import tree
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.execution.schedules import PipelineConfig
from jaxopt_llm.execution.stages import rest_on_stages
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params, make_parts
from jaxopt_llm.parallel.mesh import AXES
from jaxopt_llm.parallel.offload import HOST, resting_bytes
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement, Spec
from jaxopt_llm.training import moments, state, update
from jaxopt_llm.training.lora import LoraConfig, adapt
from jaxopt_llm.training.optimizer import OptimizerConfig, make_optimizer
from jaxopt_llm.training.state import StateSpecs


@dataclass(frozen=True)
class Values:
    """Numbers of values on one device: of weights as they are used, whole but for `tensor`, and of what is trained of
    them; of gradients and of masters as they are divided."""

    weights: int
    trained: int
    gradients: int
    masters: int

    def __add__(self, other: "Values") -> "Values":
        return Values(*(sum(pair) for pair in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclass(frozen=True)
class Resting:
    """Bytes on each device: parameters, masters and compute copy together; moments; of both what is on the host, and of
    that what is outside the stacks. blocks, experts: of the stacks, of this device's stage, what all tokens pass and
    its own experts; outer: of what is outside them."""

    parameters: int
    optimizer: int
    host: int
    outer_host: int
    blocks: Values
    experts: Values
    outer: Values

    @property
    def layers(self) -> Values:
        return self.blocks + self.experts


def resting(config: TrainConfig) -> Resting | None:
    """None where blocks of 8-bit moments would straddle what two devices hold, which `train` refuses."""
    specs = _state_specs(
        config.model,
        config.lora,
        config.training.trainable,
        config.optimizer,
        config.precision,
        config.mesh.pipeline,
        config.pipeline,
    )
    mesh = AbstractMesh(dataclasses.astuple(config.mesh), AXES)
    placement = Placement(mesh, config.sharding, config.precision, config.offload)
    if moments.problems(config.optimizer.state_dtype, specs.masters, placement):
        return None
    rests = state.abstract(specs, placement)
    everything, sections = tree.merge(specs.masters, specs.frozen), [name for name in specs.masters if name != "outer"]

    def values(specs: Params, place: Callable[[Spec], NamedSharding], names: list[str], of_experts: bool) -> int:
        found = (spec for spec in jax.tree.leaves([specs[name] for name in names if name in specs]))
        chosen = (spec for spec in found if bool(spec.numbered) is of_experts)
        return sum(math.prod(place(spec).shard_shape(spec.shape)) for spec in chosen)

    def of(names: list[str], of_experts: bool = False) -> Values:
        return Values(
            weights=values(everything, placement.gathered, names, of_experts),
            trained=values(specs.masters, placement.gathered, names, of_experts),
            gradients=values(specs.masters, placement.gradients, names, of_experts),
            masters=values(specs.masters, placement.masters, names, of_experts),
        )

    return Resting(
        parameters=resting_bytes((rests.masters, rests.compute, rests.frozen)),
        optimizer=resting_bytes(rests.moments),
        host=resting_bytes(rests, HOST),
        outer_host=resting_bytes(
            [part["outer"] for part in (rests.masters, rests.moments, rests.compute) if part and "outer" in part], HOST
        ),
        blocks=of(sections),
        experts=of(sections, of_experts=True),
        outer=of(["outer"]),
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
) -> StateSpecs:
    parts = make_parts(model)
    if stages > 1:
        parts = rest_on_stages(parts, stages, pipeline)
    _, trained, frozen = adapt(parts, lora, precision, trainable)
    optimizers = update.make_optimizers(
        functools.partial(make_optimizer, optimizer, lambda step: optimizer.learning_rate), trained
    )
    return state.state_specs(trained, frozen, optimizers, precision)
