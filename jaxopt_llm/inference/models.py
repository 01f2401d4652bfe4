"""Models of training runs and of Hugging Face folders, for use without training.

It chooses the devices and what runs on them, and the checkpoint of a run, adds adapters in PEFT's format, and loads the
weights, or opens them to be written without being loaded (`checkpoint/run_weights.py`).
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.family import describe_label_names
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder, Origin, collect_leaves
from jaxopt_llm.checkpoint.native import step_directories
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.peft import adapter_config
from jaxopt_llm.checkpoint.peft.adapter_folder import AdapterFolder
from jaxopt_llm.checkpoint.run_weights import (
    AVERAGE,
    RunWeights,
    StoredLayers,
    describe_average,
    find_trained_tree,
    is_run_directory,
    refuse_option,
)
from jaxopt_llm.compiler.kernel_choice import choose_attention, choose_grouped_matmul
from jaxopt_llm.config import (
    Config,
    DataConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OffloadConfig,
    PrecisionConfig,
    ShardingConfig,
    cli,
    fields,
)
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import errors, hub, json_files, tree
from jaxopt_llm.core.errors import CheckpointError, InputError
from jaxopt_llm.data.tokens.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.data.tokens.tokenizer_folder import VOCABULARY
from jaxopt_llm.execution.by_layer import gather_rows, split_layers
from jaxopt_llm.inference import card
from jaxopt_llm.inference.exported import describe_training
from jaxopt_llm.inference.flags import OWN_FLAGS, Quantisation, Step
from jaxopt_llm.model import decoder_specs
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.model.self_attention import describe_call
from jaxopt_llm.parallel.mesh import make_mesh, visible_devices
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import abstract_checkpoint, resting_parameter_sharding
from jaxopt_llm.run import initial_weights
from jaxopt_llm.run.directory import read_tokenizer_digest
from jaxopt_llm.run.initial_weights import find_frozen_base, open_frozen_base
from jaxopt_llm.step import lora
from jaxopt_llm.step.validation import tensor_problems

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


def open_config(directory: Path, base: Path | None = None, family: str = "") -> Config:
    """Load the configuration of a run directory, or of a Hugging Face folder, completed with defaults.

    Raises InputError if the directory is neither. base: see `move_base`. family: see `ModelConfig.family`.
    """
    return _open_config_and_folder(directory, base, family)[0]


@errors.own_flags(OWN_FLAGS)
def _open_config_and_folder(directory: Path, base: Path | None, family: str) -> tuple[Config, ModelFolder | None]:
    name, directory = hub.absolute_name(directory), hub.find_folder(directory, "--checkpoint ")
    if is_model_folder(directory):
        refuse_option("--base ", base, directory)
        folder = huggingface.open_model_folder(directory, family)
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
    refuse_option("--family ", family, directory)
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
    family: str = "",
    predicts_tokens: bool = True,
) -> LoadedModel:
    """Load the model of a run directory or of a Hugging Face folder.

    Args:
        directory: the run directory or folder.
        data: settings that name the tokenizer and its chat template; None for the settings of the run.
        tensor: number of devices that every weight is split over.
        attention: attention implementation for calls without a cache.
        adapter: PEFT folder with LoRA adapters of the model; None for no adapters.
        step: checkpoint of the run.
        base: new location of the base of the run's adapters; None: unchanged.
        quantisation: format of the weights of a folder; None for the folder's.
        family: see `ModelConfig.family`.
        predicts_tokens: refuse a model that gives documents scores.

    Raises:
        InputError: the directory is neither, or `adapter`, `step`, `base`, `quantisation` or `family` does not match
            it.
        CheckpointError: the run has no usable checkpoint.
    """
    config, folder = _open_config_and_folder(directory, base, family)
    if predicts_tokens:
        pretrained.check_predicts_tokens(config.model, f"--checkpoint {directory}")
    config = replace(config, data=data or config.data)
    adapters = None
    if folder:
        refuse_option("--step ", step, directory)
    if quantisation:
        _check_quantisation(quantisation, directory, folder, adapter)
    if adapter is not None:
        adapters, folder = _open_adapters(adapter, directory, config, folder)
        config = _use_adapter_tables(config, folder, adapters.path) if folder else config
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


def read_data_settings(arguments: argparse.Namespace) -> DataConfig | None:
    """Return the tokenizer and the chat template that a command's flags name; None: those of the model."""
    given: dict[str, Any] = {
        name: value for name in ("tokenizer", "chat_template") if (value := getattr(arguments, name))
    }
    if arguments.template_arguments:
        given["template_arguments"] = tuple(arguments.template_arguments)
    if not given:
        return None
    return replace(open_config(arguments.checkpoint, arguments.base, arguments.family).data, **given)


