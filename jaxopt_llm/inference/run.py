"""Models of training runs and of Hugging Face folders, for commands that use them without training."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder
from jaxopt_llm.checkpoint.huggingface.model_writer import Origin
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.peft import adapter_config
from jaxopt_llm.checkpoint.peft.adapter_folder import AdapterFolder
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
from jaxopt_llm.core import hub, json_files, tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.inference.flags import Step
from jaxopt_llm.inference.steps import choose_trained_tree, use_checkpoint
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.mesh import make_mesh, visible_devices
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint, resting_parameter_sharding
from jaxopt_llm.training import lora, pretrained_weights, shapes
from jaxopt_llm.training.initial_weights import find_frozen_base, open_frozen_base, read_tokenizer_digest

MAX_ROW_TOKENS = 2048  # of the rows that a model folder is evaluated on
FrozenAs = Literal["resting", "original", "absent"]


@dataclass(frozen=True)
class LoadedModel:
    """Model of a run's checkpoint or of a Hugging Face folder.

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
    _check_is_no_step(directory)
    return cli.load_run_config(directory, "--checkpoint ")


def _check_is_no_step(directory: Path) -> None:
    """Raise InputError for the directory of one checkpoint of a run."""
    if directory.name.isdecimal() and directory.parent.name == "checkpoints":
        remedy = f"name the run with --checkpoint {directory.parent.parent} --step {directory.name}"
        raise InputError(f"--checkpoint {directory}: this is one checkpoint of a run; {remedy}")


def move_base(directory: Path, config: Config, base: Path | None) -> Config:
    """Return the configuration of a run with the new location of its base; None: the location has not changed.

    Raises:
        InputError: there is no such folder, or the run's checkpoints hold all weights.
    """
    if base is None:
        return config
    name, old = hub.absolute_name(base), config.model.pretrained
    moved = replace_fields(config, {"model.pretrained": name})
    if find_frozen_base(directory, moved) is None:
        raise InputError(f"--base {base}: the checkpoints of {directory} hold all weights of the model; leave it out")
    return replace_fields(moved, {"data.tokenizer": name}) if config.data.tokenizer == old else moved


def is_model_folder(directory: Path) -> bool:
    """Return whether this is a Hugging Face model folder. A run directory also has a file config.json."""
    if is_run_directory(directory):
        return False
    try:
        settings = json_files.parse(json_files.read_bytes(directory / huggingface.CONFIG_FILE))
    except (OSError, ValueError):
        return False  # loading it as a run reports the problem
    return isinstance(settings, dict) and "model_type" in settings


def open_config(directory: Path, base: Path | None = None) -> Config:
    """Load the configuration of a run directory, or that of a Hugging Face folder, completed with defaults.

    Raises InputError if the directory is neither. base: see `move_base`.
    """
    return _open_config_and_folder(directory, base)[0]


def _open_config_and_folder(directory: Path, base: Path | None) -> tuple[Config, ModelFolder | None]:
    name, directory = hub.absolute_name(directory), hub.find_folder(directory, "--checkpoint ")
    if is_model_folder(directory):
        if base is not None:
            raise InputError(f"--base {base}: {directory} is a model folder, which has no other base; leave it out")
        folder = huggingface.open_model_folder(directory)
        return make_folder_config(folder, name, directory, name), folder
    _check_is_no_step(directory)
    try:
        config = cli.load_run_config(directory, "--checkpoint ")
    except InputError as error:
        if (directory / adapter_config.FILE).is_file():
            raise InputError(
                f"--checkpoint {directory}: this is a PEFT folder of adapters; name it with --adapter, and its base "
                "model with --checkpoint"
            ) from error
        raise InputError(f"{error}, nor a Hugging Face model folder") from error
    return move_base(directory, config, base), None


