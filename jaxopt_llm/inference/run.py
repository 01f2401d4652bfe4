"""Models of training runs and of Hugging Face folders, for commands that use them without training."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.run_weights import is_run_directory
from jaxopt_llm.compiler.kernel_choice import choose_grouped_matmul
from jaxopt_llm.config import (
    Config,
    DataConfig,
    MeshConfig,
    OffloadConfig,
    PrecisionConfig,
    ShardingConfig,
    cli,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import CheckpointError, InputError
from jaxopt_llm.data.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.mesh import make_mesh, visible_devices
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint, resting_parameter_sharding
from jaxopt_llm.training import lora, pretrained_weights, shapes
from jaxopt_llm.training.initial_weights import open_frozen_base, read_tokenizer_digest

FrozenAs = Literal["resting", "original", "absent"]


@dataclass(frozen=True)
class LoadedModel:
    """Model of a run's last checkpoint or of a Hugging Face folder.

    Attributes:
        config: configuration of the run; for a folder, defaults.
        tokenizer: the tokenizer.
        model: the model.
        params: parameters in the compute dtype.
        placement: shardings of `params`: one device, all devices over `fsdp`, or the requested number over `tensor`. If
            the devices do not have enough memory together, the stacks rest in host memory.
        step: step of the checkpoint; 0 for a folder.
    """

    config: Config
    tokenizer: Tokenizer
    model: Model
    params: Params
    placement: Placement
    step: int


def load_config(directory: Path) -> Config:
    """Load the configuration of a run directory. Raises InputError if it is not one."""
    return cli.load_run_config(directory, "--checkpoint ")


def _is_folder(directory: Path) -> bool:
    """Return whether this is a Hugging Face folder. A run directory also has a file config.json."""
    if is_run_directory(directory):
        return False
    try:
        settings = json.loads((directory / huggingface.CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # loading it as a run reports the problem
    return isinstance(settings, dict) and "model_type" in settings


def open_config(directory: Path) -> Config:
    """Load the configuration of a run directory, or that of a Hugging Face folder, completed with defaults.

    Raises InputError if the directory is neither.
    """
    return _open_config_and_folder(directory)[0]


def _open_config_and_folder(directory: Path) -> tuple[Config, ModelFolder | None]:
    if _is_folder(directory):
        folder = huggingface.open_model_folder(directory)
        return make_folder_config(folder, directory, str(directory.absolute())), folder
    try:
        return load_config(directory), None
    except InputError as error:
        raise InputError(f"{error}, nor a Hugging Face model folder") from error


def make_folder_config(folder: ModelFolder, directory: Path, tokenizer: str) -> Config:
    """Return the configuration of a run that starts from a Hugging Face folder, with its dtype as compute dtype."""
    dtype = str(folder.dtype("non_layer/embedding/table"))
    model = replace(folder.config, pretrained=str(folder.path.absolute()))
    settings = {"run.directory": str(directory), "data.tokenizer": tokenizer, "precision.compute_dtype": dtype}
    return replace_fields(Config(model=model), settings)


def load_model(directory: Path, data: DataConfig | None = None, tensor: int = 1, attention: str = "xla") -> LoadedModel:
    """Load the model of a run directory or of a Hugging Face folder.

    Args:
        directory: the run directory or folder.
        data: settings that name the tokenizer; None for those of the run.
        tensor: number of devices that every weight is split over.
        attention: attention implementation for calls without a cache.

    Raises:
        InputError: the directory is neither.
        CheckpointError: the run has no usable checkpoint.
    """
    config, folder = _open_config_and_folder(directory)
    tokenizer = load_tokenizer(data or config.data)
    if tokenizer.vocabulary_size > config.model.vocabulary_size:
        raise InputError(
            f"data.tokenizer: the tokenizer has {tokenizer.vocabulary_size} tokens, more than the model's vocabulary "
            f"({config.model.vocabulary_size}); use the tokenizer that the model was trained with"
        )
    _check_tensor(tensor, config)
    if folder is not None:
        return LoadedModel(config, tokenizer, *read_folder(folder, config.precision, tensor, attention), step=0)
    _check_tokenizer(directory, tokenizer)
    restored = restore_run(directory, config, config.precision.compute_dtype, tensor=tensor, attention=attention)
    return LoadedModel(config, tokenizer, *restored)


def read_folder(
    folder: ModelFolder, precision: PrecisionConfig, tensor: int, attention: str = "xla"
) -> tuple[Model, Params, Placement]:
    """Return the model of a Hugging Face folder, its parameters in the compute dtype, and their placement."""
    model = Decoder(folder.config, attention=attention, grouped_matmul=choose_local_grouped_matmul(precision))
    placement = make_placement(count_bytes(model.specs, precision.compute_dtype), precision, tensor)

    def read(path: str, spec: ParamSpec) -> jax.Array:
        spec = replace(spec, dtype=jnp.dtype(precision.for_param(spec).compute_dtype))
        return folder.read(path, spec, resting_parameter_sharding(spec, placement))

    return model, tree.map_with_path(read, model.specs), placement


def restore_run(
    directory: Path,
    config: Config,
    dtype: str,
    frozen_as: FrozenAs = "resting",
    tensor: int = 1,
    attention: str = "xla",
) -> tuple[Model, Params, Placement, int]:
    """Restore the parameters of a run's last checkpoint.

    Args:
        directory: the run directory.
        config: its configuration.
        dtype: dtype of the trained parameters.
        frozen_as: representation of the frozen parameters. resting: as in training, in the compute dtype or as
            quantisation codes; original: the same, but parameters that are not quantised have the dtype of the folder
            that they are read from; absent: None in place of each parameter.
        tensor: number of devices that every weight is split over.
        attention: attention implementation for calls without a cache.

    Returns:
        The model, its parameters, their placement, and the step of the checkpoint.

    Raises:
        CheckpointError: the run has no usable checkpoint.
    """
    products = choose_local_grouped_matmul(config.precision)
    decoder = Decoder(config.model, config.training.loss_chunk, attention=attention, grouped_matmul=products)
    model, trained, frozen = lora.adapt_model(decoder, config.lora, config.precision, config.training.trainable)
    base = None
    if frozen_as == "absent":
        frozen = jax.tree.map(lambda spec: None, frozen)
    elif jax.tree.leaves(frozen) and (base := open_frozen_base(directory, config)) and frozen_as == "original":
        frozen = pretrained_weights.with_stored_dtypes(base, frozen)
    needed = count_bytes(trained, dtype) + count_bytes(frozen)
    placement = make_placement(needed, config.precision.for_evaluation(), tensor)
    with Checkpoints(directory / "checkpoints") as checkpoints:
        while True:
            step = checkpoints.latest_verified_step()
            if step is None:
                raise CheckpointError(f"--checkpoint {directory}: the run has no checkpoint yet; train it first")
            try:
                # Training reads its master weights in these dtypes too.
                dtypes = jax.tree.map(lambda spec: spec.dtype if spec.exact else jnp.dtype(dtype), trained)
                saved = abstract_checkpoint(trained, placement)
                params = checkpoints.restore(step, {"masters": dtypes}, masters=saved)["masters"]
                if base is not None:
                    frozen = pretrained_weights.read_frozen(base, frozen, placement)
                elif jax.tree.leaves(frozen):
                    frozen = checkpoints.restore(step, frozen=abstract_checkpoint(frozen, placement))["frozen"]
                break
            except CheckpointError:
                if (directory / "checkpoints" / str(step)).exists():
                    raise  # otherwise the run is in progress, wrote a newer checkpoint and deleted this one
    resting = resting_parameter_sharding(trained if frozen_as == "absent" else model.specs, placement)
    params = jax.device_put(tree.merge(params, frozen), resting)
    return model, params, placement, step


def _check_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Raise InputError if the tokenizer differs from the run's. A changed file would silently give other ids."""
    if read_tokenizer_digest(directory) != tokenizer.sha256:
        raise InputError(
            f"--checkpoint {directory}: data.tokenizer, data.bos or data.eos differs from the run's: restore the "
            "tokenizer that the run was trained with"
        )