def adapt_loaded(source: LoadedModel, directory: Path, adapter: Path, family: str = "") -> LoadedModel:
    """Return a loaded model with LoRA adapters. Both share the arrays of the model.

    Args:
        source: the model.
        directory, family: what it was loaded from; see `load_model`.
        adapter: PEFT folder with the adapters.

    Raises:
        InputError: the adapters do not belong to the model, or also have whole weights of it.
    """
    _, folder = _open_config_and_folder(directory, None, family)
    adapters, _ = _open_adapters(adapter, directory, source.config, folder)
    if adapters.whole:
        raise InputError(
            f"--adapter {adapter}: it also has weights of the model itself (modules_to_save, trainable_token_indices), "
            f"which cannot be shared; merge it (python -m jaxopt_llm.convert merge --base {directory} --adapter "
            f"{adapter} --to FOLDER), and name that folder with --checkpoint"
        )
    rows, dtype = gather_rows(source.params), source.config.precision.compute_dtype
    model, params = add_adapters(source.model, rows, source.placement, adapters, dtype)
    return replace(source, model=model, params=split_layers(params))


def reload_loaded(source: LoadedModel, folder: Path, family: str = "") -> LoadedModel:
    """Return a loaded model with other weights, those of a Hugging Face folder. family: see `ModelConfig.family`.

    Raises:
        InputError: the folder is of another model.
    """
    opened = huggingface.open_model_folder(folder, family)
    model, params, _ = read_folder(opened, source.config.precision, source.placement.size("tensor"))
    if model.specs != source.model.specs:
        raise InputError(f"{folder}: it holds another model than the one that is served; name weights of that one")
    return replace(source, params=split_layers(params))


def _open_adapters(
    adapter: Path, directory: Path, config: Config, folder: ModelFolder | None
) -> tuple[AdapterFolder, ModelFolder | None]:
    """Open adapters of a run or of a folder. Return them, and the folder with the whole weights next to them."""
    return (open_run_adapters(adapter, directory, config), None) if folder is None else open_adapters(adapter, folder)


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
    products = choose_local_grouped_matmul(precision)
    decoder = Decoder(folder.config, Config().training.logit_tokens, attention=attention, grouped_matmul=products)
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
    """Return the files that a folder of a run's model keeps: tokenizer and template of the training, and a model card.

    Args:
        directory: the run directory.
        config: its configuration.
        step: step of the checkpoint.
        title: name of the model in its card.
        notes: sentences of the card about this folder.
    """
    source, text = pretrained.find_source_folder(config), card.describe_run(directory, config, step, title, notes)
    origin = describe_training(config.data, source, lambda folder: card.write(folder, text))
    if names := config.data.label_names:
        origin = replace(origin, settings={**origin.settings, **describe_label_names(names)})
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


def check_tensor(tensor: int, config: Config) -> None:
    """Raise InputError if the weights of the model cannot be split over this number of devices."""
    count = len(visible_devices())
    valid = [n for n in range(1, count + 1) if not count % n and not tensor_problems(config.model, 1, False, n)]
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


