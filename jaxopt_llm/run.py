"""What a training run left, or a Hugging Face folder holds, as the commands that read it want it."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jaxopt_llm import config as configuration
from jaxopt_llm import tree
from jaxopt_llm.checkpoint import huggingface
from jaxopt_llm.checkpoint.huggingface import Folder
from jaxopt_llm.checkpoint.native import Checkpoints
from jaxopt_llm.checkpoint.weights import RunWeights, is_run
from jaxopt_llm.config import RunConfig, TrainConfig
from jaxopt_llm.data.config import DataConfig
from jaxopt_llm.data.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.errors import CheckpointError, InputError
from jaxopt_llm.model.decoder import Params, Parts, make_parts
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.distributed import Processes
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh, visible_devices
from jaxopt_llm.parallel.offload import OffloadConfig
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement, ShardingConfig
from jaxopt_llm.parallel.topology import choose_expert_products
from jaxopt_llm.training import lora, pretrained, shapes

FrozenAs = Literal["rests", "original", "absent"]


@dataclass(frozen=True)
class Run:
    """A run's last checkpoint, or a Hugging Face folder as step 0, in compute dtype. placement: one device, or one that
    splits `params` over `fsdp`, or as many as are asked for, over `tensor`; what the devices cannot hold together, the
    stacks, rests in host memory."""

    config: TrainConfig
    tokenizer: Tokenizer
    parts: Parts
    params: Params
    placement: Placement
    step: int


def load_config(directory: Path) -> TrainConfig:
    """Raises InputError for what is no run directory."""
    return configuration.of_run(directory, "--checkpoint ")


def initial_weights(config: TrainConfig, say: Callable[[str], None], processes: Processes) -> Folder | RunWeights:
    """Those that model.pretrained names, of a run directory its last checkpoint's.

    say: told, in a line, which of its checkpoints are damaged. Raises CheckpointError where none can be used.
    """
    path = Path(config.model.pretrained)
    if not is_run(path):
        return replace(huggingface.open_folder(path), config=config.model)
    with Checkpoints(path / "checkpoints", None, say, processes) as checkpoints:
        step = checkpoints.latest_step()
    if step is None:
        raise CheckpointError(f"model.pretrained={path}: it has no checkpoint yet")
    held = load_config(path)
    base = open_base(path, held) if held.training.trainable else None
    base = base and replace(base, config=config.model)
    return RunWeights(path, path / "checkpoints" / str(step), held.model, config.model, base)


def _is_folder(directory: Path) -> bool:
    """Whether this is a Hugging Face folder, and no run directory: each has a config.json of its own."""
    if is_run(directory):
        return False
    try:
        settings = json.loads((directory / huggingface.CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # read as a run's it is told what is wrong
    return isinstance(settings, dict) and "model_type" in settings


def open_config(directory: Path) -> TrainConfig:
    """Of a run directory or, with defaults where it says nothing, of a Hugging Face folder. Raises InputError for what
    is neither."""
    return _open(directory)[0]


def _open(directory: Path) -> tuple[TrainConfig, Folder | None]:
    if _is_folder(directory):
        folder = huggingface.open_folder(directory)
        return folder_config(folder, directory, str(directory.absolute())), folder
    try:
        return load_config(directory), None
    except InputError as error:
        raise InputError(f"{error}, nor the folder of a Hugging Face model") from error


def folder_config(folder: Folder, directory: Path, tokenizer: str) -> TrainConfig:
    """A run in `directory` that begins from a Hugging Face folder, with its dtype to compute in."""
    dtype = str(folder.dtype("outer/embedding/table"))
    return TrainConfig(
        run=RunConfig(directory=str(directory)),
        model=replace(folder.config, pretrained=str(folder.path.absolute())),
        data=DataConfig(tokenizer=tokenizer),
        precision=PrecisionConfig(compute_dtype=dtype),  # type: ignore[arg-type]
    )


def load(directory: Path, data: DataConfig | None = None, tensor: int = 1, attention: str = "xla") -> Run:
    """Of a run directory or a Hugging Face folder.

    data: names the tokenizer, where that is not where the run had it. tensor: devices that every weight is split over.
    attention: the implementation that attends where nothing reads a cache.

    Raises InputError for what is neither, CheckpointError where a run has no checkpoint that can be used.
    """
    config, folder = _open(directory)
    tokenizer = load_tokenizer(data or config.data)
    if tokenizer.vocabulary_size > config.model.vocabulary_size:
        raise InputError(
            f"data.tokenizer: it has {tokenizer.vocabulary_size} tokens, the model's vocabulary "
            f"{config.model.vocabulary_size}"
        )
    _check_tensor(tensor, config)
    if folder is not None:
        return Run(config, tokenizer, *read_folder(folder, config.precision, tensor, attention), step=0)
    _check_tokenizer(directory, tokenizer)
    parts, params, placement, step = restore(
        directory, config, config.precision.compute_dtype, tensor=tensor, attention=attention
    )
    return Run(config, tokenizer, parts, params, placement, step)


def read_folder(
    folder: Folder, precision: PrecisionConfig, tensor: int, attention: str = "xla"
) -> tuple[Parts, Params, Placement]:
    """The parameters of a Hugging Face folder, in compute dtype, and where they are."""
    parts = make_parts(folder.config, attention=attention, expert_products=expert_products(precision))
    placement = placement_for(size(parts.specs, precision.compute_dtype), precision, tensor)

    def read(path: str, spec: ParamSpec) -> jax.Array:
        spec = replace(spec, dtype=jnp.dtype(precision.of(spec).compute_dtype))
        return folder.read(path, spec, placement.resting_parameters(spec))

    return parts, tree.map_with_path(read, parts.specs), placement


def restore(
    directory: Path,
    config: TrainConfig,
    dtype: str,
    frozen_as: FrozenAs = "rests",
    tensor: int = 1,
    attention: str = "xla",
) -> tuple[Parts, Params, Placement, int]:
    """The parameters of a run's last checkpoint, those that were trained in this dtype, where they are, and its step.

    frozen_as: what is frozen as it rests, in the compute dtype or codes; in place of the former in the dtype of the
        folder that it is read from; or not at all, with None in its place.

    Raises CheckpointError where it has no checkpoint that can be used.
    """
    products = expert_products(config.precision)
    parts = make_parts(config.model, config.training.loss_chunk, attention=attention, expert_products=products)
    parts, trained, frozen = lora.adapt(parts, config.lora, config.precision, config.training.trainable)
    base = None
    if frozen_as == "absent":
        frozen = jax.tree.map(lambda spec: None, frozen)
    elif jax.tree.leaves(frozen) and (base := open_base(directory, config)) and frozen_as == "original":
        frozen = pretrained.in_own_dtypes(base, frozen)
    placement = placement_for(size(trained, dtype) + size(frozen), config.precision.for_evaluation(), tensor)
    with Checkpoints(directory / "checkpoints") as checkpoints:
        while True:
            step = checkpoints.latest_step()
            if step is None:
                raise CheckpointError(f"--checkpoint {directory}: it has no checkpoint yet")
            try:
                # In which training reads its masters, too.
                dtypes = jax.tree.map(lambda spec: spec.dtype if spec.exact else jnp.dtype(dtype), trained)
                params = checkpoints.restore(step, {"masters": dtypes}, masters=placement.abstract(trained))["masters"]
                if base is not None:
                    frozen = pretrained.read_frozen(base, frozen, placement)
                elif jax.tree.leaves(frozen):
                    frozen = checkpoints.restore(step, frozen=placement.abstract(frozen))["frozen"]
                break
            except CheckpointError:
                if (directory / "checkpoints" / str(step)).exists():
                    raise  # else the run, which is still on, has a newer one and deleted it
    resting = jax.tree.map(placement.resting_parameters, trained if frozen_as == "absent" else parts.specs)
    params = jax.device_put(tree.merge(params, frozen), resting)
    return parts, params, placement, step


def keeps_frozen(config: TrainConfig) -> bool:
    """Whether checkpoints hold what is not trained, too. What came from a folder stays there; a run may change."""
    return not config.model.pretrained or is_run(Path(config.model.pretrained))


def base_digest(directory: Path) -> str | None:
    """Of the Hugging Face folder that a run began from; None where it began from none."""
    try:
        digest: str | None = json.loads((directory / "corpus.json").read_text())["base_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{directory}: corpus.json does not say its base ({error!r})") from error
    return digest


def open_base(directory: Path, config: TrainConfig) -> Folder | None:
    """The folder of the frozen weights that a run's checkpoints leave out; None where they hold these. Raises
    InputError where it is another than the run began with."""
    began = base_digest(directory)
    if began is None:
        return None
    path = Path(config.model.pretrained)
    if not path.is_dir():
        raise InputError(
            f"{directory} lacks in its checkpoints what it does not train, of the model in {path}, which is not there: "
            f"bring it back, or write where it is now as model.pretrained in {directory / 'config.json'}"
        )
    folder = huggingface.open_folder(path)
    if folder.sha256 != began:
        raise InputError(
            f"model.pretrained={config.model.pretrained}: it holds other weights than {directory} began with, whose "
            "checkpoints have adapters alone: bring those back"
        )
    return replace(folder, config=config.model)


def _check_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Another file under the same name would give other ids, in silence."""
    try:
        trained = json.loads((directory / "corpus.json").read_text())["tokenizer_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--checkpoint {directory}: corpus.json does not say its tokenizer ({error!r})") from error
    if trained != tokenizer.sha256:
        raise InputError(
            f"--checkpoint {directory}: data.tokenizer, or its data.beginning or data.end, is another than the run was "
            "trained with: bring that one back"
        )


