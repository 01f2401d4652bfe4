"""Models of Hugging Face folders and of runs for use in Python: jaxopt_llm.load_pretrained(path)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from numpy.typing import ArrayLike

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_folder import Origin, write_model_folder
from jaxopt_llm.checkpoint.run_weights import is_run_directory, refuse_option
from jaxopt_llm.config import ModelConfig, PrecisionConfig, cli
from jaxopt_llm.core import errors, hub, tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.execution import scan
from jaxopt_llm.inference import models
from jaxopt_llm.inference.exported import copy_origin, describe_merge
from jaxopt_llm.inference.flags import Step
from jaxopt_llm.inference.models import add_adapters, open_adapters, open_run_adapters
from jaxopt_llm.model.batch import rows_of_documents
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import resting_parameter_sharding


@dataclass(frozen=True)
class Pretrained:
    """Pretrained model with its parameters. Computations use float32.

    Attributes:
        config: configuration of the model.
        params: parameters, in the dtypes of the folder, or of the run's masters; adapters are float32.
        source: the folder or run directory.
        make_origin: returns what `save_pretrained` writes besides the parameters.
        model: the model, with the specs of `params`.
        placement: shardings of the parameters.
    """

    config: ModelConfig
    params: Params
    source: Path
    make_origin: Callable[[], Origin]
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

        Adapters are merged into the weights, quantised weights are dequantised, and the tokenizer's files are copied.
        A run's folder has the files of the training, with a model card. Raises InputError if the path exists.
        """
        write_model_folder(Path(path), self.params, self.config, self.make_origin())

    @functools.cached_property
    def _logits(self) -> Callable[[Params, np.ndarray], jax.Array]:
        def forward(params: Params, tokens: jax.Array) -> jax.Array:
            context = self.model.make_context(rows_of_documents(tokens), self.placement)
            return scan.forward(self.model, params, tokens, context)[0][..., : self.config.vocabulary_size]

        return jax.jit(forward)


@errors.own_flags({"model.family": "family"})
def load_pretrained(
    path: str | Path,
    adapter: str | Path | None = None,
    step: Step = None,
    base: str | Path | None = None,
    family: str = "",
) -> Pretrained:
    """Load the model of a Hugging Face folder or hub id, or of a run's checkpoint, onto this machine's devices.

    Args:
        path: the folder or its hub id, or the run directory.
        adapter: folder or hub id of LoRA adapters of this model, as PEFT writes them; None for no adapters.
        step: checkpoint of the run: its step, or `best` for the lowest held-out loss; None for the newest.
        base: new location of the base of the run's adapters; None: unchanged.
        family: model_type of the family that the folder is read as, if its own is not known; empty: its own.

    Raises:
        InputError: the folder is incomplete or its model family is not supported, or `adapter`, `step`, `base` or
            `family` does not match it.
        CheckpointError: the run has no usable checkpoint.
    """
    path = hub.find_folder(Path(path), "")
    adapter = None if adapter is None else Path(adapter)
    base = None if base is None else Path(base)
    if is_run_directory(path):
        refuse_option("family=", family, path)
        return _load_run(path, adapter, step, base)
    refuse_option("step=", step, path)
    refuse_option("base=", base, path)
    return _load_folder(path, adapter, family)


def _load_folder(path: Path, adapter: Path | None, family: str) -> Pretrained:
    folder, precision = huggingface.open_model_folder(path, family), PrecisionConfig(compute_dtype="float32")
    adapters, folder = (None, folder) if adapter is None else open_adapters(adapter, folder)
    specs = models.stored_specs(folder)
    products = models.choose_local_grouped_matmul(precision)
    model: Model = Decoder(folder.config, grouped_matmul=products).with_specs(specs)
    placement = models.make_placement(models.count_bytes(specs), precision)
    params = tree.map_with_path(
        lambda name, spec: folder.read(name, spec, resting_parameter_sharding(spec, placement)), specs
    )
    if adapters is not None:
        model, params = add_adapters(model, params, placement, adapters, "float32")
    make_origin = functools.partial(copy_origin, path)
    if adapter is not None:
        make_origin = functools.partial(
            describe_merge, path, hub.find_folder(adapter, "--adapter "), folder.config.vocabulary_size
        )
    return Pretrained(folder.config, params, path, make_origin, model, placement)


def _load_run(path: Path, adapter: Path | None, step: Step, base: Path | None) -> Pretrained:
    config = models.move_base(path, cli.load_run_config(path, ""), base)
    adapters = None if adapter is None else open_run_adapters(adapter, path, config)
    precision = replace(config.precision.for_evaluation(), compute_dtype="float32")
    model, params, placement, restored = models.restore_run(
        path, config, "float32", "original", precision=precision, step=step
    )
    if adapters is not None:
        model, params = add_adapters(model, params, placement, adapters, "float32")
    make_origin = functools.partial(models.find_origin, path, config, restored, path.resolve().name)
    return Pretrained(config.model, params, path, make_origin, model, placement)