def choose_local_attention(config: Config, length: int) -> str:
    """Return the implementation of attention for rows of this length, and say why if a faster one was refused.

    It is not the one that a run used, because this may be another machine.
    """
    call = describe_call(config.model, config.precision.compute_dtype, length, None, parts=1)
    attention = choose_attention(visible_devices()[0], "auto", call)
    if attention.reason:
        print(f"attention: {attention}", file=sys.stderr)
    return attention.name


def use_all_devices(source: LoadedModel) -> LoadedModel:
    """Return a model that rests on one device with a copy on each of the others, which read other rows."""
    devices = visible_devices()
    if source.placement.mesh.size == len(devices):
        return source
    placement = replace(source.placement, mesh=make_mesh(MeshConfig(data=len(devices)), devices))
    return replace(source, params=jax.device_put(source.params, placement.replicated), placement=placement)


def fits_in_memory(needed: int, devices: Sequence[jax.Device], limit: int | None) -> bool:
    """Return whether `needed` bytes of parameters, split over devices, leave a quarter of their memory free.

    limit: memory of one device in bytes; None if the device has no limit. The free quarter is for activations and the
        cache.
    """
    return limit is None or needed <= 0.75 * limit * len(devices)


def count_bytes(leaves: tree.Tree, dtype: str | None = None) -> int:
    """Return the number of bytes of specs, in `dtype` or in their own dtypes."""
    return sum(math.prod(leaf.shape) * jnp.dtype(dtype or leaf.dtype).itemsize for leaf in jax.tree.leaves(leaves))


Result = TypeVar("Result")


def use_checkpoint(directory: Path, step: Step, use: Callable[[Checkpoints, int], Result]) -> Result:
    """Return `use(checkpoints, step)` for a verified checkpoint of a run.

    Raises:
        InputError: the run has no checkpoint of this step, or `best` compares nothing.
        CheckpointError: the run has no usable checkpoint, or the checkpoint of the step is damaged.
    """
    with Checkpoints(directory / "checkpoints") as checkpoints:
        while True:
            chosen = checkpoints.latest_verified_step() if step is None else _find_verified(directory, step)
            if chosen is None:
                raise CheckpointError(f"--checkpoint {directory}: the run has no checkpoint yet; train it first")
            try:
                return use(checkpoints, chosen)
            except CheckpointError:
                if isinstance(step, int) or (directory / "checkpoints" / str(chosen)).exists():
                    raise  # otherwise the run is in progress, wrote a newer checkpoint and deleted this one


def choose_trained_tree(directory: Path, step: int) -> str:
    """Return the tree of a checkpoint that holds the trained parameters to use, and say so if it is their average."""
    name = find_trained_tree(directory / "checkpoints" / str(step))
    if name == AVERAGE:
        print(describe_average(directory, step), file=sys.stderr)
    return name


def _find_verified(directory: Path, step: Step) -> int | None:
    """Return the step of the checkpoint that `step` names; None: the run has no checkpoint yet."""
    paths = step_directories.find_checkpoints(directory / "checkpoints")
    if not paths:
        return None
    choices = f"choose one of {', '.join(map(str, paths))}"
    if step == "best":
        if not (best := step_directories.rank_by_loss(step_directories.read_losses(paths))):
            raise InputError(
                f"--step best: no checkpoint of {directory} was saved at an evaluated step, so none has a held-out "
                f"loss; {choices}"
            )
        step = best[0]
    if step not in paths:
        raise InputError(f"--step {step}: {directory} has no checkpoint of this step; {choices}, or best")
    if damage := step_directories.find_damage(paths[step]):
        raise CheckpointError(f"checkpoint {paths[step]} is damaged: {damage}; name another one with --step: {choices}")
    return step