def _check_tensor(tensor: int, config: Config) -> None:
    count = len(visible_devices())
    valid = [n for n in range(1, count + 1) if not count % n and not shapes.tensor_problems(config.model, 1, False, n)]
    if tensor not in valid:
        raise InputError(
            f"--tensor {tensor}: must divide the number of devices ({count}) and the model's heads and MLP width; "
            f"choose one of {', '.join(map(str, valid))}"
        )


def choose_local_grouped_matmul(precision: PrecisionConfig) -> str:
    """Return the grouped matmul implementation for this machine, independent of the run's choice."""
    return choose_grouped_matmul(visible_devices()[0], "auto", precision.compute_dtype)


def make_placement(needed: int, precision: PrecisionConfig, tensor: int = 1) -> Placement:
    """Return a placement for `needed` bytes of parameters that are used without training."""
    devices = visible_devices()
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    chosen = choose_devices(needed, devices, limit, tensor)
    return Placement(
        make_mesh(MeshConfig(fsdp=len(chosen) // tensor, tensor=tensor), chosen),
        ShardingConfig(zero_stage=3),
        precision,
        OffloadConfig(parameters=not fits_in_memory(needed, chosen, limit)),
    )


def choose_devices(
    needed: int, devices: Sequence[jax.Device], limit: int | None, tensor: int = 1
) -> Sequence[jax.Device]:
    """Return the first `tensor` devices if `needed` bytes of parameters fit there; otherwise all devices."""
    return devices[:tensor] if fits_in_memory(needed, devices[:tensor], limit) else devices


def fits_in_memory(needed: int, devices: Sequence[jax.Device], limit: int | None) -> bool:
    """Return whether `needed` bytes of parameters, split over devices, leave a quarter of their memory free.

    limit: memory of one device in bytes; None if the device has no limit. The free quarter is for activations and the
        cache.
    """
    return limit is None or needed <= 0.75 * limit * len(devices)


def count_bytes(leaves: tree.Tree, dtype: str | None = None) -> int:
    """Return the number of bytes of specs, in `dtype` or in their own dtypes."""
    return sum(math.prod(leaf.shape) * jnp.dtype(dtype or leaf.dtype).itemsize for leaf in jax.tree.leaves(leaves))
