"""Engine: the training of any model in Flax NNX, in Linen or as plain functions, by the settings of a `Config`."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.compiler import xla_options
from jaxopt_llm.config import BATCH_AXES, Config, OptimizerConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine import deepspeed
from jaxopt_llm.engine.frontends import Frontend, Loss, make_frontend
from jaxopt_llm.engine.gradients import compute_loss, differentiate_user_model
from jaxopt_llm.engine.user_model import Rules, UserModel, make_user_model, nest_variables
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.mesh import make_mesh, visible_devices
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training import update
from jaxopt_llm.training.optimizer import is_elementwise, make_optimizer
from jaxopt_llm.training.schedule import make_schedule
from jaxopt_llm.training.state import StateSpecs, TrainState
from jaxopt_llm.training.step import Metrics, StepSettings, make_step, update_after_backward
from jaxopt_llm.training.update import Optimizers, WholeOptimizer


@dataclass(frozen=True)
class EngineProgram:
    """Program of an engine on one placement; nothing is compiled.

    Attributes:
        step: jitted (state, batch) -> (state, metrics).
        state, batch: abstract arguments of `step`.
    """

    model: UserModel
    placement: Placement
    specs: StateSpecs
    optimizers: Optimizers
    step: Any
    evaluation: Any
    state: TrainState
    batch: Any


def make_engine_program(
    config: Config, frontend: Frontend, loss: Loss, example: Any, optimizer: Any, rules: Rules, mesh: Any
) -> EngineProgram:
    """Make the program of a user's model on a mesh, which may be one of devices that do not exist."""
    placement = Placement(mesh, config.sharding, config.precision, config.offload, reduces_microbatches=True)
    microbatches = config.training.accumulation
    batch = _split_microbatches(example, microbatches, placement)
    microbatch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    model = make_user_model(frontend, loss, microbatch, rules, config.precision)
    frozen = jax.tree.map(lambda spec: None, model.specs)
    learning_rate = None
    if isinstance(optimizer, OptimizerConfig):
        learning_rate = make_schedule(optimizer.learning_rate, config.schedule, config.training.steps)
        make = functools.partial(make_optimizer, optimizer, learning_rate)
        optimizers = update.make_optimizers(make, model.specs)
        elementwise = is_elementwise(optimizer)
    else:
        optimizers, elementwise = _make_whole_optimizer(optimizer, model), False
    specs = training_state.make_state_specs(model.specs, frozen, optimizers, placement.precision)
    variables = nest_variables(
        frontend,
        [ParamSpec(info.shape, (None,) * len(info.shape), dtype=np.dtype(info.dtype)) for info in frontend.variables],
    )
    specs = replace(specs, variables=variables)
    settings = StepSettings(
        clip_norm=config.optimizer.clip_norm if isinstance(optimizer, OptimizerConfig) else 0.0,
        skip_outliers=config.training.skip_outliers,
        elementwise=elementwise,
    )
    options = xla_options.compiler_options(mesh, microbatches, placement.precision.matmul, config.xla)
    advance = update_after_backward(differentiate_user_model(model, placement), optimizers, specs, placement, settings)
    shardings = jax.tree.map(lambda x: x.sharding, batch)
    evaluation = jax.jit(
        functools.partial(compute_loss, model, placement=placement), out_shardings=placement.replicated
    )
    return EngineProgram(
        model=model,
        placement=placement,
        specs=specs,
        optimizers=optimizers,
        step=make_step(advance, specs, learning_rate, placement, shardings, options),
        evaluation=evaluation,
        state=training_state.abstract_state(specs, placement),
        batch=batch,
    )


def _make_whole_optimizer(transformation: optax.GradientTransformation, model: UserModel) -> WholeOptimizer:
    def to_tree(sections: Any) -> Any:
        return model.frontend.as_tree(model.flatten(sections))

    def from_tree(parameters: Any) -> Any:
        by_path = dict(tree.leaves_with_path(parameters))
        return model.nest([by_path[info.path] for info in model.frontend.parameters])

    return WholeOptimizer(transformation, to_tree, from_tree)


