"""LanguageModel: the decoder as functions of its parameters, for losses that are written by users.

The forward is the trainer's own decoder, over plain arrays and without a placement. Traced by an engine, its
jaxpr has a `dot_general` for each product with a weight and a scan over each segment of layers, so the engine divides,
gathers, adapts and quantises the weights as the decoder's own executors do.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder, write_model_folder
from jaxopt_llm.checkpoint.pretrained import check_predicts_tokens
from jaxopt_llm.compiler.kernel_choice import choose_grouped_matmul
from jaxopt_llm.config import AXES, BATCH_AXES, Config, Kind, ModelConfig, PrecisionConfig, ShardingConfig
from jaxopt_llm.config.fields import wrong_types
from jaxopt_llm.core import hub, tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.frontends import unbox
from jaxopt_llm.engine.user_model import AttentionSelector
from jaxopt_llm.execution.segments import LocalSegment, model_segments
from jaxopt_llm.inference.exported import copy_origin
from jaxopt_llm.kernels.attention import SELECT
from jaxopt_llm.kernels.attention_types import make_document_ranges
from jaxopt_llm.kernels.support import map_chunks
from jaxopt_llm.model import param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context, NewCache
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.model.model import AUXILIARY_LOSS, Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.axes import PARAMETER_AXES
from jaxopt_llm.parallel.placement import Placement


class LanguageModel:
    """A decoder, such as Llama or Qwen, as functions of its parameters, for losses that are given to `initialize`.

    The parameters are nested dicts, with the layers stacked. The functions compute in the dtype of the parameters.
    For `rules`, dimensions are named `heads`, `kv_heads`, `mlp` and `vocabulary`. Nothing is allocated.

    Experts (Mixtral, Qwen3-MoE) run on each device, with the tokens of its rows. If `tensor` divides the length of a
    row, each device along it takes a part of the row, and no rule divides the experts' matrices. If the mesh does not
    divide the rows or the length, every device sorts the tokens of the whole batch. All tokens are routed: with
    `model.moe.capacity_factor`, padding takes room, too.

    Args:
        model: settings of the section `model` of a `Config`, as an object or as a dict; or a Hugging Face folder or hub
            id.

    Attributes:
        config: settings of the model.

    Raises:
        InputError: the settings are wrong, or the folder is incomplete or not supported.
    """

    def __init__(self, model: ModelConfig | dict[str, Any] | str | Path) -> None:
        self._folder: ModelFolder | None = None
        if isinstance(model, str | Path):
            self._folder = huggingface.open_model_folder(hub.find_folder(Path(model), ""))
            model = self._folder.config
        self.config: ModelConfig = Config(model=model).model  # type: ignore[arg-type]
        if found := wrong_types(self.config, "model.") or self.config.problems():
            raise InputError(f"LanguageModel: {'; '.join(found)}")
        if self.config.pretrained:
            raise InputError(f"LanguageModel: give the folder itself, LanguageModel({str(self.config.pretrained)!r})")
        check_predicts_tokens(self.config, f"LanguageModel({'model' if self._folder is None else self._folder.path})")
        self._decoder = Decoder(self.config, attention="auto")

    @property
    def weights(self) -> Mapping[str, "FolderWeight"]:
        """Stored parameters of the folder, by path, for `weights` of `initialize`. Each is read when it is indexed."""
        if self._folder is None:
            raise InputError("LanguageModel: it was made from settings, which have no weights; give a folder")
        folder = self._folder
        return {path: FolderWeight(folder, path, spec) for path, spec in tree.leaves_with_path(self._decoder.specs)}

    def initialize(self, seed: int = 0) -> Params:
        """Return random parameters, those of `train` with this seed, in boxes (`nn.Partitioned`) of axis names.

        An engine traces it, so that each device makes its own shards, and removes the boxes.
        """
        arrays = param.initialize(self._decoder.specs, seed)
        return jax.tree.map(_box, self._decoder.specs, arrays)

    def logits(
        self,
        parameters: Params,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Return the logits of the next token, float32 [batch, sequence, vocabulary].

        Args:
            parameters: as those of `initialize`, with or without boxes.
            tokens: ids, int [batch, sequence]. Each sees itself and those before it, so padding belongs to the right.
            segment_ids: int [batch, sequence], a range of equal ids for each of several documents in a row. Tokens see
                only their own document. By default, a row is one document.
            positions: int [batch, sequence], by default counted from 0 in each document.
        """
        return self.head(parameters, self.hidden(parameters, tokens, segment_ids, positions))

    def hidden(
        self,
        parameters: Params,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Return the hidden states after the final norm, [batch, sequence, width], such as for a value head.

        A loss that needs the logits of some tokens only gives their states to `head`. Arguments: see `logits`.
        """
        return self.hidden_with_balance(parameters, tokens, segment_ids, positions)[0]

    def hidden_with_balance(
        self,
        parameters: Params,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the hidden states, as `hidden` does, and the losses that balance the load of the experts.

        The second is a float32 scalar to be added to the loss: the mean over tokens of `model.moe.balance_loss` × the
        load-balancing loss and `model.moe.router_z_loss` × the z-loss, summed over layers. It is 0 without experts.

        Args:
            parameters, tokens, segment_ids, positions: see `logits`.
            mask: bool [batch, sequence], the tokens whose load is balanced; all by default.
        """
        if len(tokens.shape) != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise InputError(f"tokens: must be integers [batch, sequence], not {tokens.dtype}{list(tokens.shape)}")
        if self.config.positions == "learned" and tokens.shape[1] > self.config.max_positions:
            raise InputError(
                f"tokens: {tokens.shape[1]} of them exceed {self.config.max_positions} learned positions; shorten them"
            )
        mask = jnp.ones(tokens.shape, bool) if mask is None else mask
        parameters = self._fix_load_biases(_to_arrays(parameters))
        placement, products = self._place_experts(tokens, parameters)
        context = self._make_context(tokens, segment_ids, positions, mask, placement)
        decoder = replace(self._decoder, max_segments=1 if segment_ids is None else None, grouped_matmul=products)
        x = decoder.embed(parameters["non_layer"], tokens, context)
        context = decoder.add_layer_inputs(parameters["non_layer"], tokens, x, context)
        inputs, context = context.layer_inputs, replace(context, layer_inputs=None)
        balance = jnp.zeros((), jnp.float32)
        for name, segment in model_segments(decoder).items():
            segment = segment if inputs is None else segment.with_inputs(inputs)
            run = functools.partial(_run_period, decoder, segment, context)
            x, (given, losses) = jax.lax.scan(run, x, (parameters[name], segment.per_layer))
            balance += jnp.sum(losses)
            if given:  # by a single period
                context = replace(context, caches=context.caches | jax.tree.map(lambda x: x[0], given))
        return decoder.final_norm(parameters["non_layer"], x), balance / jnp.maximum(jnp.sum(mask), 1)

    def log_probabilities(
        self,
        parameters: Params,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        hidden: jax.Array | None = None,
        chunk: int = 256,
    ) -> jax.Array:
        """Return the log-probability of each next token, float32 [batch, sequence].

        Entry s is for token s + 1 after tokens up to s. It is 0 if token s + 1 does not exist or belongs to another
        document. The logits of one chunk exist at a time, and the backward computes them again.

        Args:
            parameters, tokens, segment_ids, positions: see `logits`.
            hidden: the states of these tokens, if the loss has them already; see `hidden`.
            chunk: number of tokens of each row whose logits exist at a time.
        """
        if chunk < 1:
            raise InputError(f"chunk={chunk}: must be at least 1, the number of tokens whose logits exist at a time")
        x = self.hidden(parameters, tokens, segment_ids, positions) if hidden is None else hidden
        table = self._decoder.head_table(_to_arrays(parameters)["non_layer"])
        last = jnp.zeros_like(tokens[:, :1])
        read = jax.checkpoint(functools.partial(self._read_targets, table), prevent_cse=False)
        found = map_chunks(read, chunk, x, jnp.concatenate([tokens[:, 1:], last], axis=1))
        exists = jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1
        if segment_ids is not None:
            exists &= segment_ids == jnp.roll(segment_ids, -1, axis=1)
        return jnp.where(exists, found, 0)

    def _read_targets(self, table: Weight, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the log-probability of each target, float32 [B, C], for states x [B, C, D]; table: [V, D]."""
        logits = self._decoder.classify(x, table, _PLACEMENT)  # [B, C, V]
        classes = jnp.arange(logits.shape[-1])
        if self.config.vocabulary_size < len(classes):
            logits = jnp.where(classes < self.config.vocabulary_size, logits, -jnp.inf)
        # By comparison: of rows of the table that `tensor` divides, a look-up would gather the logits.
        of_targets = jnp.sum(jnp.where(classes == targets[..., None], logits, 0), axis=-1)
        return of_targets - jax.nn.logsumexp(logits, axis=-1)

    def head(self, parameters: Params, hidden: jax.Array) -> jax.Array:
        """Return the logits of hidden states, float32 [batch, sequence, vocabulary]."""
        table = self._decoder.head_table(_to_arrays(parameters)["non_layer"])
        return self._decoder.classify(hidden, table, _PLACEMENT)[..., : self.config.vocabulary_size]

    def save_pretrained(self, path: str | Path, parameters: Params) -> None:
        """Write a new folder that transformers can load, with the tokenizer of the folder that the model came from.

        Raises:
            InputError: the path exists, or no family of transformers fits the model.
        """
        origin = copy_origin(self._folder.path) if self._folder else None
        named = jax.tree.map(_name_sharding, unbox(parameters))
        write_model_folder(Path(path), named, self.config, origin)

    def _fix_load_biases(self, parameters: Params) -> Params:
        """Return the parameters with biases of routers that have no gradient: only `train` moves them by the load."""

        def fix(spec: ParamSpec, array: jax.Array) -> jax.Array:
            return jax.lax.stop_gradient(array) if spec.sign_rate else array

        fixed: Params = jax.tree.map(fix, self._decoder.specs, parameters)
        return fixed

    def _place_experts(self, tokens: jax.Array, parameters: Params) -> tuple[Placement, str]:
        """Return the placement of the forward, and the implementation of the experts' matmuls."""
        selector, experts = SELECT.value, self.config.moe.experts
        dtype = jax.tree.leaves(parameters)[0].dtype.name
        if not experts:
            return _PLACEMENT, "xla"
        if not isinstance(selector, AttentionSelector):
            return _PLACEMENT, choose_grouped_matmul(jax.devices()[0], "auto", dtype)
        placement = _place(selector.placement.mesh)
        rows, length = tokens.shape
        if rows % placement.size(*BATCH_AXES) or length % placement.size("tensor"):
            return _PLACEMENT, "xla"  # XLA divides its own operations
        return placement, choose_grouped_matmul(selector.device, "auto", dtype)

    def _make_context(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        mask: jax.Array,
        placement: Placement,
    ) -> Context:
        segments = jnp.ones(tokens.shape, jnp.int32) if segment_ids is None else segment_ids
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32) - make_document_ranges(segments).first
        batch = Batch(tokens, tokens, mask, segments, positions)
        # No id of a document stands for padding here.
        return replace(self._decoder.make_context(batch, placement), token_mask=None)


def _run_period(
    decoder: Decoder, segment: LocalSegment, context: Context, x: jax.Array, layers: Any
) -> tuple[jax.Array, tuple[dict[Kind, Any], jax.Array]]:
    """Run the blocks of a period.

    Return x, for each kind of layers the cache that it gives to later segments, and the sum of the auxiliary losses.
    """
    loss = jnp.zeros((), jnp.float32)
    blocks, constants = layers
    caches: dict[str, Any] = {block: NewCache() for block in segment.giving.values()}
    for position, kind in enumerate(segment.kinds):
        block, layer = f"block_{position}", {name: values[position] for name, values in constants.items()}
        x, caches[block], auxiliary = decoder.block(kind, blocks[block], x, context, layer, caches.get(block))
        loss += auxiliary[AUXILIARY_LOSS]
    return x, ({kind: caches[block] for kind, block in segment.giving.items()}, loss)


class _Unplaced(Placement):
    """Placement of a forward that an engine traces for any devices: it pins no sharding.

    Only experts work on each device apart, with its rows and, if `tensor` divides a row, its part of each row.
    """

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        return x

    def replicate(self, x: jax.Array) -> jax.Array:
        return x

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return function if self.mesh.size == 1 else super().shard_map(function, in_specs, out_specs)

    @property
    def _activation_table(self) -> dict[str, tuple[str, ...]]:
        parts = dict.fromkeys(("sequence", "residual_sequence"), ("tensor",))
        return super()._activation_table | parts


def _place(mesh: Mesh | AbstractMesh) -> _Unplaced:
    return _Unplaced(mesh, ShardingConfig(), PrecisionConfig())


_PLACEMENT = _place(AbstractMesh((1,) * len(AXES), AXES))


def _to_arrays(parameters: Params) -> Params:
    arrays: Params = jax.tree.map(jnp.asarray, unbox(parameters))
    return arrays


def _name_sharding(array: Any) -> jax.Array:
    """Return an array as it is if it rests on a mesh, as those of an engine do, and on one device otherwise."""
    if isinstance(array, jax.Array) and isinstance(array.sharding, NamedSharding):
        return array
    return jax.device_put(array, NamedSharding(Mesh(jax.local_devices()[:1], "device"), PartitionSpec()))


def _box(spec: ParamSpec, array: jax.Array) -> linen.Partitioned[jax.Array]:
    """Return an array with the names of the dimensions that `tensor` may divide.

    Those of experts are whole: there `tensor` divides the tokens (see `_Unplaced`).
    """
    names = (axis if axis and "tensor" in PARAMETER_AXES[axis] else None for axis in spec.axes)
    return linen.Partitioned(array, tuple(None if name == "expert_mlp" else name for name in names))


@dataclass(frozen=True)
class FolderWeight:
    """A parameter as a Hugging Face folder stores it, which is read when it is indexed.

    Rows that pad a table are those of `copy_table`.
    """

    folder: ModelFolder
    path: str
    spec: ParamSpec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @functools.cached_property
    def dtype(self) -> np.dtype:
        return self.folder.dtype(self.path)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read the part at an index for each dimension: slices, and for the layers' dimension a number or a slice."""
        leading = self.spec.leading
        layers = np.arange(self.shape[0])[index[0]] if leading else np.zeros((), np.int64)
        ranges = [range(size)[part] for size, part in zip(self.shape[leading:], index[leading:], strict=True)]
        out = np.zeros([*layers.shape, *map(len, ranges)], self.dtype)
        within = tuple(slice(each.start, each.stop) for each in ranges)
        for row in np.ndindex(layers.shape):
            self.folder.fill(self.path, out[row], int(layers[row]) if leading else None, within)
        return out
