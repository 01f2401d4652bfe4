"""The parameters of one of our own checkpoints, read in slices: into any mesh, and any layout of the same layers."""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore
from jax.sharding import NamedSharding

from jaxopt_llm.checkpoint import steps
from jaxopt_llm.checkpoint.huggingface import filled
from jaxopt_llm.checkpoint.native import FAILURES
from jaxopt_llm.errors import CheckpointError, InputError
from jaxopt_llm.model import decoder
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.param import ParamSpec

PARAMETERS = ("masters", "frozen")  # the trees of a checkpoint that hold them


def is_run(path: Path) -> bool:
    """Whether this is a run directory of ours, which a Hugging Face folder is not."""
    return (path / "checkpoints").is_dir()


@dataclass(frozen=True)
class RunWeights:
    """path: of the run; checkpoint: of a step of it that was verified. held: the model as the run has it, config: as it
    is wanted, with other stacks maybe of the same layers."""

    path: Path
    checkpoint: Path
    held: ModelConfig
    config: ModelConfig
    # Of the leaf that was asked for last, what its devices hold: a stack is one chunk of its file.
    _read: dict[str, np.ndarray] = field(default_factory=dict)

    @functools.cached_property
    def _where(self) -> dict[tuple[str, int], tuple[str, int]]:
        """Our prefix of a layer and its row -> the run's."""
        theirs = {layer: (prefix, row) for prefix, row, layer in decoder.places(self.held)}
        return {(prefix, row): theirs[layer] for prefix, row, layer in decoder.places(self.config)}

    @functools.cached_property
    def _dtypes(self) -> dict[str, tuple[str, np.dtype]]:
        """The run's leaf -> the tree that it is in, and its dtype."""
        arrays = steps.record(self.checkpoint)["arrays"]
        return {
            path: (name, jnp.dtype(described.split("[")[0]))
            for name in PARAMETERS
            for path, described in arrays.get(name, {}).items()
        }

    def dtype(self, path: str) -> np.dtype:
        """Of a leaf's values: the widest, where the run's differ."""
        prefix, name = _split(path)
        theirs = {there + name for (ours, _), (there, _) in self._where.items() if ours == prefix} or {path}
        return jnp.dtype(jnp.result_type(*(self._dtypes[each][1] for each in theirs)))

    def read(self, path: str, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        """A leaf, in the shape and dtype of its spec, zero where a place of a stack holds no layer. Raises InputError
        for values that are not finite there."""
        return filled(spec, sharding, functools.partial(self._fill, path))

    def _fill(self, path: str, out: np.ndarray, layer: int | None, index: tuple[slice, ...]) -> None:
        prefix, name = _split(path)
        if layer is None:
            source = self._stored(path, index)
        else:
            there, row = self._where[prefix, layer]
            source = self._stored(there + name, (slice(None), *index))[row]
        with np.errstate(over="ignore"):  # told below
            out[...] = source
        if not np.isfinite(out).all():
            raise InputError(f"{self.checkpoint}: {path} has values that are not finite in {out.dtype}")

    def _stored(self, path: str, index: tuple[slice, ...]) -> np.ndarray:
        """Of the run's leaf, with its stack's axis where it has one."""
        key = f"{path} {index}"
        if key not in self._read:
            if not any(other.startswith(f"{path} ") for other in self._read):
                self._read.clear()
            directory = self.checkpoint / self._dtypes[path][0]
            within = {"driver": "ocdbt", "base": f"file://{directory}", "path": path.replace("/", ".") + "/"}
            try:
                store = tensorstore.open({"driver": "zarr", "kvstore": within}, open=True, read=True).result()
                self._read[key] = store[index].read().result()
            except FAILURES as error:
                raise CheckpointError(f"checkpoint {self.checkpoint} cannot be read: {path}: {error}") from error
        return self._read[key]


def _split(path: str) -> tuple[str, str]:
    """The prefix of a layer's leaf, and its name there; of a leaf outside the stacks no prefix."""
    parts = path.split("/")
    return ("", path) if parts[0] == "outer" else ("/".join(parts[:2]) + "/", "/".join(parts[2:]))
