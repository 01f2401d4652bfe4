"""Weights of runs and folders, opened to be written without being loaded: see `checkpoint/stored_layers.py`."""

from dataclasses import replace
from pathlib import Path

import jax

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder
from jaxopt_llm.checkpoint.huggingface.model_writer import collect_leaves
from jaxopt_llm.checkpoint.run_weights import RunWeights
from jaxopt_llm.checkpoint.stored_layers import StoredLayers
from jaxopt_llm.config import Config, ModelConfig, fields
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.inference.adapters import open_adapters
from jaxopt_llm.inference.steps import choose_trained_tree
from jaxopt_llm.model import decoder_specs
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.model import Params
from jaxopt_llm.run import initial_weights
from jaxopt_llm.run.initial_weights import open_frozen_base
from jaxopt_llm.step import lora


def open_run_layers(directory: Path, config: Config, step: int) -> StoredLayers:
    """Open the parameters of a verified checkpoint of a run.

    Frozen parameters of a folder have its dtypes, unless they are quantised.

    Raises:
        InputError: that folder is missing or has changed.
    """
    _, _, frozen = _adapt(config)
    base = open_frozen_base(directory, config) if jax.tree.leaves(frozen) else None
    choose_trained_tree(directory, step)
    weights = RunWeights(directory, directory / "checkpoints" / str(step), config.model, config.model)
    return StoredLayers(_list_specs(config, base), weights, base)


def open_both_bases(directory: Path, config: Config, step: int) -> tuple[StoredLayers, StoredLayers]:
    """Open the parameters of a run that trains adapters over a quantised base: over its codes, and over its originals.

    Raises:
        InputError: the folder with the original weights is missing or has changed, or the run started from none.
    """
    layers = open_run_layers(directory, config, step)
    if layers.folder is None:
        raise InputError(f"{directory} started from no Hugging Face folder, and holds only the codes of its base")
    original = fields.replace_fields(config, {"lora.base": "float", "lora.double_quantisation": False})
    return layers, replace(layers, specs=_list_specs(original, layers.folder))


def _adapt(config: Config) -> tuple[Decoder, Params, Params]:
    """Return the model of a run, and the specs of its trained and of its frozen parameters."""
    return lora.adapt_model(Decoder(config.model), config.lora, config.precision, config.training.trainable)


def _list_specs(config: Config, base: ModelFolder | None) -> dict[str, tree.Leaf]:
    """Return the specs of a run's parameters. base: the folder whose dtypes the frozen ones have; None: their own."""
    _, trained, frozen = _adapt(config)
    if base is not None:
        frozen = initial_weights.with_stored_dtypes(base, frozen)
    return collect_leaves(tree.merge(trained, frozen))


def open_folder_layers(path: Path, adapter: Path) -> tuple[ModelConfig, StoredLayers]:
    """Open the parameters of a Hugging Face folder with the adapters of a PEFT folder.

    Returns:
        The configuration of the model, and its parameters.

    Raises:
        InputError: a folder is incomplete, or the adapters do not belong to the model.
    """
    folder = huggingface.open_model_folder(path)
    adapters, folder = open_adapters(adapter, folder)
    specs = stored_specs(folder)
    return folder.config, StoredLayers(collect_leaves(adapters.add_to_specs(specs)), None, folder, adapters)


def stored_specs(folder: ModelFolder) -> tree.Tree:
    """Return the specs of a folder's model, in the dtypes of the folder."""
    specs = decoder_specs.param_specs(folder.config)
    return tree.map_with_path(lambda name, spec: replace(spec, dtype=folder.dtype(name)), specs)
