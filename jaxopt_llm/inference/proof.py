"""Proof of a written folder: it is read back and compared with the parameters that it was written from.

1. Its config.json is the configuration of the model, and the tensors of other parts are those of the source.
2. Each parameter equals the source's, with adapters merged and rounded to the dtype of the folder, to the bit.
3. Each merged matrix computes the same as base plus adapter, in float32, on random inputs, within rounding.

From 2 and 3 follows that the folder computes what the source does, up to the rounding of its weights. That rounding
may be larger than a small adapter, which only a comparison before it can find. One layer is in memory at a time, of the
source or of the folder, in its own dtype. Experts are merged, compared and multiplied one by one.
"""

import functools
import math
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.family import list_differences
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder
from jaxopt_llm.checkpoint.huggingface.text_part import Rest
from jaxopt_llm.checkpoint.run_weights import StoredLayers
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.inference.streamed import Read, StreamedModel, open_stream
from jaxopt_llm.model.linear import leaves, weights
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.gathering import attach_shardings

ROWS, ROW_TOKENS = 2, 64
PRODUCT_TOKENS = 8  # of the random input of one matrix
# A sum of n float32 products differs by about eps * sqrt(n) / 8 with the order of its terms, and a few such sums follow
# one another. Measured for widths of 32 to 1024: at most a fifth of this limit.
ROUNDING = 4 * float(np.finfo(np.float32).eps)
REMEDY = "nothing was kept, and the sources are as they were; report this, or write it without the check: --no-check"


@dataclass(frozen=True)
class Proof:
    """Losses of random tokens, in nats per token, or means of their scores: of the source, and of the folder."""

    source: float
    written: float
    measure: str = "loss"

    def describe(self) -> str:
        return (
            f"checked by reading it back: the {self.measure} of {ROWS} rows of random tokens is {self.written:.5f}, "
            f"and {self.source:.5f} before the weights were rounded"
        )


def check_folder(path: Path, target: Path, source: StoredLayers, config: ModelConfig, rest: Rest) -> Proof:
    """Compare a folder with its source.

    Args:
        path: where the folder is now. target: where it will be, for messages.
        source: the parameters that it was written from.
        config: the model.
        rest: the tensors that it keeps of another folder.

    Raises:
        InputError: they differ; the message names the first layer and the first parameter that does.
    """
    # A folder that holds more keeps its model_type, also one that is read as another on request.
    written = huggingface.open_model_folder(path, config.family if rest.is_part else "", config.mtp_layers)
    if differences := list_differences(config, written.config):
        raise InputError(f"{target}: its config.json reads back without {', '.join(differences)}; {REMEDY}")
    if changed := rest.find_changed(safetensors.open_folder(path)):
        raise InputError(f"{target}: tensor {changed!r} is not that of {rest.folder}; {REMEDY}")
    positions = config.max_positions if config.positions == "learned" else ROW_TOKENS
    ids = np.random.default_rng(0).integers(0, config.vocabulary_size, (ROWS, min(ROW_TOKENS, positions)), np.int32)
    return _Comparison(target, source, written.for_model(config), ids).run()


