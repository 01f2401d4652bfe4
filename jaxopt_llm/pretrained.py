"""Models of Hugging Face folders for use from Python: jaxopt_llm.load_pretrained(path)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxopt_llm import run, tree
from jaxopt_llm.checkpoint import huggingface, peft
from jaxopt_llm.errors import InputError
from jaxopt_llm.execution import scan
from jaxopt_llm.model import leaves
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params, Parts, make_parts
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.precision import PrecisionConfig
from jaxopt_llm.parallel.sharding import Placement


@dataclass(frozen=True)
class Pretrained:
    """A model and its parameters, in the dtypes that the folder has them in, adapters in float32; they are computed
    with in float32.

    source: the folder.
    """

    config: ModelConfig
    params: Params
    source: Path
    parts: Parts
    placement: Placement

    def logits(self, tokens: ArrayLike) -> jax.Array:
        """int32 [B, S] -> float32 [B, S, V]. Raises InputError for what are no ids of the vocabulary."""
        ids = np.asarray(tokens)
        if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"tokens: must be whole numbers [batch, sequence], not {ids.dtype}{list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= self.config.vocabulary_size:
            raise InputError(f"tokens: they lie in {ids.min()} to {ids.max()}, of {self.config.vocabulary_size} ids")
        if self.config.positions == "learned" and ids.shape[1] > self.config.max_positions:
            raise InputError(f"tokens: {ids.shape[1]} of them exceed the {self.config.max_positions} learned positions")
        return self._logits(self.params, ids.astype(np.int32))

    def save_pretrained(self, path: str | Path) -> None:
        """Writes a new folder, which transformers loads: adapters are folded into what they adapt, and the tokenizer's
        files come along. Raises InputError where something is there already."""
        huggingface.write(Path(path), self.params, self.config, self.source, self.source)

    @functools.cached_property
    def _logits(self) -> Callable[[Params, np.ndarray], jax.Array]:
        def forward(params: Params, tokens: jax.Array) -> jax.Array:
            ones = jnp.ones_like(tokens)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            batch = Batch(tokens, tokens, ones.astype(jnp.bool), segment_ids=ones, positions=positions)
            context = self.parts.make_context(batch, self.placement)
            return scan.forward(self.parts, params, tokens, context)[0][..., : self.config.vocabulary_size]

        return jax.jit(forward)


def load(path: Path, adapter: Path | None = None) -> Pretrained:
    """adapter: a folder of PEFT's, of LoRA adapters of this model.

    Raises InputError for what is no whole folder of a known family, or none of such adapters.
    """
    folder, precision = huggingface.open_folder(path), PrecisionConfig(compute_dtype="float32")
    parts = make_parts(folder.config, expert_products=run.expert_products(precision))
    specs = tree.map_with_path(lambda name, spec: replace(spec, dtype=folder.dtype(name)), parts.specs)
    adapters = None if adapter is None else peft.open_adapter(adapter, folder.family, folder.config)
    if adapters is not None:
        adapters.check_base(folder)
        specs = adapters.adapted(specs)
    placement = run.placement_for(run.size(specs), precision)

    def read(name: str, spec: ParamSpec) -> jax.Array:
        resting = placement.resting_parameters(spec)
        if adapters is not None and leaves.is_adapter(name):
            return adapters.read(name, spec, resting)
        return folder.read(name.removesuffix("/base"), spec, resting)

    return Pretrained(folder.config, tree.map_with_path(read, specs), path, replace(parts, specs=specs), placement)
