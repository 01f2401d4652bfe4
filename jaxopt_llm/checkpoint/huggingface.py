"""Hugging Face's folders, config.json beside safetensors: read straight into sharded places, and written.

Each device's part of a parameter is filled from slices of the memory-mapped tensors, layer by layer: beside the parts
of this process's devices the host holds one tensor at most.
"""

import functools
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm import tree
from jaxopt_llm.checkpoint import families, safetensors
from jaxopt_llm.checkpoint.codecs import Settings, Unsupported
from jaxopt_llm.checkpoint.family import Family
from jaxopt_llm.checkpoint.safetensors import Described, NewFolder, Stored
from jaxopt_llm.checkpoint.tensors import Piece, Tensor, tensors
from jaxopt_llm.errors import InputError
from jaxopt_llm.model import leaves
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel import offload

CONFIG = "config.json"
DIGESTED = 2**18  # bytes of a tensor, or a row of it, that tell it from others
DIGESTED_IN_ALL = 2**29  # where tensors are so many that each has fewer
# What an export takes over from the folder that the weights came from: nothing that names code, people or places.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
KEPT_SETTINGS = (*TOKEN_IDS, "max_position_embeddings", "initializer_range")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


# --- reading


def read_settings(path: Path) -> Settings:
    file = path / CONFIG
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; download the model first, as in: hf download NAME --local-dir DIR")
    if not file.is_file():
        raise InputError(f"{path}: no folder of a Hugging Face model: it has no {CONFIG}")
    return safetensors.parse_json(file.read_bytes(), file)


def read_config(path: Path) -> tuple[Family, ModelConfig]:
    """What a folder's config.json says. Code that it names is never run: what it does not say here is refused."""
    settings = read_settings(path)
    try:
        family = families.find(settings)
        return family, family.read(settings)
    except Unsupported as error:
        raise InputError(f"{path / CONFIG}: {error}") from error


def filled(
    spec: ParamSpec, sharding: NamedSharding, fill: Callable[[np.ndarray, int | None, tuple[slice, ...]], None]
) -> jax.Array:
    """A leaf of zeros, of which `fill(zeros, layer, index)` writes each part that a device holds: of one layer of the
    stack, None of what is in none, what the index selects of it."""
    parts: dict[str, np.ndarray] = {}  # devices that hold the same have one between them

    def part(index: Any) -> np.ndarray:  # a slice for each dimension
        if (key := str(index)) not in parts:
            parts[key] = whole_part(index)
        return parts[key]

    def whole_part(index: tuple[slice, ...]) -> np.ndarray:
        ranges = [range(size)[each] for size, each in zip(spec.shape, index, strict=True)]
        out = np.zeros([len(each) for each in ranges], spec.dtype)
        stack = np.zeros((), np.int64) if spec.layers is None else np.asarray(spec.layers)
        numbers = stack[index[: spec.leading]]
        for place in np.ndindex(numbers.shape):
            if numbers[place] >= 0:
                layer = None if spec.layers is None else int(numbers[place])
                fill(out[place], layer, index[spec.leading :])
        return out

    return jax.make_array_from_callback(spec.shape, sharding, part)


def family_of(config: ModelConfig, source: Path | None = None) -> Family:
    """The family that serves a model: that of the folder that it came from, if it can. Raises InputError where none
    has such a model."""
    preferred = None if source is None else read_settings(source).get("model_type")
    try:
        return families.fitting(config, preferred)
    except Unsupported as error:
        raise InputError(str(error)) from error