def make_folder_config(folder: ModelFolder, name: str, directory: Path, tokenizer: str) -> Config:
    """Return the configuration of a run that starts from a Hugging Face folder: its dtype, and rows of its context.

    name: absolute path or hub id of the folder.
    """
    context = huggingface.read_context(folder.path)
    length = min(MAX_ROW_TOKENS, context or MAX_ROW_TOKENS)
    rows = max(Config().training.batch_size * Config().training.sequence_length // length, 1)  # as many tokens at once
    dtype = str(folder.dtype("non_layer/embedding/table"))
    model = replace(folder.config, pretrained=name)
    settings: dict[str, Any] = {
        "run.directory": str(directory),
        "data.tokenizer": tokenizer,
        "precision.compute_dtype": dtype,
    }
    settings |= {"training.sequence_length": length, "training.batch_size": rows}
    return replace_fields(Config(model=model), settings)


def load_model(
    directory: Path,
    data: DataConfig | None = None,
    tensor: int = 1,
    attention: str = "xla",
    adapter: Path | None = None,
    step: Step = None,
    base: Path | None = None,
) -> LoadedModel:
    """Load the model of a run directory or of a Hugging Face folder.

    Args:
        directory: the run directory or folder.
        data: settings that name the tokenizer and its chat template; None for those of the run.
        tensor: number of devices that every weight is split over.
        attention: attention implementation for calls without a cache.
        adapter: PEFT folder with LoRA adapters of the model; None for no adapters.
        step: checkpoint of the run.
        base: new location of the base of the run's adapters; None: unchanged.

    Raises:
        InputError: the directory is neither, or `adapter`, `step` or `base` does not match it.
        CheckpointError: the run has no usable checkpoint.
    """
    config, folder = _open_config_and_folder(directory, base)
    config = replace(config, data=data or config.data)
    adapters = None
    if folder and step is not None:
        raise InputError(f"--step {step}: {directory} is a model folder, which has no steps; leave it out")
    if adapter is not None:
        adapters = open_adapters(adapter, folder) if folder else open_run_adapters(adapter, directory, config)
    if folder is None:
        find_frozen_base(directory, config)  # first, because a missing base folder often also had the tokenizer
    tokenizer = load_tokenizer(config.data)
    if tokenizer.vocabulary_size > config.model.vocabulary_size:
        raise InputError(
            f"data.tokenizer: the tokenizer has {tokenizer.vocabulary_size} tokens, more than the model's vocabulary "
            f"({config.model.vocabulary_size}); use the tokenizer that the model was trained with"
        )
    _check_tensor(tensor, config)
    restored, dtype = 0, config.precision.compute_dtype
    if folder is not None:
        model, params, placement = read_folder(folder, config.precision, tensor, attention)
    else:
        _check_tokenizer(directory, tokenizer)
        model, params, placement, restored = restore_run(
            directory, config, dtype, tensor=tensor, attention=attention, step=step
        )
    if adapters is not None:
        model, params = add_adapters(model, params, placement, adapters, dtype)
    return LoadedModel(config, tokenizer, model, params, placement, restored)


def open_adapters(path: Path, folder: ModelFolder) -> AdapterFolder:
    """Open a PEFT folder with adapters of the model of a Hugging Face folder.

    Raises:
        InputError: the adapters do not belong to the model.
    """
    path = hub.find_folder(path, "--adapter ")
    adapters = pretrained.open_adapter(path, folder.family, folder.config, "--adapter ")
    adapters.check_base(folder)
    _warn_of_other_base(path, folder.path)
    return adapters


def open_run_adapters(path: Path, directory: Path, config: Config) -> AdapterFolder:
    """Open a PEFT folder with adapters of the model of a run.

    Raises:
        InputError: the adapters do not belong to the model, or the run has adapters already.
    """
    if config.lora.rank:
        raise InputError(
            f"--adapter {path}: the run {directory} has adapters already; leave out --adapter, or merge them first "
            f"(python -m jaxopt_llm.convert merge --checkpoint {directory} --to FOLDER) and give --checkpoint FOLDER"
        )
    family = huggingface.choose_family(config.model, pretrained.find_source_folder(config))
    path = hub.find_folder(path, "--adapter ")
    adapters = pretrained.open_adapter(path, family, config.model, "--adapter ")
    adapters.check_base(None)
    _warn_of_other_base(path, directory)
    return adapters


def _warn_of_other_base(adapter: Path, model: Path) -> None:
    if warning := adapter_config.describe_other_base(adapter, str(model.absolute())):
        print(f"warning: {warning}", file=sys.stderr)


def add_adapters(
    model: Model, params: Params, placement: Placement, adapters: AdapterFolder, dtype: str
) -> tuple[Model, Params]:
    """Return a model and its parameters with the adapters of a PEFT folder, read in `dtype`."""
    specs = adapters.add_to_specs(model.specs)
    held = dict(tree.leaves_with_path(params))

    def find_or_read(path: str, spec: ParamSpec) -> jax.Array:
        if not leaves.is_adapter(path):
            return held[path.removesuffix("/base")]
        spec = replace(spec, dtype=jnp.dtype(dtype))
        return adapters.read(path, spec, resting_parameter_sharding(spec, placement))

    return model.with_specs(specs), tree.map_with_path(find_or_read, specs)


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
    precision: PrecisionConfig | None = None,
    step: Step = None,
) -> tuple[Model, Params, Placement, int]:
    """Restore the parameters of a run's checkpoint; of those that were trained their average, if it has one.

    Args:
        directory: the run directory.
        config: its configuration.
        dtype: dtype of the trained parameters.
        frozen_as: representation of the frozen parameters. resting: as in training, in the compute dtype or as
            quantisation codes; original: the same, but parameters that are not quantised have the dtype of the folder
            that they are read from; absent: None in place of each parameter.
        tensor: number of devices that every weight is split over.
        attention: attention implementation for calls without a cache.
        precision: precision of the computations; None for that in which the run is evaluated.
        step: the checkpoint.

    Returns:
        The model, its parameters, their placement, and the step of the checkpoint.

    Raises:
        InputError: the run has no such checkpoint.
        CheckpointError: the run has no usable checkpoint.
    """
    precision = precision or config.precision.for_evaluation()
    products = choose_local_grouped_matmul(precision)
    decoder = Decoder(config.model, config.training.logit_tokens, attention=attention, grouped_matmul=products)
    model, trained, frozen = lora.adapt_model(decoder, config.lora, config.precision, config.training.trainable)
    base = None
    if frozen_as == "absent":
        frozen = jax.tree.map(lambda spec: None, frozen)
    elif jax.tree.leaves(frozen) and (base := open_frozen_base(directory, config)) and frozen_as == "original":
        frozen = pretrained_weights.with_stored_dtypes(base, frozen)
    needed = count_bytes(trained, dtype) + count_bytes(frozen)
    placement = make_placement(needed, precision, tensor)

    def restore(checkpoints: Checkpoints, step: int) -> tuple[Params, int]:
        # Training reads its master weights in these dtypes too.
        dtypes = jax.tree.map(lambda spec: spec.dtype if spec.exact else jnp.dtype(dtype), trained)
        saved = abstract_checkpoint(trained, placement)
        name = choose_trained_tree(directory, step)
        trained_values = checkpoints.restore(step, {name: dtypes}, **{name: saved})[name]
        rest = frozen
        if base is not None:
            rest = pretrained_weights.read_frozen(base, frozen, placement)
        elif jax.tree.leaves(frozen):
            rest = checkpoints.restore(step, frozen=abstract_checkpoint(frozen, placement))["frozen"]
        return tree.merge(trained_values, rest), step

    params, restored = use_checkpoint(directory, step, restore)
    resting = resting_parameter_sharding(trained if frozen_as == "absent" else model.specs, placement)
    return model, jax.device_put(params, resting), placement, restored


def find_origin(config: Config) -> Origin:
    """Return what a folder of a run's model keeps of the folder that the run started from and of its tokenizer."""
    source = pretrained.find_source_folder(config)
    settings: dict[str, Any] = {}
    if source is None:
        tokenizer = load_tokenizer(config.data)
        settings = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
        if config.model.positions == "rotary":
            settings["max_position_embeddings"] = config.training.sequence_length
    name = config.data.tokenizer
    tokenizer_path = None if config.data.uses_bytes else hub.find_folder(name, "data.tokenizer=", weights=False)
    return Origin(source, tokenizer_path, settings)


def _check_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Raise InputError if the tokenizer differs from the run's. A changed file would silently give other ids."""
    if read_tokenizer_digest(directory) != tokenizer.sha256:
        raise InputError(
            f"--checkpoint {directory}: the tokenizer, its BOS or its EOS differs from the run's: restore the "
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
