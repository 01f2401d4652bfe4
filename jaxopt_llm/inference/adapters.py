"""LoRA adapters in PEFT's format, for models that are used without training."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder
from jaxopt_llm.checkpoint.peft import adapter_config
from jaxopt_llm.checkpoint.peft.adapter_folder import AdapterFolder
from jaxopt_llm.config import Config
from jaxopt_llm.core import hub, tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.parallel.zero import resting_parameter_sharding


def open_adapters(path: Path, folder: ModelFolder) -> tuple[AdapterFolder, ModelFolder]:
    """Open a PEFT folder with adapters of the model of a Hugging Face folder.

    Returns:
        The adapters, and the model's folder with the whole weights that are saved with them.

    Raises:
        InputError: the adapters do not belong to the model.
    """
    path = hub.find_folder(path, "--adapter ")
    adapters = pretrained.open_adapter(path, folder.family, folder.config, "--adapter ")
    adapters.check_base(folder)
    _warn_of_other_base(path, folder.path)
    return adapters, adapters.whole.replace_in(folder, adapters.model)


def open_run_adapters(path: Path, directory: Path, config: Config) -> AdapterFolder:
    """Open a PEFT folder with adapters of the model of a run.

    Raises:
        InputError: the adapters do not belong to the model, or the run has adapters already.
    """
    if config.lora.rank:
        raise InputError(
            f"--adapter {path}: the run {directory} has adapters already; leave out --adapter, or merge them first "
            f"(python -m jaxopt_llm.convert merge --checkpoint {directory} --to FOLDER) and give --checkpoint FOLDER"
        )
    family = huggingface.choose_family(config.model, pretrained.find_source_folder(config))
    path = hub.find_folder(path, "--adapter ")
    adapters = pretrained.open_adapter(path, family, config.model, "--adapter ")
    if adapters.whole.stored:
        raise InputError(
            f"--adapter {path}: it also has whole weights of the model (modules_to_save), which a run does not take; "
            f"write the run as a folder (python -m jaxopt_llm.convert export --checkpoint {directory} --to FOLDER), "
            "and give --checkpoint FOLDER"
        )
    adapters.check_base(None)
    _warn_of_other_base(path, directory)
    return adapters


def _warn_of_other_base(adapter: Path, model: Path) -> None:
    if warning := adapter_config.describe_other_base(adapter, str(model.absolute())):
        print(f"warning: {warning}", file=sys.stderr)


def add_adapters(
    model: Model, params: Params, placement: Placement, adapters: AdapterFolder, dtype: str
) -> tuple[Model, Params]:
    """Return a model and its parameters with the adapters of a PEFT folder, read in `dtype`."""
    specs = adapters.add_to_specs(model.specs)
    added, held = leaves.adapter_paths(specs), dict(tree.leaves_with_path(params))

    def find_or_read(path: str, spec: ParamSpec) -> jax.Array:
        if path not in added:
            return held[path.removesuffix("/base")]
        spec = replace(spec, dtype=jnp.dtype(dtype))
        return adapters.read(path, spec, resting_parameter_sharding(spec, placement))

    return model.with_specs(specs), tree.map_with_path(find_or_read, specs)
