"""Models of Hugging Face folders for use in Python: jaxopt_llm.load_pretrained(path)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_writer import write_model_folder
from jaxopt_llm.checkpoint.peft import adapter_folder
from jaxopt_llm.config import ModelConfig, PrecisionConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution import scan
from jaxopt_llm.inference import run
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import resting_parameter_sharding


@dataclass(frozen=True)
class Pretrained:
    """Pretrained model with its parameters. Computations use float32.

    Attributes:
        config: configuration of the model.
        params: parameters, in the dtypes of the folder; adapters are float32.
        source: the folder.
        model: the model, with the specs of `params`.
        placement: shardings of the parameters.
    """

    config: ModelConfig
    params: Params
    source: Path
    model: Model
    placement: Placement

    def logits(self, tokens: ArrayLike) -> jax.Array:
        """Return the logits, float32 [B, S, V], of token ids [B, S].

        Raises InputError for other arrays, ids outside the vocabulary, and more tokens than learned positions.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"tokens: must be integers of shape [batch, sequence], not {ids.dtype}{list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= self.config.vocabulary_size:
            raise InputError(
                f"tokens: ids from {ids.min()} to {ids.max()}; they must be at least 0 and below the vocabulary size "
                f"{self.config.vocabulary_size}"
            )
        if self.config.positions == "learned" and ids.shape[1] > self.config.max_positions:
            raise InputError(
                f"tokens: {ids.shape[1]} tokens exceed {self.config.max_positions} learned positions; shorten them"
            )
        return self._logits(self.params, ids.astype(np.int32))

    def save_pretrained(self, path: str | Path) -> None:
        """Write a new folder that transformers can load.

        Adapters are merged into the weights, and the tokenizer's files are copied. Raises InputError if the path
        exists.
        """
        write_model_folder(Path(path), self.params, self.config, self.source, self.source)

    @functools.cached_property
    def _logits(self) -> Callable[[Params, np.ndarray], jax.Array]:
        def forward(params: Params, tokens: jax.Array) -> jax.Array:
            ones = jnp.ones_like(tokens)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            batch = Batch(tokens, tokens, ones.astype(jnp.bool), segment_ids=ones, positions=positions)
            context = self.model.make_context(batch, self.placement)
            return scan.forward(self.model, params, tokens, context)[0][..., : self.config.vocabulary_size]

        return jax.jit(forward)


def load_folder(path: Path, adapter: Path | None = None) -> Pretrained:
    """Load the model of a Hugging Face folder.

    Args:
        path: the folder.
        adapter: folder with LoRA adapters of this model, as PEFT writes it; None for no adapters.

    Raises:
        InputError: the folder is incomplete or its model family is not supported, or `adapter` does not match it.
    """
    folder, precision = huggingface.open_model_folder(path), PrecisionConfig(compute_dtype="float32")
    model = Decoder(folder.config, grouped_matmul=run.choose_local_grouped_matmul(precision))
    specs = tree.map_with_path(lambda name, spec: replace(spec, dtype=folder.dtype(name)), model.specs)
    adapters = None if adapter is None else adapter_folder.open_adapter_folder(adapter, folder.family, folder.config)
    if adapters is not None:
        adapters.check_base(folder)
        specs = adapters.add_to_specs(specs)
    placement = run.make_placement(run.count_bytes(specs), precision)

    def read(name: str, spec: ParamSpec) -> jax.Array:
        resting = resting_parameter_sharding(spec, placement)
        if adapters is not None and leaves.is_adapter(name):
            return adapters.read(name, spec, resting)
        return folder.read(name.removesuffix("/base"), spec, resting)

    return Pretrained(folder.config, tree.map_with_path(read, specs), path, model.with_specs(specs), placement)
