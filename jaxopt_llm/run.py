"""What a training run left, as the commands that read it want it."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxopt_llm import config as configuration
from jaxopt_llm import tree
from jaxopt_llm.checkpoint.native import Checkpoints
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.data.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.errors import CheckpointError, InputError
from jaxopt_llm.model.decoder import Params, Parts, make_parts
from jaxopt_llm.parallel.mesh import MeshConfig, make_mesh, visible_devices
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import lora


@dataclass(frozen=True)
class Run:
    """A run's last checkpoint, on one device."""

    config: TrainConfig
    tokenizer: Tokenizer
    parts: Parts
    params: Params
    placement: Placement
    step: int


def load_config(directory: Path) -> TrainConfig:
    """Raises InputError for what is no run directory."""
    try:
        return configuration.from_json((directory / "config.json").read_text())
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--checkpoint {directory}: not a run directory ({error})") from error


def load(directory: Path) -> Run:
    """Raises InputError for what is no run directory, CheckpointError where it has no checkpoint that can be used."""
    config = load_config(directory)
    tokenizer = _load_tokenizer(directory, config)
    placement = Placement(make_mesh(MeshConfig(), visible_devices()[:1]), 0, config.precision)
    parts, trained, frozen = lora.adapt(make_parts(config.model), config.lora, config.precision)
    trees = {"masters": trained, "frozen": frozen}
    held = {name: placement.abstract(specs) for name, specs in trees.items() if jax.tree.leaves(specs)}
    with Checkpoints(directory / "checkpoints") as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise CheckpointError(f"--checkpoint {directory}: it has no checkpoint yet")
        restored = checkpoints.restore(step, **held)
    params = tree.merge(restored["masters"], restored.get("frozen", frozen))
    return Run(config, tokenizer, parts, params, placement, step)


def _load_tokenizer(directory: Path, config: TrainConfig) -> Tokenizer:
    """Another file under the same name would give other ids, in silence."""
    tokenizer = load_tokenizer(config.data)
    try:
        trained = json.loads((directory / "corpus.json").read_text())["tokenizer_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--checkpoint {directory}: corpus.json does not say its tokenizer ({error!r})") from error
    if trained != tokenizer.sha256:
        raise InputError(
            f"--checkpoint {directory}: data.tokenizer={config.data.tokenizer} is another than the run was trained "
            "with: bring that file back"
        )
    return tokenizer