def open_adapters(path: Path, folder: ModelFolder) -> tuple[AdapterFolder, ModelFolder]:
    """Open a PEFT folder with adapters of the model of a Hugging Face folder.

    Returns:
        The adapters, and the model's folder with the whole weights that are saved with them.

    Raises:
        InputError: the adapters do not belong to the model.
    """
    path = hub.find_folder(path, "--adapter ")
    adapters = pretrained.open_adapter(path, folder.adapter_family, folder.config, "--adapter ")
    adapters.check_base(folder)
    _warn_of_other_base(path, folder.path)
    return adapters, adapters.whole.replace_in(folder, adapters.model)


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
    family = huggingface.choose_adapter_family(config.model, pretrained.find_source_folder(config))
    path = hub.find_folder(path, "--adapter ")
    adapters = pretrained.open_adapter(path, family, config.model, "--adapter ")
    if adapters.whole:
        raise InputError(
            f"--adapter {path}: it also has weights of the model itself (modules_to_save, trainable_token_indices), "
            "which a run does not take; write the run as a folder (python -m jaxopt_llm.convert export --checkpoint "
            f"{directory} --to FOLDER), and give --checkpoint FOLDER"
        )
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
    added, held = leaves.adapter_paths(specs), dict(tree.leaves_with_path(params))

    def find_or_read(path: str, spec: ParamSpec) -> jax.Array:
        if path not in added:
            return held[path.removesuffix("/base")]
        spec = replace(spec, dtype=jnp.dtype(dtype))
        return adapters.read(path, spec, resting_parameter_sharding(spec, placement))

    return model.with_specs(specs), tree.map_with_path(find_or_read, specs)


def open_run_layers(directory: Path, config: Config, step: int) -> StoredLayers:
    """Open the parameters of a verified checkpoint of a run.

    Frozen parameters of a folder have its dtypes, unless they are quantised.

    Raises:
        InputError: that folder is missing or has changed.
    """
    _, _, frozen = _adapt(config)
    base = open_frozen_base(directory, config) if jax.tree.leaves(frozen) else None
    choose_trained_tree(directory, step)
    weights = RunWeights(directory, directory / "checkpoints" / str(step), config.model, config.model)
    return StoredLayers(_list_specs(config, base), weights, base)


def open_both_bases(directory: Path, config: Config, step: int) -> tuple[StoredLayers, StoredLayers]:
    """Open the parameters of a run that trains adapters over a quantised base: over its codes, and over its originals.

    Raises:
        InputError: the folder with the original weights is missing or has changed, or the run started from none.
    """
    layers = open_run_layers(directory, config, step)
    if layers.folder is None:
        raise InputError(f"{directory} started from no Hugging Face folder, and holds only the codes of its base")
    original = fields.replace_fields(config, {"lora.base": "float", "lora.double_quantisation": False})
    return layers, replace(layers, specs=_list_specs(original, layers.folder))


def _adapt(config: Config) -> tuple[Decoder, Params, Params]:
    """Return the model of a run, and the specs of its trained and of its frozen parameters."""
    return lora.adapt_model(Decoder(config.model), config.lora, config.precision, config.training.trainable)


def _list_specs(config: Config, base: ModelFolder | None) -> dict[str, tree.Leaf]:
    """Return the specs of a run's parameters. base: the folder whose dtypes the frozen ones have; None: their own."""
    _, trained, frozen = _adapt(config)
    if base is not None:
        frozen = initial_weights.with_stored_dtypes(base, frozen)
    return collect_leaves(tree.merge(trained, frozen))


def open_folder_layers(path: Path, adapter: Path, family: str = "") -> tuple[ModelConfig, StoredLayers]:
    """Open the parameters of a Hugging Face folder with the adapters of a PEFT folder.

    family: see `ModelConfig.family`.

    Returns:
        The configuration of the model, and its parameters.

    Raises:
        InputError: a folder is incomplete, or the adapters do not belong to the model.
    """
    folder = huggingface.open_model_folder(path, family)
    adapters, folder = open_adapters(adapter, folder)
    specs = stored_specs(folder)
    return folder.config, StoredLayers(collect_leaves(adapters.add_to_specs(specs)), None, folder, adapters)


def stored_specs(folder: ModelFolder) -> tree.Tree:
    """Return the specs of a folder's model, in the dtypes of the folder."""
    specs = decoder_specs.param_specs(folder.config)
    return tree.map_with_path(lambda name, spec: replace(spec, dtype=folder.dtype(name)), specs)
