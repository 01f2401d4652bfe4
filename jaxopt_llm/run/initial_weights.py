"""Initial weights that a run's own checkpoints do not hold: a pretrained model, an adapter, or a frozen base.

They are read into the parameters of a state, with adapters from a PEFT folder or from their initialiser.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.peft.adapter_folder import AdapterFolder
from jaxopt_llm.checkpoint.run_weights import AVERAGE, RunWeights, describe_average, find_trained_tree, is_run_directory
from jaxopt_llm.config import Config, ModelConfig, cli
from jaxopt_llm.core import hub, tree
from jaxopt_llm.core.errors import CheckpointError, InputError
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.linear.leaves import LoraWeight, QuantisedWeight
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import parameter_sharding
from jaxopt_llm.run.directory import read_base_digest, read_teacher_digest
from jaxopt_llm.step.program import Program
from jaxopt_llm.step.state import StateSpecs, state_shardings


@dataclass(frozen=True)
class InitialWeights:
    """Weights that a run reads in addition to its own checkpoints.

    Attributes:
        weights: for a new run, the pretrained model; for a resumed run, the frozen base that its checkpoints do not
            hold; None if there are none.
        adapter: adapter of `lora.pretrained`, for a new run.
        base_sha256: digest of the Hugging Face folder that the run started from; None if it started from no folder.
        teacher: the model that the run learns from, if any.
    """

    weights: ModelFolder | RunWeights | None
    adapter: AdapterFolder | None
    base_sha256: str | None
    teacher: ModelFolder | None = None


def open_initial_weights(
    config: Config, program: Program, start: int, say: Callable[[str], None], processes: Processes
) -> InitialWeights:
    """Open the weights that a run needs in addition to its own checkpoint of step `start` (0: no checkpoint).

    Args:
        say: see `open_pretrained`.

    Raises:
        InputError, CheckpointError: the weights cannot be used.
    """
    directory = Path(config.run.directory)
    teacher = open_teacher(config, start) if config.runs_teacher else None
    if start:
        needs_base = jax.tree.leaves(program.specs.frozen) and not program.specs.keep_frozen
        base = open_frozen_base(directory, config) if needs_base else None
        return InitialWeights(base, None, read_base_digest(directory), teacher)
    weights = open_pretrained(config, say, processes) if config.model.pretrained else None
    base = weights if isinstance(weights, ModelFolder) else None
    adapter = pretrained.open_pretrained_adapter(config) if config.lora.pretrained else None
    if adapter is not None:
        adapter.check_base(base)
        if adapter.whole:
            if base is None:
                raise InputError(
                    f"lora.pretrained={adapter.path}: it also has weights of the model itself (modules_to_save), which "
                    "need the Hugging Face folder of the model; name that with --model.pretrained"
                )
            weights = adapter.whole.replace_in(base, adapter.model)
    return InitialWeights(weights, adapter, base.sha256 if base else None, teacher)


def open_teacher(config: Config, start: int) -> ModelFolder:
    """Open the folder of `distillation.teacher`. start: see `open_initial_weights`.

    Raises:
        InputError: its weights differ from those with which the run started.
    """
    name, own = config.distillation.teacher, pretrained.make_teacher_config(config)
    folder = huggingface.open_model_folder(hub.find_folder(name, f"{pretrained.TEACHER}="), "", own.model.mtp_layers)
    if start and folder.sha256 != read_teacher_digest(Path(config.run.directory)):
        raise InputError(
            f"{pretrained.TEACHER}={name}: its weights differ from those that {config.run.directory} started with: "
            "restore the original weights, name their revision of a hub id, org/name@commit, or set another "
            "--run.directory"
        )
    return folder.for_model(own.model)


def open_pretrained(config: Config, say: Callable[[str], None], processes: Processes) -> ModelFolder | RunWeights:
    """Open the weights that `model.pretrained` names: a Hugging Face folder, or a run, whose last checkpoint is used.

    Args:
        say: receives one line for each damaged checkpoint of that run, one if an average is used, and lines about
            modules of multi-token prediction that are not trained.

    Raises:
        CheckpointError: the run has no usable checkpoint.
    """
    path = hub.find_folder(config.model.pretrained, "model.pretrained=")
    if not is_run_directory(path):
        folder = huggingface.open_model_folder(path, config.model.family, config.model.mtp_layers)
        for line in folder.describe_mtp():
            say(line)
        _say_new_scores(config, path, folder.config, say)
        return folder.for_model(config.model)
    with Checkpoints(path / "checkpoints", None, say, processes) as checkpoints:
        step = checkpoints.latest_verified_step()
    if step is None:
        raise CheckpointError(f"model.pretrained={path}: the run has no checkpoint; train it, or name another")
    if find_trained_tree(path / "checkpoints" / str(step)) == AVERAGE:
        say(describe_average(path, step))
    run_config = cli.load_run_config(path, "model.pretrained=")
    if config.model.mtp_layers > (modules := run_config.model.mtp_layers):
        raise InputError(huggingface.describe_fewer_modules(config.model, path, modules))
    if left := modules - config.model.mtp_layers:
        say(f"{path}: modules of multi-token prediction that are left out (model.mtp_layers): {left}")
    _say_new_scores(config, path, run_config.model, say)
    base = open_frozen_base(path, run_config) if run_config.training.trainable else None
    base = base and base.for_model(config.model)
    return RunWeights(path, path / "checkpoints" / str(step), run_config.model, config.model, base)


def _say_new_scores(config: Config, path: Path, stored: ModelConfig, say: Callable[[str], None]) -> None:
    if config.model.scores and not stored.scores:
        size = f"model.scores={config.model.scores} × {config.model.width} random weights"
        say(f"{path}: the model predicts tokens; its head is replaced by a new one of scores, {size}")


def find_frozen_base(directory: Path, config: Config) -> Path | None:
    """Return the folder with the frozen weights that a run's checkpoints do not hold; None: they hold all weights.

    Raises:
        InputError: the folder is missing.
    """
    trains_all = not config.lora.rank and not config.training.trainable
    if trains_all or read_base_digest(directory) is None:
        return None
    path = hub.find_folder(config.model.pretrained, "model.pretrained=")
    if not path.is_dir():
        raise InputError(
            f"model.pretrained={path}: the folder does not exist, but the checkpoints of {directory} do not hold its "
            "frozen weights: restore it, or name its new location with --base"
        )
    return path


def open_frozen_base(directory: Path, config: Config) -> ModelFolder | None:
    """Open the folder with the frozen weights that a run's checkpoints do not hold.

    Returns None if the checkpoints hold all weights.

    Raises:
        InputError: the folder is missing, or its weights differ from those that the run started from.
    """
    path = find_frozen_base(directory, config)
    if path is None:
        return None
    folder = huggingface.open_model_folder(path, config.model.family, config.model.mtp_layers)
    if folder.sha256 != read_base_digest(directory):
        raise InputError(
            f"model.pretrained={config.model.pretrained}: its weights differ from those that {directory} started from, "
            "and the checkpoints of that run hold only adapters: restore the original weights, or name their "
            "revision of a hub id, org/name@commit"
        )
    return folder.for_model(config.model)


class Weights(Protocol):
    """Parameters without adapters, addressed by our parameter paths: of a Hugging Face folder, or of a run."""

    def dtype(self, path: str) -> np.dtype:
        """Return the stored dtype of a parameter."""

    def read(self, path: str, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        """Read a parameter, or some layers of its stack, with the shape, layers and dtype of the spec."""


class ModelWeights(Weights, Protocol):
    """Parameters of a whole model."""

    def lacks(self, path: str) -> bool:
        """Return whether a parameter is new, and gets random values."""


def read_parameters(weights: ModelWeights, specs: StateSpecs, placement: Placement) -> Params:
    """Read the parameters of a state. None: those that are not in the weights, factors of adapters and new scores."""

    def read(path: tuple[object, ...], spec: tree.Leaf, sharding: tree.Leaf) -> tree.Leaf:
        name = tree.path_string(path)
        return None if weights.lacks(name) else read_leaf(weights, name, spec, sharding, placement)

    shardings = state_shardings(specs, placement)
    return jax.tree_util.tree_map_with_path(
        read,
        tree.merge(specs.masters, specs.frozen),
        tree.merge(shardings.masters, shardings.frozen),
        is_leaf=leaves.is_wrapped,
    )


def read_leaf(weights: Weights, path: str, spec: tree.Leaf, sharding: tree.Leaf, placement: Placement) -> tree.Leaf:
    """Read one parameter, quantised if its spec is. The factors of its adapter are None."""
    if isinstance(spec, LoraWeight):
        spec = replace(spec, lora_a=None, lora_b=None)
        sharding = replace(sharding, lora_a=None, lora_b=None)
        if spec.magnitude is None and isinstance(spec.base, ParamSpec):
            return replace(spec, base=weights.read(path, spec.base, sharding.base))
    if isinstance(spec, ParamSpec):
        return weights.read(path, spec, sharding)
    return _read_and_convert(weights, path, spec, sharding, placement)


def read_frozen(weights: ModelWeights, frozen: Params, placement: Placement) -> Params:
    """Read the frozen parameters of a state, which its checkpoints may leave out.

    Args:
        frozen: specs of the frozen parameters.
    """
    no_masters = jax.tree.map(lambda spec: None, frozen)
    return read_parameters(weights, StateSpecs(no_masters, {}, frozen, {}, {}), placement)


def with_stored_dtypes(weights: Weights, frozen: Params) -> Params:
    """Return the specs of frozen parameters with the dtypes in which the weights are stored.

    The dtypes of quantised weights do not change.
    """

    def replace_dtype(path: tuple[object, ...], spec: tree.Leaf) -> tree.Leaf:
        if isinstance(spec, LoraWeight):
            return replace(spec, base=replace_dtype(path, spec.base))
        return replace(spec, dtype=weights.dtype(tree.path_string(path))) if isinstance(spec, ParamSpec) else spec

    return jax.tree_util.tree_map_with_path(replace_dtype, frozen, is_leaf=leaves.is_wrapped)


def add_adapter(given: Params | None, adapter: AdapterFolder, specs: StateSpecs, placement: Placement) -> Params:
    """Return the given parameters with the adapters of a PEFT folder."""
    adapters = leaves.adapter_paths(specs.masters)

    def read_leaf(path: str, spec: ParamSpec, sharding: NamedSharding) -> jax.Array | None:
        return adapter.read(path, spec, sharding) if path in adapters else None

    masters = tree.map_with_path(read_leaf, specs.masters, state_shardings(specs, placement).masters)
    return masters if given is None else tree.merge(masters, given)


def _read_and_convert(
    weights: Weights, path: str, spec: QuantisedWeight | LoraWeight, sharding: tree.Leaf, placement: Placement
) -> tree.Leaf:
    """Read and convert a stack one slot at a time; in a pipeline all stages convert their layer at the same time.

    In addition to the result, a device then holds one layer of the stack in its stored dtype, or a parameter that is
    not stacked.
    """
    base = spec.base if isinstance(spec, LoraWeight) else spec
    unwrapped = leaves.unwrap_specs(spec)
    # Quantisation starts from the stored dtype, which is often the narrower one.
    dtype = weights.dtype(path) if isinstance(base, QuantisedWeight) else base.dtype
    if not unwrapped.leading:
        whole = replace(unwrapped, dtype=dtype)
        array = weights.read(path, whole, parameter_sharding(whole, placement))
        return jax.jit(functools.partial(leaves.make_leaf, spec), out_shardings=sharding)(array)
    axis = unwrapped.leading - 1

    def with_slot(stack: tree.Leaf, row: jax.Array, slot: jax.Array) -> tree.Leaf:
        new = offload.store_like(leaves.make_leaf(spec, row), stack)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot, axis), stack, new)

    write_slot = jax.jit(with_slot, donate_argnums=0, out_shardings=sharding)
    stack = jax.tree.map(_zeros, spec, sharding)
    layers = np.asarray(unwrapped.layers)
    for slot in range(layers.shape[axis]):
        slot_spec = replace(unwrapped.unstack().stack(layers[..., slot : slot + 1]), dtype=dtype)
        row = weights.read(path, slot_spec, parameter_sharding(slot_spec, placement))
        stack = jax.block_until_ready(write_slot(stack, row, slot))
    return stack


def _zeros(spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
    """Return zeros made in host memory, where they cost nothing: an offloaded stack need not fit on the device."""

    def make_shard(index: Any) -> np.ndarray:
        return np.zeros([len(range(size)[part]) for size, part in zip(spec.shape, index, strict=True)], spec.dtype)

    return jax.make_array_from_callback(spec.shape, sharding, make_shard)