@dataclass(frozen=True)
class Folder:
    """A folder whose headers are checked: every tensor is there once, in its shape, and no other."""

    path: Path
    family: Family
    config: ModelConfig
    stored: Mapping[str, Stored]

    @functools.cached_property
    def _where(self) -> dict[tuple[str, int | None], list[tuple[str, Tensor, Piece]]]:
        """Our leaf and the place in its stack -> the tensor that it is in, or that of each expert."""
        where: dict[tuple[str, int | None], list[tuple[str, Tensor, Piece]]] = {}
        for name, tensor in tensors(self.family, self.config).items():
            for piece in tensor.pieces:
                where.setdefault((piece.path, piece.layer), []).append((name, tensor, piece))
        return where

    @functools.cached_property
    def sha256(self) -> str:
        """Of what tells these weights from others: each tensor's name, dtype and shape, and rows from all over it (all
        of them would take as long as reading the folder)."""
        digest, most = hashlib.sha256(), min(DIGESTED, DIGESTED_IN_ALL // len(self.stored))
        for name, stored in sorted(self.stored.items()):
            every = max(1, stored.array.nbytes // most)
            digest.update(f"{name} {stored.array.dtype} {stored.array.shape} ".encode())
            digest.update(np.ascontiguousarray(stored.array[::every]).view(np.uint8).data)
            stored.release()
        return digest.hexdigest()

    def dtype(self, path: str) -> np.dtype:
        """Of a leaf's values: the widest, where its tensors differ."""
        names = [name for (leaf, _), places in self._where.items() if leaf == path for name, *_ in places]
        held = {self.stored[name].array.dtype for name in names}
        return jnp.dtype(jnp.result_type(*held))

    def read(self, path: str, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        """A leaf, in the shape and dtype of its spec. Raises InputError for values that are not finite there.

        Rows that pad a table, and places of a stack that hold no layer, are zero.
        """
        return filled(spec, sharding, functools.partial(self.fill, path))

    def fill(self, path: str, out: np.ndarray, layer: int | None, index: tuple[slice, ...]) -> None:
        """Writes what the index selects of a leaf's layer: see `filled`."""
        places = self._where[path, layer]
        if places[0][2].expert is None:
            self._fill(*places[0], out, index)
        else:
            for place, of_expert in zip(places[index[0]], out, strict=True):
                self._fill(*place, of_expert, index[1:])

    def _fill(self, name: str, tensor: Tensor, piece: Piece, out: np.ndarray, index: tuple[slice, ...]) -> None:
        stored = self.stored[name]
        source = tensor.view(stored.array, piece)[index]
        out = out[tuple(slice(size) for size in source.shape)]  # fewer rows than ours where ours are padded
        with np.errstate(over="ignore"):  # told below
            out[...] = source
        if not np.isfinite(out).all():
            raise InputError(f"{stored.file}: tensor {name!r} has values that are not finite in {out.dtype}")
        stored.release()


def open_folder(path: Path) -> Folder:
    """Raises InputError for what is no whole folder of a known family."""
    family, config = read_config(path)
    stored = dict(safetensors.open_folder(path))
    wanted = tensors(family, config)
    if not any(name.startswith(family.base) for name in stored):  # the model without its head, as GPT-2's first folder
        stored = {name if name in wanted else family.base + name: each for name, each in stored.items()}
    layer = family.predicts_more.format(config.layers)
    ignored = (*family.ignored, f"{layer}*") if f"{layer}eh_proj.weight" in stored else family.ignored
    stored = {name: each for name, each in stored.items() if not any(fnmatchcase(name, p) for p in ignored)}
    stored = _as_published(family, config, stored, wanted)
    for name, tensor in wanted.items():
        if name not in stored:
            raise InputError(f"{path}: tensor {name!r} is missing")
        found = stored[name]
        if found.array.dtype not in safetensors.FLOATS.values():
            raise safetensors.not_float(found.file, name, str(found.array.dtype))
        _check_shape(name, found, tensor.shape)
    if config.tied_head:
        _check_tied(family, stored)
    for name, extra in stored.items():
        if name not in wanted:
            raise InputError(f"{extra.file}: tensor {name!r} is none of a {family.architecture}'s as {CONFIG} has it")
    return Folder(path, family, config, stored)


def _as_published(
    family: Family, config: ModelConfig, stored: Mapping[str, Stored], wanted: Mapping[str, Tensor]
) -> dict[str, Stored]:
    """The same by the names that folders have, where it is as transformers' classes hold it: views."""
    found = dict(stored)
    for layer in range(config.layers):
        for theirs, published in family.in_memory.items():
            name, parts = theirs.format(layer), published.split()
            first = wanted.get(parts[0].format(layer, 0))
            if name not in found or first is None:
                continue
            one = found.pop(name)
            if not first.of_expert:
                views = {parts[0].format(layer): one.array}
            else:
                rows, columns = first.shape
                _check_shape(name, one, (config.experts, len(parts) * rows, columns))
                views = {
                    part.format(layer, expert): view
                    for expert, of_expert in enumerate(one.array)
                    for part, view in zip(parts, np.split(of_expert, len(parts)), strict=True)
                }
            if twice := views.keys() & found.keys():
                raise InputError(f"{one.file}: tensor {min(twice)!r} is there twice, and once within {name!r}")
            found |= {part: one._replace(array=view) for part, view in views.items()}
    return found


def _check_shape(name: str, found: Stored, shape: tuple[int, ...]) -> None:
    if found.array.shape != shape:
        raise InputError(
            f"{found.file}: tensor {name!r} is {list(found.array.shape)}, and by {CONFIG} it must be {list(shape)}"
        )


def _check_tied(family: Family, stored: dict[str, Stored]) -> None:
    """A head beside a table that is the head, too, must be the same: it is left out."""
    head, table = ("lm_head.weight", next(n for n, ours in family.names.items() if ours == "outer/embedding/table"))
    if head not in stored:
        return
    one, other = stored.pop(head), stored[table]
    if not equal(one, other):
        raise InputError(
            f"{one.file}: tensor {head!r} differs from {table!r}, and by {CONFIG} they are tied: set "
            "tie_word_embeddings to false there if the head is one of its own"
        )


def equal(one: Stored, other: Stored) -> bool:
    """Whether two tensors have the same values."""
    rows = 1 + 2**24 // max(1, math.prod(one.array.shape[1:]))  # compared at once
    same = one.array.shape == other.array.shape and all(
        np.array_equal(one.array[at : at + rows], other.array[at : at + rows]) for at in range(0, len(one.array), rows)
    )
    for each in (one, other):
        each.release()
    return same


# --- writing


def write(
    path: Path,
    params: Params,
    config: ModelConfig,
    source: Path | None = None,
    tokenizer: Path | None = None,
    dtype: Any = None,
    most: int = safetensors.MOST_FILE,
    settings: Settings | None = None,
) -> None:
    """A new folder of a model's parameters, which transformers loads: bare ones, or what they stand for, codes widened
    and adapters folded in, in float32 until they are rounded to the tensors' dtype.

    source: the folder that they came from, whose token ids are kept. tokenizer: the folder of that, which is copied.
    dtype: of the tensors, in place of the parameters' own, but for what steps of one size move. most: bytes in a file.
    settings: further fields of config.json, of which those of the source win.

    Raises InputError where no family has such a model, or something is there already.
    """
    kept = {} if source is None else read_settings(source)
    served_by = family_of(config, source)
    values = by_path(params)
    wanted = tensors(served_by, config)
    exact = {name for name, tensor in wanted.items() if tensor.pieces[0].spec.sign_rate is not None}

    def dtype_of(name: str) -> np.dtype:
        """The pieces of a tensor have one."""
        own = leaves.dtype(values[wanted[name].pieces[0].path])
        return own if dtype is None or name in exact else jnp.dtype(dtype)

    dtypes = {name: dtype_of(name) for name in wanted}
    # So that each is aligned in its file.
    widest_first = sorted(wanted, key=lambda name: -dtypes[name].itemsize)
    described = {name: Described(dtypes[name], wanted[name].shape) for name in widest_first}

    @functools.lru_cache(maxsize=1)  # experts of a layer, which are asked for in turn, come from the devices at once
    def experts(path: str, layer: int, contracting: tuple[int, ...]) -> np.ndarray:
        return one_layer(values[path], layer, (), contracting)

    def get_piece(piece: Piece) -> np.ndarray:
        if piece.expert is None:
            return one_layer(values[piece.path], piece.layer, piece.spec.shape, piece.spec.contracting)
        assert piece.layer is not None
        return experts(piece.path, piece.layer, tuple(dim + 1 for dim in piece.spec.contracting))[piece.expert]

    def get(name: str) -> np.ndarray:
        tensor = wanted[name]
        arrays = [get_piece(piece) for piece in tensor.pieces]
        with np.errstate(over="ignore"):  # told below
            joined = tensor.join(arrays).astype(described[name].dtype, copy=False)
        if not np.isfinite(joined).all():
            raise InputError(f"{path}: tensor {name!r} has values that are not finite in {joined.dtype}")
        return joined

    with NewFolder(path) as folder:
        safetensors.write_folder(folder, described, get, most)
        said = {
            **dict.fromkeys(TOKEN_IDS),  # null, for transformers has defaults that no vocabulary need have
            **(settings or {}),
            **{name: kept[name] for name in KEPT_SETTINGS if name in kept},
            **served_by.write(config),
            "torch_dtype": str(next(dtypes[name] for name in widest_first if name not in exact)),
        }
        (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n")
        for name in TOKENIZER_FILES:
            if tokenizer is not None and (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)


def by_path(params: Params) -> dict[str, tree.Leaf]:
    """The leaves that stand for a bare parameter, by its path."""
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=leaves.is_wrapped)
    return {tree.path_string(path): leaf for path, leaf in found}


def one_layer(
    leaf: tree.Leaf, layer: int | None, sizes: tuple[int, ...], contracting: tuple[int, ...] = ()
) -> np.ndarray:
    """What one layer of a leaf stands for, whichever devices hold it; of a padded dimension, as much as `sizes` says.
    contracting: the dimensions that a product of it sums over."""
    stack = jax.tree.map(lambda array: array[None], leaf) if layer is None else leaf
    sharding = jax.tree.leaves(leaf)[0].sharding
    assert isinstance(sharding, NamedSharding)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    ours = np.asarray(_take_layer(whole)(stack, layer or 0, contracting))
    return ours[tuple(slice(size) for size in sizes)]


@functools.cache
def _take_layer(whole: NamedSharding) -> Callable[[tree.Leaf, int, tuple[int, ...]], jax.Array]:
    """What the row of a stack stands for, on every device; a stack on the host comes no further than that row."""

    def take(stack: tree.Leaf, row: jax.Array, contracting: tuple[int, ...]) -> jax.Array:
        def row_of(array: jax.Array) -> jax.Array:
            return offload.fetch(jax.lax.dynamic_index_in_dim(array, row, keepdims=False))

        return leaves.merged(jax.tree.map(row_of, stack), contracting)

    return jax.jit(take, static_argnums=2, out_shardings=whole)
