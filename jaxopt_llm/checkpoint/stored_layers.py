"""Parameters read from their files one layer at a time, so that a model need not fit into memory to be written."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder
from jaxopt_llm.checkpoint.peft.adapter_folder import AdapterFolder
from jaxopt_llm.checkpoint.run_weights import RunWeights
from jaxopt_llm.core import tree
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.linear.leaves import LoraWeight, QuantisedWeight
from jaxopt_llm.model.param import ParamSpec


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
        spec = self.specs[path] if layer is None else jax.tree.map(ParamSpec.unstack, self.specs[path])
        if not isinstance(spec, LoraWeight):
            base = self._read_base(path, path, spec, layer)
            return base if isinstance(base, np.ndarray) else np.asarray(_merge(base, contracting))
        factors = replace(spec, base=None)
        read = tree.map_with_path(lambda name, each: self._read(f"{path}/{name}", each, layer), factors)
        base = self._read_base(path, f"{path}/base", spec.base, layer)
        return np.asarray(_merge(replace(read, base=base), contracting))

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
