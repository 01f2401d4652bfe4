"""Small PEFT folders of LoRA adapters over the models of folders.py, written without the library PEFT."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import jax
import numpy as np
import toy

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface import safetensors
from jaxopt_llm.checkpoint.huggingface.safetensors import TensorSpec
from jaxopt_llm.checkpoint.peft import adapter_folder
from jaxopt_llm.checkpoint.peft.adapter_folder import AdapterFolder
from jaxopt_llm.checkpoint.peft.adapter_writer import write_adapter_folder
from jaxopt_llm.config import LoraConfig, ModelConfig
from jaxopt_llm.core import tree
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Params

RANK, ALPHA = 2, 3.0
LORA = LoraConfig(rank=RANK, alpha=ALPHA)
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def add_adapters(config: ModelConfig, targets: str, dora: bool = False) -> Params:
    """Return random parameters, with random adapters for matrices whose paths end with a target; table padding is 0."""
    random = np.random.default_rng(1)

    def wrap(path: str, spec: Any, values: np.ndarray) -> Any:
        if not (spec.contracting and path.endswith(tuple(targets.split()))):
            return values
        specs = leaves.lora_specs(spec, RANK, ALPHA / RANK, dora)
        weight = jax.tree.map(lambda each: random.normal(size=each.shape).astype(np.float32), replace(specs, base=None))
        if "vocabulary" in spec.axes:
            weight.lora_b[config.vocabulary_size :] = 0
        return replace(weight, base=values)

    return tree.map_with_path(wrap, param_specs(config), folders.params(config))


def write_adapters(path: Path, params: Params, config: ModelConfig = folders.CONFIG) -> Path:
    family = huggingface.choose_family(config)
    write_adapter_folder(path, jax.device_put(params, toy.placement().replicated), family, config, LORA)
    return path


def open_adapters(path: Path, config: ModelConfig = folders.CONFIG) -> AdapterFolder:
    return adapter_folder.open_adapter_folder(path, huggingface.choose_family(config), config)


def rewrite_adapters(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Change the tensors of a folder."""
    file = path / adapter_folder.WEIGHTS
    arrays = {name: stored.array.copy() for name, stored in safetensors.open_file(file).items()}
    change(arrays)
    specs = {name: TensorSpec(array.dtype, array.shape) for name, array in arrays.items()}
    safetensors.write_file(file, specs, arrays.__getitem__)
