"""Models of training runs and of Hugging Face folders, for commands that use them without training."""

from collections.abc import Iterable
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
from jaxopt_llm.checkpoint.run_weights import is_run_directory
from jaxopt_llm.config import (
    Config,
    DataConfig,
    LoraConfig,
    PrecisionConfig,
    cli,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import errors, hub, json_files, tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.data.tokenizer_folder import VOCABULARY
from jaxopt_llm.execution.by_layer import split_layers
from jaxopt_llm.inference import card
from jaxopt_llm.inference.adapters import add_adapters, open_adapters, open_run_adapters
from jaxopt_llm.inference.devices import check_tensor, choose_local_grouped_matmul, count_bytes, make_placement
from jaxopt_llm.inference.exported import describe_training
from jaxopt_llm.inference.flags import OWN_FLAGS, Quantisation, Step
from jaxopt_llm.inference.steps import choose_trained_tree, use_checkpoint
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint, resting_parameter_sharding
from jaxopt_llm.run import initial_weights
from jaxopt_llm.run.directory import read_tokenizer_digest
from jaxopt_llm.run.initial_weights import find_frozen_base, open_frozen_base
from jaxopt_llm.step import lora

MAX_ROW_TOKENS = 2048  # of the rows that a model folder is evaluated on
FrozenAs = Literal["resting", "original", "absent"]


@dataclass(frozen=True)
class LoadedModel:
    """Model of a run's checkpoint or of a Hugging Face folder.

    Attributes:
        config: configuration of the run; for a folder, defaults.
        tokenizer: the tokenizer.
        model: the model.
        params: parameters by layer, in the compute dtype, or as quantisation codes.
        placement: shardings of `params`: one device, all devices over `fsdp`, or the requested number over `tensor`. If
            the devices do not have enough memory together, the layers rest in host memory.
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
    moved = replace_fields(config, {"model.pretrained": hub.absolute_name(base)})
    if find_frozen_base(directory, moved) is None:
        raise InputError(f"--base {base}: the checkpoints of {directory} hold all weights of the model; leave it out")
    return moved


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
    quantisation: Quantisation | None = None,
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
        quantisation: format of the weights of a folder; None for the folder's.

    Raises:
        InputError: the directory is neither, or `adapter`, `step`, `base` or `quantisation` does not match it.
        CheckpointError: the run has no usable checkpoint.
    """
    config, folder = _open_config_and_folder(directory, base)
    config = replace(config, data=data or config.data)
    adapters = None
    if folder and step is not None:
        raise InputError(f"--step {step}: {directory} is a model folder, which has no steps; leave it out")
    if quantisation:
        _check_quantisation(quantisation, directory, folder, adapter)
    if adapter is not None:
        if folder is None:
            adapters = open_run_adapters(adapter, directory, config)
        else:
            adapters, folder = open_adapters(adapter, folder)
            config = _use_adapter_tables(config, folder, adapters.path)
    if folder is None:
        find_frozen_base(directory, config)  # first, because a missing base folder often also had the tokenizer
    tokenizer = load_tokenizer(config.data)
    _check_vocabulary(tokenizer, config.model.vocabulary_size)
    check_tensor(tensor, config)
    restored, dtype = 0, config.precision.compute_dtype
    if folder is not None:
        with errors.own_flags(OWN_FLAGS):  # settings that stand for flags here
            model, params, placement = read_folder(folder, config.precision, tensor, attention, quantisation)
    else:
        _check_tokenizer(directory, tokenizer)
        model, params, placement, restored = restore_run(
            directory, config, dtype, tensor=tensor, attention=attention, step=step
        )
    if adapters is not None:
        model, params = add_adapters(model, params, placement, adapters, dtype)
    return LoadedModel(config, tokenizer, model, split_layers(params), placement, restored)


def _check_vocabulary(tokenizer: Tokenizer, size: int) -> None:
    """Raise InputError if a tokenizer has more tokens than a model's vocabulary of this size."""
    if tokenizer.vocabulary_size <= size:
        return
    beyond = [token for token, index in tokenizer.vocabulary.items() if index >= size][:4]
    raise InputError(
        f"data.tokenizer: the tokenizer has {tokenizer.vocabulary_size} tokens, more than the model's vocabulary "
        f"({size}): {', '.join(beyond)} ...; use the tokenizer that the model was trained with, or remove such "
        "tokens from tokenizer_config.json, special_tokens_map.json and added_tokens.json"
    )


def _use_adapter_tables(config: Config, folder: ModelFolder, adapter: Path) -> Config:
    """Return the configuration of a model with the whole weights that are saved with its adapters.

    If they have rows for more tokens, the tokenizer is the one next to them, unless another is given.
    """
    name, data = config.model.pretrained, config.data
    resized = folder.config.vocabulary_size != config.model.vocabulary_size
    if resized and data.tokenizer == name and (adapter / VOCABULARY).is_file():
        data = replace(data, tokenizer=str(adapter))
    return replace(config, model=replace(folder.config, pretrained=name), data=data)


def _check_quantisation(
    quantisation: Quantisation, directory: Path, folder: ModelFolder | None, adapter: Path | None
) -> None:
    name = f"--quantise {quantisation.base}"
    if folder is None:
        raise InputError(f"{name}: {directory} is a run, whose lora.base is the format of its weights; leave it out")
    if adapter is not None:
        raise InputError(f"{name} does not support --adapter {adapter}: leave one of them out")


def read_folder(
    folder: ModelFolder,
    precision: PrecisionConfig,
    tensor: int,
    attention: str = "xla",
    quantisation: Quantisation | None = None,
) -> tuple[Model, Params, Placement]:
    """Return the model of a Hugging Face folder, its parameters, and their placement.

    Parameters are in the compute dtype, except for the matrices of the blocks with a quantisation.

    Raises:
        InputError: the model does not support the quantisation.
    """
    threshold = quantisation.outlier_threshold if quantisation else 0.0
    if threshold:
        if folder.config.moe.experts:
            raise InputError(f"precision.outlier_threshold={threshold} does not support experts: leave it out")
        precision = replace(precision, matmul="int8", outlier_threshold=threshold)
    decoder = Decoder(folder.config, attention=attention, grouped_matmul=choose_local_grouped_matmul(precision))
    base = LoraConfig(base=quantisation.base if quantisation else "float")
    model, specs = lora.freeze_model(decoder, base, precision)
    placement = make_placement(count_bytes(specs), precision, tensor)
    return model, initial_weights.read_frozen(folder, specs, placement), placement


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
        frozen = initial_weights.with_stored_dtypes(base, frozen)
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
            rest = initial_weights.read_frozen(base, frozen, placement)
        elif jax.tree.leaves(frozen):
            rest = checkpoints.restore(step, frozen=abstract_checkpoint(frozen, placement))["frozen"]
        return tree.merge(trained_values, rest), step

    params, restored = use_checkpoint(directory, step, restore)
    resting = resting_parameter_sharding(trained if frozen_as == "absent" else model.specs, placement)
    return model, jax.device_put(params, resting), placement, restored


def find_origin(directory: Path, config: Config, step: int, title: str, notes: Iterable[str] = ()) -> Origin:
    """Return what a folder of a run's model keeps: the tokenizer and the template of the training, and a model card.

    Args:
        directory: the run directory.
        config: its configuration.
        step: step of the checkpoint.
        title: name of the model in its card.
        notes: sentences of the card about this folder.
    """
    source, text = pretrained.find_source_folder(config), card.describe_run(directory, config, step, title, notes)
    origin = describe_training(config.data, source, lambda folder: card.write(folder, text))
    if source is None and config.model.positions == "rotary":
        length = config.training.sequence_length
        origin = replace(origin, settings={**origin.settings, "max_position_embeddings": length})
    return origin


def _check_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Raise InputError if the tokenizer differs from the run's. A changed file would silently give other ids."""
    if read_tokenizer_digest(directory) != tokenizer.sha256:
        raise InputError(
            f"--checkpoint {directory}: the tokenizer, its BOS or its EOS differs from the run's: restore the "
            "tokenizer that the run was trained with"
        )
