"""Writing of Hugging Face model folders, one tensor at a time."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.codecs import Settings
from jaxopt_llm.checkpoint.huggingface.model_folder import CONFIG_FILE, choose_family, read_settings
from jaxopt_llm.checkpoint.huggingface.safetensors import NewFolder, TensorSpec
from jaxopt_llm.checkpoint.huggingface.tensor_layout import TensorLayout, TensorPiece, list_tensor_layouts
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core import tree
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel import offload

# What an export copies from the folder that the weights came from: nothing that names code, people or places.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
COPIED_SETTINGS = (*TOKEN_IDS, "max_position_embeddings", "initializer_range")


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
        """Return the dtype of a parameter: that of its base, and float32 for a quantised base."""

    def fetch(self, path: str, layer: int | None, contracting: tuple[int, ...]) -> np.ndarray:
        """Return a parameter dequantised and with its adapter merged: see `fetch_layer`."""

    def release(self) -> None:
        """Remove what was read from memory, because other parameters follow."""


@dataclass(frozen=True)
class LoadedLayers:
    """Parameters that are in memory. leaves: by path; quantised weights and weights with adapters are single leaves."""

    leaves: Mapping[str, tree.Leaf]

    def dtype(self, path: str) -> np.dtype:
        return leaves.weight_dtype(self.leaves[path])

    def fetch(self, path: str, layer: int | None, contracting: tuple[int, ...]) -> np.ndarray:
        return fetch_layer(self.leaves[path], layer, (), contracting)

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

    Raises:
        InputError: no family fits the model, the path already exists, or a value is not finite in the dtype.
    """
    origin = origin or Origin()
    origin_settings = {} if origin.folder is None else read_settings(origin.folder)
    family = choose_family(config, origin.folder)
    layouts = list_tensor_layouts(family, config)
    fixed = {name for name, layout in layouts.items() if layout.pieces[0].spec.sign_rate is not None}
    # All pieces of a tensor have the same dtype.
    dtypes = {name: source.dtype(layout.pieces[0].path) for name, layout in layouts.items()}
    if dtype is not None:
        dtypes |= {name: jnp.dtype(dtype) for name in layouts if name not in fixed}
    # The widest dtypes come first, so that each tensor is aligned in its file.
    widest_first = sorted(layouts, key=lambda name: -dtypes[name].itemsize)
    specs = {name: TensorSpec(dtypes[name], layouts[name].shape) for name in widest_first}
    # Files hold one layer after the other. The tensors are written parameter by parameter, because the layers of a
    # parameter are next to each other where they are read.
    order = sorted(layouts, key=lambda name: [piece.path for piece in layouts[name].pieces])
    with NewFolder(path) as folder:
        get_tensor = make_tensor_getter(path, layouts, specs, source)
        safetensors.write_folder(folder, specs, get_tensor, max_file_bytes, order)
        content = {
            **dict.fromkeys(TOKEN_IDS),  # null, because transformers has defaults that may be outside the vocabulary
            **{name: origin_settings[name] for name in COPIED_SETTINGS if name in origin_settings},
            **origin.settings,
            **family.write(config),
            "torch_dtype": str(next(dtypes[name] for name in widest_first if name not in fixed)),
        }
        (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")
        origin.write_files(folder)


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


def fetch_layer(
    leaf: tree.Leaf, layer: int | None, sizes: tuple[int, ...], contracting: tuple[int, ...] = ()
) -> np.ndarray:
    """Fetch one layer of a leaf to the host, dequantised and with its adapter merged.

    Args:
        leaf: the leaf, on any devices.
        layer: index in the stack; None for a leaf that is not stacked.
        sizes: sizes of the dimensions without padding; empty: keep all.
        contracting: the dimensions that a product with the layer sums over.
    """
    stack = jax.tree.map(lambda array: array[None], leaf) if layer is None else leaf
    sharding = jax.tree.leaves(leaf)[0].sharding
    assert isinstance(sharding, NamedSharding)
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    array = np.asarray(_compile_fetch(replicated)(stack, layer or 0, contracting))
    return array[tuple(slice(size) for size in sizes)]


@functools.cache
def _compile_fetch(replicated: NamedSharding) -> Callable[[tree.Leaf, int, tuple[int, ...]], jax.Array]:
    """Return a jitted function that merges one row of a stack on every device.

    If the stack is in host memory, only that row is copied to the devices.
    """

    def take(stack: tree.Leaf, row: jax.Array, contracting: tuple[int, ...]) -> jax.Array:
        def take_row(array: jax.Array) -> jax.Array:
            return offload.fetch_to_device(jax.lax.dynamic_index_in_dim(array, row, keepdims=False))

        return leaves.merge_to_array(jax.tree.map(take_row, stack), contracting)

    return jax.jit(take, static_argnums=2, out_shardings=replicated)
