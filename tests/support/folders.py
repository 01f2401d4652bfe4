"""Small Hugging Face folders, written without their library, so that tests do not need it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import toy
from texts import write_byte_tokenizer

from jaxopt_llm.checkpoint.huggingface.model_folder import write_model_folder
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.model import Params

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


def folder_with_tokenizer(path: Path, config: ModelConfig = CONFIG) -> Path:
    write_byte_tokenizer(folder(path, config) / "tokenizer.json")
    return path
