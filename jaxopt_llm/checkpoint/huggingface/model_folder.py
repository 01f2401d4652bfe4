"""Hugging Face model folders, config.json and safetensors: read into sharded arrays, and written tensor by tensor.

Each device's shard of a parameter is filled from slices of the tensors, layer by layer. In addition to
the shards of this process's devices, the host holds at most one tensor.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxopt_llm.checkpoint.huggingface import find_family, safetensors, text_part
from jaxopt_llm.checkpoint.huggingface.codecs import Settings, Unsupported
from jaxopt_llm.checkpoint.huggingface.family import Family, order_by_distance
from jaxopt_llm.checkpoint.huggingface.quantised import methods
from jaxopt_llm.checkpoint.huggingface.safetensors import NewFolder, StoredTensor, TensorSpec
from jaxopt_llm.checkpoint.huggingface.tensor_layout import TensorLayout, TensorPiece, find_form, list_tensor_layouts
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core import json_files, tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
DIGEST_BYTES_PER_TENSOR = 2**18  # sampled to distinguish a tensor from others; at least one row
MAX_COMPARED_ROWS = 512  # of a table that may be the copy of another
MAX_DIGEST_BYTES = 2**29  # of all tensors; with many tensors, fewer bytes of each are sampled


def read_settings(path: Path) -> Settings:
    """Read the config.json of a folder.

    Raises:
        InputError: the folder or the file is missing or invalid, or the folder has adapters of PEFT. Beside weights of
            a model, these may be merged into them or not: transformers reads the adapters, over their own base.
    """
    has_config = (path / CONFIG_FILE).is_file()
    if (path / ADAPTER_FILE).is_file():
        base = json_files.read_object(path / ADAPTER_FILE, "download the adapter again")
        name = base.get("base_model_name_or_path")
        named = f" ({name})" if name else ""
        remedy = f", or move {ADAPTER_FILE} elsewhere if the weights beside it are the model" if has_config else ""
        raise InputError(
            f"{path}: adapters of PEFT, not a model; name their base model here{named}, and the adapters with "
            f"--adapter, or with --lora.pretrained to train them{remedy}"
        )
    if not has_config and (other := safetensors.find_other_layout(path)):
        raise InputError(f"{path}: no {CONFIG_FILE}, only {other}; {safetensors.NAME_LAYOUT}")
    return safetensors.read_json(path, CONFIG_FILE, "Hugging Face model")


def read_config(path: Path, name: str = "") -> tuple[Family, ModelConfig]:
    """Read the family and the model configuration of a folder.

    Code that the config.json names is never run.

    name: see `ModelConfig.family`.

    Raises:
        InputError: the config.json describes a model that is not supported.
    """
    settings = text_part.read_text(read_settings(path))
    try:
        family = find_family.find_by_settings(settings, name)
        return family, replace(family.read(settings), family=name)
    except Unsupported as error:
        offered = "" if name else _offer_families(path, settings)
        raise InputError(f"{path / CONFIG_FILE}: {error}{offered}") from error


def _offer_families(path: Path, settings: Settings) -> str:
    """Return a clause with the families that a folder of an unknown model_type fits, by its fields and its tensors."""
    if any(settings.get("model_type") in family.model_types for family in find_family.FAMILIES):
        return ""
    compared = [each for each in order_by_distance(settings, find_family.FAMILIES) if each.fits]
    found = [each for each in compared if _has_tensors_of(path, each.family.model_type)]
    fitting = [each.family.model_type for each in found if each.distance == found[0].distance]
    if not fitting:
        return ""
    others = f" (or {', '.join(fitting[1:])})" if fitting[1:] else ""
    return (
        f". Its fields and tensors are those of {fitting[0]}{others}: if its class computes the same, give "
        f"--model.family {fitting[0]}"
    )


def _has_tensors_of(path: Path, name: str) -> bool:
    try:
        open_model_folder(path, name)
    except InputError:  # says what does not fit
        return False
    return True


def read_context(path: Path) -> int | None:
    """Return the number of positions that the model of a folder was trained for; None: the config.json does not say."""
    settings = text_part.read_text(read_settings(path))
    context = settings.get("max_position_embeddings", settings.get("n_positions"))
    return context if isinstance(context, int) and context > 0 else None


def choose_family(config: ModelConfig, source: Path | None = None) -> Family:
    """Return a family that fits a model.

    Args:
        config: the model.
        source: the folder that the model came from. The family that it was read as is preferred.

    Raises:
        InputError: no family fits the model.
    """
    return find_family.find_by_model(config, text_part.read_text(read_settings(source)) if source else {})


def choose_adapter_family(config: ModelConfig, source: Path | None) -> Family:
    """Return a family as `choose_family` does, with the names that modules have in PEFT."""
    return text_part.name_modules(choose_family(config, source), read_settings(source) if source else {})


def build_leaf(
    spec: ParamSpec, sharding: NamedSharding, fill: Callable[[np.ndarray, int | None, tuple[slice, ...]], None]
) -> jax.Array:
    """Build a sharded leaf, which is 0 where `fill` writes nothing.

    Args:
        spec: shape and dtype of the leaf.
        sharding: sharding of the leaf.
        fill: called as `fill(zeros, layer, index)`; writes the slices `index` of one layer into `zeros`. `layer` is the
            index of the layer in the stack; None for a leaf that is not stacked.
    """
    shards: dict[str, np.ndarray] = {}  # devices with the same shard share one array

    def get_shard(index: Any) -> np.ndarray:  # index: a slice for each dimension
        if (key := str(index)) in shards:
            return shards[key]
        ranges = [range(size)[each] for size, each in zip(spec.shape, index, strict=True)]
        shards[key] = out = np.zeros([len(each) for each in ranges], spec.dtype)
        stack = np.zeros((), np.int64) if spec.layers is None else np.asarray(spec.layers)
        layers = stack[index[: spec.leading]]
        for row in np.ndindex(layers.shape):
            if layers[row] >= 0:
                layer = None if spec.layers is None else int(layers[row])
                fill(out[(*row, ...)], layer, index[spec.leading :])
        return out

    return jax.make_array_from_callback(spec.shape, sharding, get_shard)


def is_of_scores(path: str) -> bool:
    """Return whether a parameter is in the head of scores."""
    return path.startswith("non_layer/score/")


def copy_finite(source: np.ndarray, out: np.ndarray, what: str) -> None:
    """Copy an array to the start of `out`, whose padding at the ends stays 0.

    Raises:
        InputError: a value is not finite in the dtype of `out`. The message names `what`.
    """
    part: Any = (*(slice(size) for size in source.shape), ...)  # an array, also if it has no dimension
    out = out[part]
    with np.errstate(over="ignore"):  # an overflow is reported below
        out[...] = source
    if not np.isfinite(out).all():
        raise InputError(f"{what} has values that are not finite in {out.dtype}; use a wider dtype")


def copy_table(
    stored: np.ndarray,
    out: np.ndarray,
    index: tuple[slice, ...],
    size: int,
    what: str,
    read: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> None:
    """Copy the slices `index` of a table [V, ...] into `out`, with rows added up to `size`: see `copy_finite`.

    Each added row is the mean of the stored rows, so that its logit is not above those of real tokens (Hewitt 2021,
    "Initializing New Word Embeddings for Pretrained Language Models"). Every host and every mesh computes the same
    values.

    read: reads a view of `stored`, if that is in a file.
    """
    copy_finite(read(stored[index]), out, what)
    first = index[0].start or 0
    added = slice(max(len(stored) - first, 0), max(size - first, 0))
    if len(out[added]):
        columns = read(stored[(slice(None), *index[1:])])
        out[added] = columns.mean(axis=0, dtype=np.float64)


@dataclass(frozen=True)
class ModelFolder:
    """Folder with verified headers: each tensor of the model is present once, in its shape, and there are no others.

    Attributes:
        config: the model, with the vocabulary size of the folder.
        stored: the tensors by name.
        vocabulary_size: rows of the tables to read into; see `copy_table`.
        mtp_modules: number of modules of multi-token prediction in the folder.
        unread_mtp: names of the tensors of multi-token prediction in another form, which is never read.
        changed_copies: copies of tables in those that are read that differ from the tables, with the names of these.
    """

    path: Path
    family: Family
    config: ModelConfig
    stored: Mapping[str, StoredTensor]
    vocabulary_size: int
    mtp_modules: int = 0
    unread_mtp: tuple[str, ...] = ()
    changed_copies: tuple[tuple[str, str], ...] = ()

    @property
    def adapter_family(self) -> Family:
        """The family with the names that modules have in PEFT."""
        return text_part.name_modules(self.family, read_settings(self.path))

    def describe_mtp(self) -> Iterator[str]:
        """Yield lines about modules of multi-token prediction that are not read, or whose tables are not."""
        if (left := self.mtp_modules - self.config.mtp_layers) > 0:
            yield f"{self.path}: modules of multi-token prediction that are not trained (model.mtp_layers): {left}"
        if self.unread_mtp:
            count, first = len(self.unread_mtp), self.unread_mtp[0]
            yield f"{self.path}: the {count} tensors of multi-token prediction ({first}, ...) are not read"
        for copy, name in self.changed_copies:
            yield f"{self.path}: {copy} differs from {name}, which its module shares: the copy is not read"

    def for_model(self, config: ModelConfig) -> "ModelFolder":
        """Return the folder for a model that may group the layers into other stacks and have a larger vocabulary."""
        own = self.config
        stored_config = replace(config, vocabulary_size=own.vocabulary_size, scores=own.scores)
        return replace(self, config=stored_config, vocabulary_size=config.vocabulary_size)

    @functools.cached_property
    def _locations(self) -> dict[tuple[str, int | None], list[tuple[str, TensorLayout, TensorPiece]]]:
        """Leaf path and index in its stack -> the tensor that holds it, or one tensor for each expert."""
        locations: dict[tuple[str, int | None], list[tuple[str, TensorLayout, TensorPiece]]] = {}
        for name, layout in list_tensor_layouts(self.family, self.config).items():
            for piece in layout.pieces:
                locations.setdefault((piece.path, piece.layer), []).append((name, layout, piece))
        return locations

    @functools.cached_property
    def sha256(self) -> str:
        """Hash that distinguishes these weights from others.

        It covers each tensor's name, dtype and shape, and rows sampled evenly from it. To hash all rows would take as
        long as to read the folder.
        """
        digest, limit = hashlib.sha256(), min(DIGEST_BYTES_PER_TENSOR, MAX_DIGEST_BYTES // len(self.stored))
        for name, stored in sorted(self.stored.items()):
            stride = max(1, stored.array.nbytes // limit)
            digest.update(f"{name} {stored.array.dtype} {stored.array.shape} ".encode())
            # Rows in the order of the file, which codes of a transposed weight have.
            in_file = stored.array.transpose(np.argsort([-stride for stride in stored.array.strides], kind="stable"))
            rows = stored.read(in_file[::stride])
            digest.update(np.ascontiguousarray(rows).view(np.uint8).data)
        return digest.hexdigest()

    def dtype(self, path: str) -> np.dtype:
        """Return the dtype of a leaf's stored values; the widest one if its tensors differ."""
        names = [name for (leaf, _), locations in self._locations.items() if leaf == path for name, *_ in locations]
        dtypes = {self.stored[name].dtype for name in names}
        return jnp.dtype(jnp.result_type(*dtypes))

    def lacks(self, path: str) -> bool:
        """Return whether a parameter is new: the scores of a model that was read without."""
        return is_of_scores(path) and not self.config.scores

    def tensor_names(self, path: str, layer: int | None) -> list[str]:
        """Return the names of the tensors that hold one layer of a leaf: one, or one for each expert."""
        return [name for name, *_ in self._locations[path, layer]]

    def read(self, path: str, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        """Read a leaf in the shape and dtype of its spec.

        Padding rows of a table, and stack rows that hold no layer, are 0.

        Raises:
            InputError: a value is not finite in the dtype of the spec.
        """
        return build_leaf(spec, sharding, functools.partial(self.fill, path))

    def fill(self, path: str, out: np.ndarray, layer: int | None, index: tuple[slice, ...]) -> None:
        """Write the slices `index` of one layer of a leaf into `out`: see `build_leaf`."""
        locations = self._locations[path, layer]
        if locations[0][2].expert is None:
            self._fill(*locations[0], out, index)
        else:
            for location, expert_out in zip(locations[index[0]], out, strict=True):
                self._fill(*location, expert_out, index[1:])

    def _fill(
        self, name: str, layout: TensorLayout, piece: TensorPiece, out: np.ndarray, index: tuple[slice, ...]
    ) -> None:
        stored = self.stored[name]
        view, what = layout.view(stored.array, piece), f"{stored.file}: tensor {name!r}"
        if "vocabulary" in piece.spec.axes:
            copy_table(view, out, index, self.vocabulary_size, what, stored.read)
        else:
            copy_finite(stored.read(view[index]), out, what)


def open_model_folder(path: Path, name: str = "", mtp_layers: int = 0) -> ModelFolder:
    """Open a folder and check the headers of its files.

    name: see `ModelConfig.family`. mtp_layers: number of modules of multi-token prediction to read.

    Raises:
        InputError: the folder is not a complete folder of a supported family.
    """
    family, config = read_config(path, name)
    settings = read_settings(path)
    config = replace(config, mtp_layers=mtp_layers)
    if mtp_layers and not family.mtp_copies:
        raise InputError(
            f"model.mtp_layers={mtp_layers}: those of {family.model_type} are not read; set --model.mtp-layers 0"
        )
    whole = methods.join_codes(safetensors.open_folder(path, _read_chosen_weights(path)), text_part.read_text(settings))
    stored = text_part.select_text(whole, settings)
    family = find_form(family, config, {name: each.array.shape for name, each in stored.items()})
    layouts = list_tensor_layouts(family, config)
    if not any(name.startswith(family.base_prefix) for name in stored):
        # The model without its head, as in the first published folder of GPT-2.
        stored = {name if name in layouts else family.base_prefix + name: each for name, each in stored.items()}
    mtp = family.find_mtp(stored, text_part.read_text(settings))
    modules = len([name for name in mtp if name.endswith(".eh_proj.weight")])
    unread = () if modules else tuple(sorted(family.find_mtp(whole, text_part.read_text(settings))))
    if config.mtp_layers > modules:
        raise InputError(describe_fewer_modules(config, path, modules))
    copies = _find_changed_copies(family, config, stored)
    mtp -= layouts.keys()
    ignored = {name for name in stored if any(fnmatchcase(name, pattern) for pattern in family.ignored)} | mtp
    ignored |= family.list_shared(config)
    stored = {name: each for name, each in stored.items() if name not in ignored}
    stored = _check_constants(family.list_constants(config.layers), stored)
    stored = _use_published_names(family, config, stored, layouts)
    for name, layout in layouts.items():
        if name not in stored:
            raise InputError(f"{path}: tensor {name!r} is missing; download the folder again{_explain_two_sets(path)}")
        safetensors.check_is_float(name, stored[name])
        _check_shape(name, stored[name], layout.shape)
    if config.table_is_head:
        _remove_tied_head(family, stored)
    for name, tensor in stored.items():
        if name not in layouts:
            raise InputError(
                f"{tensor.file}: tensor {name!r} does not belong to a {family.architecture} as {CONFIG_FILE} describes "
                "it; use the config.json of these weights"
            )
    return ModelFolder(path, family, config, stored, config.vocabulary_size, modules, unread, copies)


def describe_fewer_modules(config: ModelConfig, path: Path, modules: int) -> str:
    """Return the message for a folder or a run with fewer modules of multi-token prediction than a model."""
    return (
        f"model.mtp_layers={config.mtp_layers}: the modules of multi-token prediction in {path} are {modules}: set "
        f"--model.mtp-layers {modules}"
    )


def _find_changed_copies(
    family: Family, config: ModelConfig, stored: Mapping[str, StoredTensor]
) -> tuple[tuple[str, str], ...]:
    """Return the copies of tables in MTP modules that differ from the tables, with the names of these."""
    return tuple(
        (copy, name)
        for copy, name in family.list_copies(config).items()
        if copy in stored and name in stored
        if not have_equal_values(stored[copy], stored[name], MAX_COMPARED_ROWS)
    )


def _check_constants(constants: Mapping[str, float], stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors without the family's constants. Raise InputError if one has another value."""
    for name in constants.keys() & stored.keys():
        tensor = stored[name]
        safetensors.check_is_float(name, tensor)
        found, value = tensor.read(tensor.array).astype(np.float32), np.asarray(constants[name], tensor.dtype)
        if not np.array_equal(found, value.astype(np.float32)):
            raise InputError(
                f"{tensor.file}: tensor {name!r} is {found}; only {constants[name]} is computed, so use a model of the "
                "table in docs/pretrained.md"
            )
    return {name: tensor for name, tensor in stored.items() if name not in constants}


def _read_chosen_weights(path: Path) -> str | None:
    """Return the name of the file with the weights that a config.json names, which few do."""
    name = read_settings(path).get("transformers_weights")
    if name is not None and not isinstance(name, str):
        raise InputError(f"{path / CONFIG_FILE}: transformers_weights={name!r} is not a file name; remove it")
    return name


def _explain_two_sets(path: Path) -> str:
    """Return which of two sets of weights of a folder is read; empty if there is only one."""
    single, index = path / safetensors.SINGLE, path / safetensors.INDEX
    if not (single.is_file() and index.is_file()):
        return ""
    return f", or remove {single.name}, which is taken before the shards of {index.name}, if the shards are the model"


def _use_published_names(
    family: Family, config: ModelConfig, stored: Mapping[str, StoredTensor], layouts: Mapping[str, TensorLayout]
) -> dict[str, StoredTensor]:
    """Return the tensors under published names; tensors as transformers holds them in memory are split into views."""
    tensors = dict(stored)
    for layer in range(config.blocks):
        for in_memory_name, published in family.in_memory_names.items():
            name, parts = in_memory_name.format(layer), published.split()
            first = layouts.get(parts[0].format(layer, 0))
            if name not in tensors or first is None:
                continue
            tensor = tensors.pop(name)
            if not first.is_expert:
                views = {parts[0].format(layer): tensor.array}
            else:
                rows, columns = first.shape
                _check_shape(name, tensor, (config.moe.experts, len(parts) * rows, columns))
                views = {
                    part.format(layer, expert): view
                    for expert, expert_array in enumerate(tensor.array)
                    for part, view in zip(parts, np.split(expert_array, len(parts)), strict=True)
                }
            if duplicates := views.keys() & tensors.keys():
                raise InputError(
                    f"{tensor.file}: tensor {min(duplicates)!r} appears twice, once within {name!r}; remove one of them"
                )
            tensors |= {part: tensor._replace(array=view) for part, view in views.items()}
    return tensors


def _check_shape(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    safetensors.check_shape(name, tensor, shape, f"{CONFIG_FILE} requires", "use the config.json of these weights")


def _remove_tied_head(family: Family, stored: dict[str, StoredTensor]) -> None:
    """Remove the head of a model whose embedding table is the head, too. Raise InputError if the two differ."""
    head = "lm_head.weight"
    table = next(name for name, leaves in family.names.items() if leaves == "non_layer/embedding/table")
    if head not in stored:
        return
    head_tensor, table_tensor = stored.pop(head), stored[table]
    if not have_equal_values(head_tensor, table_tensor):
        raise InputError(
            f"{head_tensor.file}: tensor {head!r} differs from {table!r}, but {CONFIG_FILE} ties them; if the head has "
            "its own weights, set tie_word_embeddings to false there"
        )


def have_equal_values(first: StoredTensor, second: StoredTensor, most: int = 0) -> bool:
    """Return whether two tensors have the same shape and values; only some rows are compared at once.

    most: rows to compare, evenly taken from the tensors; 0: all.
    """
    if first.array.shape != second.array.shape:
        return False
    stride = max(1, len(first.array) // most) if most else 1
    one, other = first.array[::stride], second.array[::stride]
    rows = 1 + 2**24 // max(1, math.prod(one.shape[1:]))
    return all(
        np.array_equal(first.read(one[begin : begin + rows]), second.read(other[begin : begin + rows]))
        for begin in range(0, len(one), rows)
    )


# --- writing

# What an export copies from the folder that the weights came from: nothing that names code, people or places.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
COPIED_SETTINGS = (*TOKEN_IDS, "max_position_embeddings", "initializer_range")


def open_rest(source: Path | None, family: Family, config: ModelConfig) -> text_part.Rest:
    """Return what the folder of a model of this family keeps of the folder that its weights came from.

    A model with scores keeps nothing: transformers has no class of a whole model with a head of scores of this form.
    """
    source = None if config.scores else source
    written = {*list_tensor_layouts(family, config), *family.list_copies(config)}
    return text_part.Rest(source, read_settings(source) if source else {}, family, written)


def write_nothing(folder: Path) -> None:
    pass


@dataclass(frozen=True)
class Origin:
    """Facts about a model's origin that a written folder keeps.

    Attributes:
        folder: the Hugging Face folder whose token ids and maximum sequence length are kept.
        settings: further fields of config.json, which take precedence over those of `folder`.
        write_files: writes the files that are not the model's, such as the tokenizer's, into the new folder.
    """

    folder: Path | None = None
    settings: Settings = field(default_factory=dict)
    write_files: Callable[[Path], None] = write_nothing


class Layers(Protocol):
    """Parameters of a model, which are fetched one layer at a time."""

    def dtype(self, path: str) -> np.dtype:
        """Return the dtype of a parameter: the dtype of its base, and float32 for a quantised base."""

    def fetch(self, path: str, layer: int | None, contracting: tuple[int, ...]) -> np.ndarray:
        """Return a parameter dequantised and with its adapter merged: see `leaves.fetch_layer`."""

    def release(self) -> None:
        """Remove what was read from memory, because other parameters follow."""


@dataclass(frozen=True)
class LoadedLayers:
    """Parameters that are in memory. leaves: by path; quantised weights and weights with adapters are single leaves."""

    leaves: Mapping[str, tree.Leaf]

    def dtype(self, path: str) -> np.dtype:
        return leaves.weight_dtype(self.leaves[path])

    def fetch(self, path: str, layer: int | None, contracting: tuple[int, ...]) -> np.ndarray:
        return leaves.fetch_layer(self.leaves[path], layer, (), contracting)

    def release(self) -> None:
        pass


def write_model_folder(
    path: Path,
    params: Params,
    config: ModelConfig,
    origin: Origin | None = None,
    dtype: Any = None,
    max_file_bytes: int = safetensors.MAX_FILE_BYTES,
) -> None:
    """Write a new folder of parameters that are in memory: see `write_layers`.

    params: the parameters, on any devices, possibly quantised or with adapters.
    """
    write_layers(path, LoadedLayers(collect_leaves(params)), config, origin, dtype, max_file_bytes)


def write_layers(
    path: Path,
    source: Layers,
    config: ModelConfig,
    origin: Origin | None = None,
    dtype: Any = None,
    max_file_bytes: int = safetensors.MAX_FILE_BYTES,
    check: Callable[[Path], None] = write_nothing,
) -> None:
    """Write a new folder of a model's parameters that transformers can load, one tensor at a time.

    Quantised weights are dequantised and adapters are merged, in float32, before they are rounded to the tensors'
    dtype.

    Args:
        path: the folder to create.
        source: the parameters.
        config: the model.
        origin: where the parameters came from; None: nothing is kept of it.
        dtype: dtype of the tensors instead of the parameters' dtype. Parameters that are updated by steps of a fixed
            size (`ParamSpec.sign_rate`) keep their dtype.
        max_file_bytes: largest number of tensor bytes in one file.
        check: called with the complete folder before it gets its name. If it raises an error, the folder is removed.

    Raises:
        InputError: no family fits the model, the path already exists, or a value is not finite in the dtype.
    """
    origin = origin or Origin()
    family = choose_family(config, origin.folder)
    rest = open_rest(origin.folder, family, config)
    # In the order of the source. No class in transformers loads single experts where the family has them in one tensor.
    family = replace(family, input_first=find_form(family, config, rest.shapes).input_first)
    layouts = list_tensor_layouts(family, config)
    fixed = {name for name, layout in layouts.items() if layout.pieces[0].spec.sign_rate is not None}
    # All pieces of a tensor have the same dtype.
    dtypes = {name: source.dtype(layout.pieces[0].path) for name, layout in layouts.items()}
    if dtype is not None:
        dtypes |= {name: jnp.dtype(dtype) for name in layouts if name not in fixed}
    widest = max((dtypes[name] for name in layouts if name not in fixed), key=lambda each: each.itemsize)
    constants = {name: np.asarray(value, widest) for name, value in family.list_constants(config.layers).items()}
    specs = {name: TensorSpec(dtypes[name], layout.shape) for name, layout in layouts.items()}
    get_parameter, copies = make_tensor_getter(path, layouts, specs, source), family.list_copies(config)
    specs |= {name: TensorSpec(widest, ()) for name in constants} | {name: specs[copies[name]] for name in copies}
    # Files hold one layer after the other. The tensors are written parameter by parameter, because the layers of a
    # parameter are next to each other where they are read.
    order = sorted(layouts, key=lambda name: [piece.path for piece in layouts[name].pieces])
    with NewFolder(path) as folder:
        whole, get_tensor = rest.add(
            specs, lambda name: constants[name] if name in constants else get_parameter(copies.get(name, name))
        )
        # The widest dtypes come first, so that each tensor is aligned in its file.
        widest_first = dict(sorted(whole.items(), key=lambda item: -item[1].dtype.itemsize))
        last = [name for name in whole if name not in {rest.name(each) for each in order}]
        order = [*map(rest.name, order), *last]
        safetensors.write_folder(folder, widest_first, get_tensor, max_file_bytes, order)
        content = _describe_model(family, config, origin, rest.settings | {"torch_dtype": str(widest)})
        (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")
        origin.write_files(folder)
        rest.copy_files(folder)
        check(folder)


def _describe_model(family: Family, config: ModelConfig, origin: Origin, others: Settings) -> Settings:
    """Return the content of config.json. others: further fields, which take precedence."""
    whole = {} if origin.folder is None else read_settings(origin.folder)
    text = text_part.read_text(whole)
    content = {
        **dict.fromkeys(TOKEN_IDS),  # null, because transformers has defaults that may be outside the vocabulary
        **{name: text[name] for name in COPIED_SETTINGS if name in text},
        **origin.settings,
        **family.write(config),
        **(_describe_labels(text | origin.settings, config) if config.scores else {}),
        **others,
    }
    return text_part.write_text(text if config.scores else whole, content)  # with scores, the text model alone


def _describe_labels(source: Settings, config: ModelConfig) -> Settings:
    """Return the names of the labels of a folder, if it has as many, and the token that pads documents.

    transformers reads the score at the last token that is not this one. So it must not end documents, as EOS does.
    """
    names: Settings = {name: source[name] for name in ("id2label", "label2id") if name in source}
    kept = names if isinstance(names.get("id2label"), dict) and len(names["id2label"]) == config.scores else {}
    ends = source.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    others = (source.get(name) for name in ("pad_token_id", "bos_token_id"))
    return {**kept, "pad_token_id": next((each for each in others if each is not None and each not in ends), None)}


def make_tensor_getter(
    path: Path, layouts: Mapping[str, TensorLayout], specs: Mapping[str, TensorSpec], source: Layers
) -> Callable[[str], np.ndarray]:
    """Return a function that fetches a tensor by its name."""

    @functools.lru_cache(maxsize=1)  # experts of a layer are requested one after the other and are fetched together
    def fetch_experts(path: str, layer: int, contracting: tuple[int, ...]) -> np.ndarray:
        return source.fetch(path, layer, contracting)

    def get_piece(piece: TensorPiece) -> np.ndarray:
        if piece.expert is None:
            padded = source.fetch(piece.path, piece.layer, piece.spec.contracting)
            return padded[tuple(slice(size) for size in piece.spec.shape)]
        assert piece.layer is not None
        experts = fetch_experts(piece.path, piece.layer, tuple(dim + 1 for dim in piece.spec.contracting))
        return experts[piece.expert]

    last_paths: list[str] = []

    def get_tensor(name: str) -> np.ndarray:
        layout = layouts[name]
        if last_paths != (paths := [piece.path for piece in layout.pieces]):
            last_paths[:] = paths
            source.release()
            fetch_experts.cache_clear()
        joined = layout.join([get_piece(piece) for piece in layout.pieces])
        return safetensors.round_finite(joined, specs[name].dtype, f"{path}: tensor {name!r}")

    return get_tensor


def collect_leaves(params: Params) -> dict[str, tree.Leaf]:
    """Return path -> leaf, where quantised weights and weights with adapters are single leaves."""
    return dict(tree.leaves_with_path(params, is_leaf=leaves.is_wrapped))
