"""Parameters of one of our own checkpoints, read in slices into any mesh and any grouping of the same layers.

They are also read one layer at a time, so that a model need not fit into memory to be written.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import NamedSharding

from jaxopt_llm.checkpoint.huggingface.model_folder import (
    ModelFolder,
    build_leaf,
    copy_finite,
    copy_table,
    is_of_scores,
)
from jaxopt_llm.checkpoint.native import step_directories
from jaxopt_llm.checkpoint.native.checkpoints import STORAGE_ERRORS
from jaxopt_llm.checkpoint.peft.adapter_folder import AdapterFolder
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import CheckpointError, InputError
from jaxopt_llm.model import decoder_specs
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.linear.leaves import LoraWeight, QuantisedWeight
from jaxopt_llm.model.param import ParamSpec

AVERAGE = "average"  # the tree of a checkpoint with the average of its trained parameters, `training.ema_decay`


def find_trained_tree(checkpoint: Path) -> str:
    """Return the tree of a checkpoint that holds the trained parameters to use: their average if there is one.

    Raises:
        CheckpointError: the checkpoint was deleted.
    """
    try:
        arrays = step_directories.read_record(checkpoint)["arrays"]
    except OSError as error:
        raise CheckpointError(f"checkpoint {checkpoint} cannot be read: {error}") from error
    return AVERAGE if AVERAGE in arrays else "masters"


def describe_average(directory: Path, step: int) -> str:
    """Return a line about the use of the average in a checkpoint of a run."""
    return f"step {step} of {directory}: the average of the trained weights is used (training.ema_decay)"


def is_run_directory(path: Path) -> bool:
    """Return whether a path is one of our run directories, in contrast to a Hugging Face folder."""
    return (path / "checkpoints").is_dir()


_LACKS = {
    "family": "is a run, which has no model_type",
    "step": "is a model folder, which has no steps",
    "base": "is a model folder, which has no other base",
}


def refuse_option(option: str, value: object, path: object) -> None:
    """Raise InputError if an option is given that a run, or a model folder, does not have.

    option: as it was given, with what separates it from its value: "--step " or "step=".
    """
    if value not in (None, ""):
        name = option.rpartition(".")[2].strip("-= ")
        raise InputError(f"{option}{value}: {path} {_LACKS[name]}; leave it out")


class _Slices(NamedTuple):
    """Slices of a leaf. If the leaf is a stack, they are of its rows from `first` on."""

    first: int
    rows: np.ndarray


@dataclass(frozen=True)
class RunWeights:
    """Parameters of a verified checkpoint of a run; of those that were trained their average, if it has one.

    Attributes:
        path: the run directory.
        checkpoint: the directory of the verified step.
        run_config: the model as the run has it.
        config: the model to read into. It has the same layers, possibly grouped into other stacks. Its vocabulary may
            be larger.
        base: the folder that the parameters missing from the checkpoint came from, opened for `config`; None if the
            checkpoint has all parameters.
    """

    path: Path
    checkpoint: Path
    run_config: ModelConfig
    config: ModelConfig
    base: ModelFolder | None = None
    # Slices of the last leaf that was read, as this process's devices hold it: rows that are one chunk of a file.
    _cache: dict[tuple[str, str, str], _Slices] = field(default_factory=dict)

    @functools.cached_property
    def _run_positions(self) -> dict[tuple[str, int], tuple[str, int]]:
        """Path prefix and stack row of each layer in `config` -> those in the run."""
        run_positions = {layer: (prefix, row) for prefix, row, layer in decoder_specs.locate_layers(self.run_config)}
        return {(prefix, row): run_positions[layer] for prefix, row, layer in decoder_specs.locate_layers(self.config)}

    @functools.cached_property
    def _run_leaves(self) -> dict[str, tuple[str, np.dtype]]:
        """Leaf path in the run -> its checkpoint tree and its dtype."""
        arrays = step_directories.read_record(self.checkpoint)["arrays"]
        return {
            path: (name, jnp.dtype(description.split("[")[0]))
            for name in (find_trained_tree(self.checkpoint), "frozen")
            for path, description in arrays.get(name, {}).items()
        }

    def dtype(self, path: str) -> np.dtype:
        """Return the dtype of a leaf's stored values; the widest one if the run's dtypes differ."""
        prefix, name = _split_path(path)
        positions = self._run_positions.items()
        run_paths = {run_prefix + name for (ours, _), (run_prefix, _) in positions if ours == prefix} or {path}
        found = [self._run_leaves[each][1] for each in run_paths if each in self._run_leaves]
        return jnp.dtype(jnp.result_type(*found, *([self._base.dtype(path)] if len(found) < len(run_paths) else [])))

    def lacks(self, path: str) -> bool:
        """Return whether a parameter is new: the scores of a model that was trained without."""
        return is_of_scores(path) and not self.run_config.scores

    def holds(self, path: str) -> bool:
        """Return whether the checkpoint holds a leaf of the run."""
        return path in self._run_leaves

    def read(self, path: str, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        """Read a leaf in the shape and dtype of its spec; stack rows that hold no layer are 0.

        Raises:
            InputError: a value is not finite in the dtype of the spec.
        """
        grows = "vocabulary" in spec.axes and self.config.vocabulary_size > self.run_config.vocabulary_size
        fill = self._fill_larger_table if grows and path in self._run_leaves else self.fill
        self.release(keep=path)
        return build_leaf(spec, sharding, functools.partial(fill, path))

    def _fill_larger_table(self, path: str, out: np.ndarray, layer: None, index: tuple[slice, ...]) -> None:
        table = self._read_slice(path, path, layer, (slice(self.run_config.vocabulary_size),))
        copy_table(table, out, index, self.config.vocabulary_size, f"{self.checkpoint}: {path}")

    def release(self, keep: str = "") -> None:
        """Remove the slices of leaves that were read from memory, except those of the leaf `keep`."""
        for key in [key for key in self._cache if key[0] != keep]:
            del self._cache[key]

    def fill(self, path: str, out: np.ndarray, layer: int | None, index: tuple[slice, ...]) -> None:
        """Write the slices `index` of one layer of a leaf into `out`: see `build_leaf`."""
        prefix, name = _split_path(path)
        run_prefix, row = (prefix, None) if layer is None else self._run_positions[prefix, layer]
        if run_prefix + name not in self._run_leaves:
            self._base.fill(path, out, layer, index)
            return
        source = self._read_slice(path, run_prefix + name, row, index)
        if source.shape != out.shape:  # `copy_finite` would leave the rest of `out` at zero
            problem = f"{path} has shape {source.shape}, not {out.shape}"
            raise CheckpointError(f"checkpoint {self.checkpoint} belongs to another model: {problem}")
        copy_finite(source, out, f"{self.checkpoint}: {path}")

    @property
    def _base(self) -> ModelFolder:
        if self.base is None:
            raise CheckpointError(
                f"checkpoint {self.checkpoint} belongs to another model: it lacks parameters of this one; use the "
                "model configuration of its run"
            )
        return self.base

    def _read_slice(self, path: str, run_path: str, row: int | None, index: tuple[slice, ...]) -> np.ndarray:
        """Read a slice of the run's leaf; of a stack, return one row, but read and cache the rows of its chunk.

        path: the leaf that it is read into.
        """
        key = (path, run_path, str(index))
        cached = self._cache.get(key)
        if cached is not None and (row is None or cached.first <= row < cached.first + len(cached.rows)):
            return cached.rows if row is None else cached.rows[row - cached.first]
        directory = self.checkpoint / self._run_leaves[run_path][0]
        # Not a URL, in which a relative path, "%" and "#" have other meanings.
        base = {"driver": "file", "path": f"{directory.absolute()}/"}
        kvstore = {"driver": "ocdbt", "base": base, "path": run_path.replace("/", ".") + "/"}
        try:
            store = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True, read=True).result()
            if row is None:
                cached = _Slices(0, store[index].read().result())
            else:
                chunk = store.chunk_layout.read_chunk.shape
                assert chunk is not None and chunk[0] is not None
                first = row - row % chunk[0]
                block = slice(first, min(first + chunk[0], store.shape[0]))
                cached = _Slices(first, store[(block, *index)].read().result())
        except STORAGE_ERRORS as error:
            raise CheckpointError(f"checkpoint {self.checkpoint} cannot be read: {run_path}: {error}") from error
        self._cache[key] = cached
        return cached.rows if row is None else cached.rows[row - cached.first]


def _split_path(path: str) -> tuple[str, str]:
    """Split a leaf path into the prefix of its block and its name there; a leaf outside the stacks has no prefix."""
    parts = path.split("/")
    return ("", path) if parts[0] == "non_layer" else ("/".join(parts[:2]) + "/", "/".join(parts[2:]))


@dataclass(frozen=True)
class StoredLayers:
    """Parameters in files, with their adapters: the `Layers` of a run or of a Hugging Face folder.

    Attributes:
        specs: specs of the parameters by path, in their dtypes at rest; quantised weights and weights with adapters are
            single leaves.
        run: the checkpoint of a run; None for a folder.
        folder: folder with the parameters that the checkpoint does not hold; None if it holds all.
        adapters: PEFT folder whose adapters are in `specs`; None if there is none.
    """

    specs: Mapping[str, tree.Leaf]
    run: RunWeights | None
    folder: ModelFolder | None
    adapters: AdapterFolder | None = None

    def dtype(self, path: str) -> np.dtype:
        return leaves.weight_dtype(self.specs[path])

    def fetch(self, path: str, layer: int | None, contracting: tuple[int, ...]) -> np.ndarray:
        return self.fetch_merged(path, layer)  # the specs say what is contracted

    def fetch_merged(self, path: str, layer: int | None) -> np.ndarray:
        """Return one layer of a parameter dequantised and with its adapter merged."""
        return self.merge(path, self.read(path, layer), layer)

    def merge(self, path: str, leaf: tree.Leaf, layer: int | None) -> np.ndarray:
        """Return what `read` returned dequantised and with its adapter merged."""
        spec = leaves.unwrap_specs(self.specs[path])
        contracting = (spec if layer is None else spec.unstack()).contracting
        return leaf if isinstance(leaf, np.ndarray) else np.asarray(_merge(leaf, contracting))

    def read(self, path: str, layer: int | None) -> tree.Leaf:
        """Return one layer of a parameter as it is stored: an array, codes, or either with the arrays of an adapter."""
        spec = self.specs[path] if layer is None else jax.tree.map(ParamSpec.unstack, self.specs[path])
        if not isinstance(spec, LoraWeight):
            return self._read_base(path, path, spec, layer)
        factors = replace(spec, base=None)
        read = tree.map_with_path(lambda name, each: self._read(f"{path}/{name}", each, layer), factors)
        return replace(read, base=self._read_base(path, f"{path}/base", spec.base, layer))

    def release(self) -> None:
        if self.run is not None:
            self.run.release()

    def _read_base(self, path: str, name: str, spec: ParamSpec | QuantisedWeight, layer: int | None) -> tree.Leaf:
        """Read a weight without its adapter. name: its path in a checkpoint."""
        parts = [name if isinstance(spec, ParamSpec) else f"{name}/{each}" for each, _ in tree.leaves_with_path(spec)]
        if self.folder is None or (self.run is not None and self.run.holds(parts[0])):
            if isinstance(spec, ParamSpec):
                return self._read(name, spec, layer)
            return tree.map_with_path(lambda part, each: self._read(f"{name}/{part}", each, layer), spec)
        # Quantisation starts from the stored dtype, as in training.
        dtype = self.folder.dtype(path) if isinstance(spec, QuantisedWeight) else spec.dtype
        out = np.zeros(leaves.unwrap_specs(spec).shape, dtype)
        self.folder.fill(path, out, layer, (slice(None),) * out.ndim)
        return out if isinstance(spec, ParamSpec) else _quantise(out, spec)

    def _read(self, name: str, spec: ParamSpec, layer: int | None) -> np.ndarray:
        """Read an array of a checkpoint, or of an adapter."""
        out = np.zeros(spec.shape, spec.dtype)
        source = self.adapters if self.run is None else self.run
        assert source is not None
        source.fill(name, out, layer, (slice(None),) * out.ndim)
        return out


_quantise = jax.jit(leaves.quantise, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def _merge(leaf: tree.Leaf, contracting: tuple[int, ...]) -> jax.Array:
    return leaves.merge_to_array(leaf, contracting)