@dataclass(frozen=True)
class _Comparison:
    """Comparison of a source and a folder that was written from it, on tokens [B, S]."""

    target: Path
    source: StoredLayers
    written: ModelFolder
    ids: NDArray[np.int32]

    @functools.cached_property
    def stream(self) -> StreamedModel:
        """The model with the adapters and the codes of the source."""
        return open_stream(self.written.config, self.ids, self.source.specs)

    def run(self) -> Proof:
        stream, bare = self.stream, open_stream(self.written.config, self.ids)
        outside, merged_outside, held_outside = self._read(stream.read_outside, "outside the layers")
        x, y = stream.embed(outside), bare.embed(held_outside)
        self._compare_outputs("the embedding", outside, x.x, lambda: bare.embed(merged_outside).x)
        for layer in stream.layers:
            read = functools.partial(self._read_and_compare, f"layer {layer.number}")
            # One after the other: a layer of 256 experts is tens of gigabytes.
            x = jax.block_until_ready(stream.run(layer, stream.read_layer(read, layer), x))
            y = jax.block_until_ready(bare.run(layer, stream.read_layer(self._read_written, layer), y))
        for module in stream.modules:  # of multi-token prediction, which do not run
            stream.read_layer(functools.partial(self._read_and_compare, f"layer {module.number}"), module)
        logits = stream.logits(outside, x)
        self._compare_outputs("the head", outside, logits, lambda: bare.logits(merged_outside, x))
        written = bare.logits(held_outside, y)
        if self.written.config.scores:
            return Proof(float(np.mean(logits)), float(np.mean(written)), "mean score")
        return Proof(_measure_loss(logits, self.ids), _measure_loss(written, self.ids))

    def _read_and_compare(self, where: str, path: str, row: int | None) -> tree.Leaf:
        """Return one layer of a parameter of the source, and compare it with the folder's.

        Raises:
            InputError: they differ.
        """
        leaf, spec = self.source.read(path, row), self._layer_spec(path, row)
        self.source.release()
        everything = (slice(None),) * len(spec.shape)
        for expert in range(spec.shape[0] if spec.expert_dims else 1):
            index = (slice(expert, expert + 1), *everything[1:]) if spec.expert_dims else everything
            part = jax.tree.map(lambda array, part=index[:1]: array[part], leaf)
            merged = self.source.merge(path, part, row)
            self._compare_values(path, row, merged, self._read_held(path, row, merged.shape, index), where, expert)
            if leaves.is_wrapped(leaf):
                self._compare_products(path, part, merged, where)
        return jax.tree.map(jnp.asarray, leaf)

    def _read_written(self, path: str, row: int | None) -> jax.Array:
        return jnp.asarray(self._read_held(path, row, self._layer_spec(path, row).shape))

    def _read_held(
        self, path: str, row: int | None, shape: tuple[int, ...], index: tuple[slice, ...] | None = None
    ) -> np.ndarray:
        """Return a parameter of the folder, or the part of it at some indices, in the folder's dtype."""
        held = np.zeros(shape, self.written.dtype(path))
        self.written.fill(path, held, row, index or (slice(None),) * held.ndim)
        return held

    def _layer_spec(self, path: str, row: int | None) -> ParamSpec:
        spec: ParamSpec = leaves.unwrap_specs(self.source.specs[path])
        return spec if row is None else spec.unstack()

    def _compare_products(self, path: str, leaf: tree.Leaf, merged: np.ndarray, where: str) -> None:
        """Compare products of random inputs with a matrix (or the matrix of one expert) and with the merged one.

        The products with base plus adapter are computed as in training.
        """
        specs = jax.tree.map(ParamSpec.unstack, self.source.specs[path])
        matrix, whole = jax.tree.map(jnp.asarray, leaf), jnp.asarray(merged)
        if leaves.unwrap_specs(specs).expert_dims:
            specs = jax.tree.map(lambda spec: spec.drop_leading(1), specs)
            matrix, whole = jax.tree.map(lambda array: array[0], (matrix, whole))
        bare: ParamSpec = leaves.unwrap_specs(specs)
        dims = string.ascii_lowercase[: len(bare.shape)]
        summed = [dim for dim in range(len(dims)) if dim in bare.contracting]
        left, others = (
            "".join(dims[dim] for dim in summed),
            "".join(dims[dim] for dim in range(len(dims)) if dim not in summed),
        )
        shape = (1, PRODUCT_TOKENS, *(bare.shape[dim] for dim in summed))
        x = jnp.asarray(np.random.default_rng(0).standard_normal(shape, np.float32))
        subscripts, nothing = f"BS{left},{dims}->BS{others}", jax.tree.map(lambda spec: None, specs)
        placement = self.stream.placement
        placed = attach_shardings({path: specs}, {path: matrix}, {path: nothing}, placement, keep_gathered=False)
        expected = np.asarray(weights.einsum(subscripts, x, placed[path]))
        difference = np.asarray(jnp.einsum(subscripts, x, whole)) - expected
        error = float(np.linalg.norm(difference) / (np.linalg.norm(expected) + np.finfo(np.float32).tiny))
        self._check_error(f"{where}: {path}", error, ROUNDING * math.sqrt(bare.fan_in))

    def _check_error(self, what: str, error: float, limit: float) -> None:
        if not error <= limit:
            raise InputError(
                f"{self.target}: {what}, with its adapters merged, differs from base plus adapter by {error:.1e} of "
                f"its output; rounding explains {limit:.1e}; {REMEDY}"
            )

    def _read(self, read_part: Callable[[Read], Params], where: str) -> tuple[Params, Params, Params]:
        """Return a part of the model three times: the source's parameters, these merged, and the folder's.

        Raises:
            InputError: a parameter of the folder is not the merged one, rounded.
        """
        merged, held = dict[str, np.ndarray](), dict[str, np.ndarray]()

        def read(path: str, row: int | None) -> tree.Leaf:
            leaf = self.source.read(path, row)
            merged[path] = self.source.merge(path, leaf, row)
            held[path] = self._read_held(path, row, merged[path].shape)
            self._compare_values(path, row, merged[path], held[path], where, 0)
            return leaf

        source = read_part(read)
        return source, read_part(lambda path, row: merged[path]), read_part(lambda path, row: held[path])

    def _compare_values(
        self, path: str, row: int | None, merged: np.ndarray, held: np.ndarray, where: str, expert: int
    ) -> None:
        expected = merged.astype(held.dtype)
        if "vocabulary" in leaves.unwrap_specs(self.source.specs[path]).axes:
            expected[self.written.config.vocabulary_size :] = 0  # the rows of padding are not written
        if np.array_equal(expected, held):
            return
        names = self.written.tensor_names(path, row)  # one for each expert, or one
        raise InputError(
            f"{self.target}: {where}: tensor {names[expert if len(names) > 1 else 0]!r} reads back with other values "
            f"than the source's, rounded to {held.dtype}; {REMEDY}"
        )

    def _compare_outputs(
        self, where: str, params: Params, expected: jax.Array | np.ndarray, compute: Callable[[], Any]
    ) -> None:
        """Compare an output [B, S, D] of tables with adapters with the output of the merged tables."""
        if not any(map(leaves.is_wrapped, jax.tree.leaves(params, is_leaf=leaves.is_wrapped))):
            return
        sums = [leaves.unwrap_specs(spec).fan_in for spec in self.source.specs.values()]
        limit = ROUNDING * math.sqrt(max(sums))
        scale = np.linalg.norm(np.asarray(expected), axis=-1) + np.finfo(np.float32).tiny
        error = float(np.median(np.linalg.norm(np.asarray(compute()) - np.asarray(expected), axis=-1) / scale))
        self._check_error(where, error, limit)


def _measure_loss(logits: np.ndarray, ids: np.ndarray) -> float:
    """Return the mean cross-entropy, in nats per token, of logits [B, S, V]."""
    logs = np.asarray(jax.nn.log_softmax(logits[:, :-1].astype(np.float32)))
    return -float(np.take_along_axis(logs, ids[:, 1:, None], axis=-1).mean(dtype=np.float64))
