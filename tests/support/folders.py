"""Small Hugging Face folders, written without their library, so that tests do not need it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import toy
from texts import write_byte_tokenizer

from jaxopt_llm.checkpoint.huggingface.model_folder import open_model_folder, write_model_folder
from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.config import CheckpointConfig, ModelConfig, fields
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.core import tree
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.data.tokens.tokenizer_files import keep_tokenizer
from jaxopt_llm.inference import models
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.model import Params
from jaxopt_llm.parallel.zero import parameter_sharding
from jaxopt_llm.step import lora

# Two segments, two kinds of block, biases, fewer key-value heads than heads, and a padded vocabulary.
CONFIG = replace(toy.CONFIG, pattern=("global", "sliding"), biases="qkv", tied_head=False, width=32, norm_epsilon=1e-2)
# Layers that read the keys of earlier ones, and inputs of their own (Gemma 4 E2B).
SHARED_KEYS = replace_fields(
    CONFIG,
    {"biases": "none", "qk_norm": "head", "pattern": ("sliding", "global"), "layers": 6, "rope.sliding_theta": 30.0}
    | {"value_norm": True, "mlp": "geglu", "attention_scale": 1.0, "layer_scales": True, "norm_placement": "both"}
    | {"embedding_scale": CONFIG.width**0.5, "shared_key_layers": 2, "wide_mlp": True, "layer_input_size": 4},
)


def params(config: ModelConfig = CONFIG, dtype: Any = np.float32) -> Params:
    """Return random parameters. Rows that pad a table are zero."""

    def unpadded(spec: Any, values: np.ndarray) -> np.ndarray:
        if "vocabulary" in spec.axes:
            values[config.vocabulary_size :] = 0
        return values.astype(dtype)

    specs = param_specs(config)
    return jax.tree.map(unpadded, specs, toy.params(specs))


def folder(path: Path, config: ModelConfig = CONFIG, dtype: Any = np.float32, most: int = 20_000) -> Path:
    """Write a folder with several files of weights, without a tokenizer."""
    arrays = jax.device_put(params(config, dtype), toy.placement().replicated)
    write_model_folder(path, arrays, config, max_file_bytes=most)
    return path


def make_run(source: Path, directory: Path, family: str = "") -> None:
    """Make a run directory with one checkpoint, of step 0, from the model of a folder with a tokenizer."""
    model_folder = open_model_folder(source, family)
    config = models.make_folder_config(model_folder, str(source), directory, str(source))
    tokenizer = load_tokenizer(config.data)
    _, specs, _ = lora.adapt_model(Decoder(config.model), config.lora, config.precision)
    placement = models.make_placement(models.count_bytes(specs), config.precision)
    masters = tree.map_with_path(
        lambda name, spec: model_folder.read(name, spec, parameter_sharding(spec, placement)), specs
    )
    directory.mkdir()
    corpus = {"name": str(source), "summary": "", "sha256": "", "tokenizer_sha256": tokenizer.sha256}
    (directory / "corpus.json").write_text(json.dumps(corpus))
    (directory / "config.json").write_text(fields.to_json(config))
    keep_tokenizer(config.data, tokenizer, directory)
    with Checkpoints(directory / "checkpoints", CheckpointConfig()) as checkpoints:
        checkpoints.save(0, {"masters": masters}, {"tokens": 0})


def folder_with_tokenizer(path: Path, config: ModelConfig = CONFIG) -> Path:
    write_byte_tokenizer(folder(path, config) / "tokenizer.json")
    return path