def _check_tensor(tensor: int, config: TrainConfig) -> None:
    devices = len(visible_devices())
    fit = [
        n for n in range(1, devices + 1) if not devices % n and not shapes.tensor_problems(config.model, 1, False, n)
    ]
    if tensor not in fit:
        raise InputError(
            f"--tensor {tensor}: must divide the devices ({devices}) and the model's heads and MLP width, as do "
            f"{', '.join(map(str, fit))}"
        )


def expert_products(precision: PrecisionConfig) -> str:
    """What multiplies with experts here, whatever a run took elsewhere."""
    return choose_expert_products(visible_devices()[0], "auto", precision.compute_dtype)


def placement_for(needed: int, precision: PrecisionConfig, tensor: int = 1) -> Placement:
    """Of parameters of `needed` bytes that are used and not trained."""
    devices = visible_devices()
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    held = devices_for(needed, devices, limit, tensor)
    return Placement(
        make_mesh(MeshConfig(fsdp=len(held) // tensor, tensor=tensor), held),
        ShardingConfig(zero_stage=3),
        precision,
        OffloadConfig(parameters=not fits(needed, held, limit)),
    )


def devices_for(needed: int, devices: Sequence[jax.Device], limit: int | None, tensor: int = 1) -> Sequence[jax.Device]:
    """The first device alone, or the first `tensor`, where parameters of `needed` bytes fit there; else all."""
    return devices[:tensor] if fits(needed, devices[:tensor], limit) else devices


def fits(needed: int, devices: Sequence[jax.Device], limit: int | None) -> bool:
    """Whether parameters of `needed` bytes, divided over devices, leave a quarter of their `limit` to what is computed.
    None: devices without a limit of their own."""
    return limit is None or needed <= 0.75 * limit * len(devices)


def size(leaves: tree.Tree, dtype: str | None = None) -> int:
    """Bytes of specs, in this dtype or their own."""
    return sum(math.prod(leaf.shape) * jnp.dtype(dtype or leaf.dtype).itemsize for leaf in jax.tree.leaves(leaves))