def _split_microbatches(example: Any, microbatches: int, placement: Placement) -> Any:
    """Return the batch as ShapeDtypeStructs [M, B, ...]."""
    rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(example)}
    if len(rows) != 1 or () in rows:
        raise InputError(
            f"example: its arrays begin with different dimensions ({', '.join(map(str, sorted(rows)))}), and the first "
            "one must be the rows of the batch in each"
        )
    ((size,),) = rows
    devices = placement.size(*BATCH_AXES)
    if size % (microbatches * devices):
        axes = " × ".join(f"mesh.{axis}={placement.size(axis)}" for axis in BATCH_AXES if placement.size(axis) > 1)
        over = " × ".join(filter(None, [f"training.accumulation={microbatches}" if microbatches > 1 else "", axes]))
        raise InputError(f"example: a batch of {size} rows is not divisible by {over}; change one of them")

    def split(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = (microbatches, size // microbatches, *jnp.shape(leaf)[1:])
        axes = tuple(axis for axis in BATCH_AXES if placement.size(axis) > 1)
        sharding = NamedSharding(placement.mesh, PartitionSpec(None, axes or None))
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding)

    return jax.tree.map(split, example)


class Engine:
    """A model under training. `initialize` makes it.

    Nothing is allocated before the first call of `step`, `evaluate`, `model`, `save` or `restore`.
    """

    def __init__(
        self, config: Config, frontend: Frontend, loss: Loss, example: Any, optimizer: Any, rules: Rules
    ) -> None:
        self.config = config
        self._frontend, self._loss, self._example = frontend, loss, example
        self._optimizer, self._rules = optimizer, rules
        self._state: TrainState | None = None

    @functools.cached_property
    def program(self) -> EngineProgram:
        """Program on the visible devices."""
        return self.make_program(make_mesh(self.config.mesh))

    def make_program(self, mesh: Any) -> EngineProgram:
        return make_engine_program(
            self.config, self._frontend, self._loss, self._example, self._optimizer, self._rules, mesh
        )

    @property
    def state(self) -> TrainState:
        if self._state is None:
            program = self.program

            def make_values() -> tuple[Any, Any]:
                parameters, variables = self._frontend.make()
                parameters = [leaf.astype(jnp.float32) for leaf in parameters]
                return program.model.nest(parameters), nest_variables(self._frontend, variables)

            self._state = training_state.initialize_state(
                program.specs, program.optimizers, self.config.run.seed, program.placement, make_values=make_values
            )
        return self._state

    def step(self, batch: Any) -> Metrics:
        """Train on one batch: arrays of the example's shapes. Return the metrics, which are on the device.

        The state is updated in place.
        """
        state, self._state = self.state, None  # donated: after an error it cannot be used again
        self._state, metrics = self.program.step(state, self.place(batch))
        return metrics

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return the mean loss and metrics over batches. Nothing is updated."""
        totals: Any = None
        for batch in batches:
            sums = jax.device_get(self.program.evaluation(self.state, batch=self.place(batch)))
            totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
        if totals is None:
            raise InputError("evaluate: there is no batch")
        total, count, metrics = totals
        return {"loss": float(total / count)} | {name: float(value / count) for name, value in metrics.items()}

    def place(self, batch: Any) -> Any:
        """Return a batch [rows, ...] as the step takes it: on the devices, [M, B, ...]."""

        def place_leaf(leaf: Any, target: jax.ShapeDtypeStruct) -> jax.Array:
            array = np.asarray(leaf).reshape(target.shape).astype(target.dtype)
            return jax.device_put(array, target.sharding)

        return jax.tree.map(place_leaf, batch, self.program.batch)

    def model(self) -> Any:
        """Return the user's model with the trained parameters: an NNX module, Linen's variables, or the pytree."""
        state, model = self.state, self.program.model
        variables = dict(tree.leaves_with_path(state.variables))
        return self._frontend.rebuild(
            model.flatten(state.masters), [variables[info.path] for info in self._frontend.variables]
        )

    def save(self, directory: str | Path) -> None:
        """Write a checkpoint of the state, with the hashes of its files."""
        program = self.program
        saved = {name: getattr(self.state, name) for name in training_state.checkpoint_specs(program.specs)}
        with Checkpoints(Path(directory) / "checkpoints", self.config.checkpoint) as checkpoints:
            checkpoints.save_last(int(self.state.step), saved, {})

    def restore(self, directory: str | Path) -> int:
        """Restore the newest intact checkpoint, which any mesh may have written. Return its step."""
        program = self.program
        with Checkpoints(Path(directory) / "checkpoints") as checkpoints:
            step = checkpoints.latest_verified_step()
            if step is None:
                raise InputError(f"{directory} has no checkpoint")
            abstract = abstract_checkpoint(training_state.checkpoint_specs(program.specs), program.placement)
            restored = checkpoints.restore(step, **abstract)
        self._state = training_state.resume_state(program.specs, step, program.placement, **restored)
        return step


def initialize(
    model: Any,
    loss: Loss,
    example: Any,
    config: Config | str | Path | None = None,
    optimizer: optax.GradientTransformation | OptimizerConfig | None = None,
    rules: Mapping[str, str | None] | None = None,
) -> Engine:
    """Return an engine that trains a model.

    Args:
        model: function without arguments that makes an NNX module or a pytree of arrays; or a Linen module.
        loss: (model, batch) -> mean loss, (sum, count), or one of them and a dict of metrics; scalars.
        example: a batch as arrays or `jax.ShapeDtypeStruct`s. The first dimension of each array are the rows.
        config: settings, or the path of a DeepSpeed configuration in JSON, whose mapping is printed; by default all
            visible devices divide the state (ZeRO-3).
        optimizer: optax transformation, or an OptimizerConfig; by default `config.optimizer`.
        rules: names of dimensions, as in `nnx.with_partitioning`, to the mesh axis `tensor`, or None.

    Raises:
        InputError: something does not fit together.
    """
    if isinstance(config, str | Path):
        config = _read_deepspeed(Path(config), example, optimizer)
    config = Config() if config is None else config
    if config.mesh.devices == 1:
        config = replace(config, mesh=replace(config.mesh, fsdp=len(visible_devices())))
    frontend = make_frontend(model, loss, example, config.run.seed)
    return Engine(config, frontend, loss, example, optimizer or config.optimizer, dict(rules or {}))


def _read_deepspeed(path: Path, example: Any, optimizer: Any) -> Config:
    """Return the settings of a DeepSpeed file. Print on process 0 what became of its keys."""
    read = deepspeed.read_file(path, len(visible_devices()))
    rows, found = read.config.training.batch_size, jnp.shape(jax.tree.leaves(example)[0])[0]
    if read.has("training.batch_size") and found != rows:
        raise InputError(
            f"example: it has {found} rows, and the batch sizes of {path.name} make {rows} for all devices and "
            "microbatches together; give a whole batch, or change the file"
        )
    mesh = read.config.mesh
    for key, size in {"pipeline.stages": mesh.pipeline, "sequence_parallel_size": mesh.context}.items():
        if size > 1:
            raise InputError(
                f"{path.name}: {key}={size}: only the decoder of this package has such an axis; remove it, or write a "
                "recipe of the decoder with jaxopt-llm import-config"
            )
    replaced = {"optimizer": "optimizer.name", "gradient_clipping": "optimizer.clip_norm"}
    if not isinstance(optimizer, OptimizerConfig):
        replaced["scheduler"] = "schedule.kind"
    names = [name for name, setting in replaced.items() if read.has(setting)]
    lines = [f"replaced by initialize(optimizer=...): {', '.join(names)}"] if optimizer is not None and names else []
    if jax.process_index() == 0:
        print("\n".join([*read.lines(), *lines]), file=sys.stderr)
    return read.config
