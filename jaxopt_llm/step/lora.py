"""Choice of the trained parameters, whole ones and LoRA adapters, and of the dtypes of the frozen ones."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import jax
import numpy as np

from jaxopt_llm.config import LoraConfig, PrecisionConfig
from jaxopt_llm.config.training import ALL_LINEAR
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.linear import leaves, quantised
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec

M = TypeVar("M", bound="Adaptable")
Select = Callable[[str, ParamSpec], bool]  # (path, spec) -> whether the parameter is selected


def is_block_matrix(path: str, spec: ParamSpec) -> bool:
    """Return whether a parameter is a matrix of the blocks, whose base `lora.base` quantises."""
    return bool(spec.leading and spec.contracting)


def _can_adapt(path: str, spec: ParamSpec) -> bool:
    """Return whether a parameter is a matrix. Those of MTP modules, which PEFT does not have, get no adapters."""
    return bool(spec.contracting) and not path.startswith("mtp_")


def problems(
    specs: Params, config: LoraConfig, trainable: tuple[str, ...] = (), is_quantised: Select = is_block_matrix
) -> list[str]:
    """Find problems in the selection of trained parameters and adapters.

    Args:
        specs: specs of the model without adapters.
        trainable: see TrainingConfig.
        is_quantised: selects the parameters that `lora.base` quantises.
    """
    paths = [path for path, _ in tree.leaves_with_path(specs)]
    mistakes = [f"training.trainable: {each}" for each in _pattern_problems(paths, paths, trainable, "parameter")]
    if not config.rank:
        return mistakes
    matrices = {path: spec for path, spec in tree.leaves_with_path(specs) if _can_adapt(path, spec)}
    mistakes += [f"lora.targets: {each}" for each in _pattern_problems(paths, [*matrices], config.targets, "matrix")]
    adapted = {path: spec for path, spec in matrices.items() if _first_target(path, config.targets)}
    both = [path for path in adapted if tree.first_match(path, trainable)]
    if both:
        mistakes.append(f"{both[0]} is in training.trainable and in lora.targets: remove it from one of them")
    return mistakes or [
        *_rank_problems(adapted, config),
        *_table_problems([path for path, spec in adapted.items() if not is_quantised(path, spec)], adapted, config),
        *_expert_problems(adapted, config),
        *_nf4_problems(specs, config, is_quantised),
    ]


def _pattern_problems(paths: list[str], selectable: list[str], patterns: tuple[str, ...], kind: str) -> list[str]:
    """Describe the patterns that select nothing, and the paths that exist, in at most one line.

    Args:
        paths: paths of all parameters.
        selectable: the paths that the patterns may select.
        kind: noun for a selectable parameter.
    """
    effective = {_first_target(path, patterns) for path in selectable}
    mistakes = []
    for index, pattern in enumerate(patterns):
        matches = [path for path in paths if _first_target(path, (pattern,))]
        if pattern in effective and pattern not in patterns[:index]:
            continue
        if not matches:
            mistakes.append(f"{pattern} matches no parameter")
        elif set(matches).isdisjoint(selectable):
            mistakes.append(f"{pattern} matches no {kind}, only {matches[0]}")
        else:
            mistakes.append(f"{pattern} has no effect, because earlier patterns match all its parameters")
    if not mistakes:
        return []
    kinds = {path if path.startswith("non_layer/") else path.rsplit("/", 1)[-1]: path for path in reversed(selectable)}
    return [f"{'; '.join(mistakes)}; correct or remove it (examples: {', '.join(sorted(kinds.values()))})"]


def _first_target(path: str, targets: tuple[str, ...]) -> str | None:
    """Return the first of the targets that matches a path."""
    globs = {target: "segment_*/*" if target == ALL_LINEAR else target for target in targets}
    return next((target for target, glob in globs.items() if tree.first_match(path, (glob,))), None)


def _rank_problems(adapted: dict[str, ParamSpec], config: LoraConfig) -> list[str]:
    """Find a matrix whose smaller side is below the rank: its adapter would be larger than the matrix itself."""
    ranks = []
    for path, spec in adapted.items():
        layer = spec.unstack()
        experts = math.prod(layer.shape[dim] for dim in layer.expert_dims)
        ranks.append((min(layer.fan_in, math.prod(layer.shape) // experts // layer.fan_in), path))
    rank, path = min(ranks)
    if config.rank <= rank:
        return []
    return [f"lora.rank={config.rank} is above {rank}, the largest possible rank of {path}: set --lora.rank {rank}"]


def _table_problems(tables: list[str], adapted: dict[str, ParamSpec], config: LoraConfig) -> list[str]:
    if config.dropout and len(tables) == len(adapted):
        return [f"lora.dropout={config.dropout} has no effect on {tables[0]}, outside the blocks: set --lora.dropout 0"]
    if not (config.dora and tables):
        return []
    return [
        f"lora.dora=True supports only matrices of blocks, and lora.targets select {tables[0]}: change --lora.targets"
    ]


def _expert_problems(adapted: dict[str, ParamSpec], config: LoraConfig) -> list[str]:
    """Find settings that adapters of experts do not support."""
    expert = next((path for path, spec in adapted.items() if spec.expert_dims), None)
    return [
        f"lora.{name}={getattr(config, name)} does not support experts, and lora.targets select {expert}: leave out "
        f"--lora.{name}, or change --lora.targets"
        for name in ("dora", "dropout")
        if expert and getattr(config, name)
    ]


def _nf4_problems(specs: Params, config: LoraConfig, is_quantised: Select) -> list[str]:
    if config.base != "nf4":
        return []
    matrices = [spec for path, spec in tree.leaves_with_path(specs) if is_quantised(path, spec)]
    dimensions = {(spec.axes[dim], spec.shape[dim]) for spec in matrices for dim in (leaves.nf4_dim(spec),)}
    names = {"embed": "model.width=", "latent": "the rank of a latent, "}
    return [
        f"lora.base=nf4: {names.get(axis, 'a dimension of ')}{size} is not a multiple of {quantised.BLOCK_SIZES[-1]}: "
        "set --lora.base int8"
        for axis, size in sorted(dimensions, key=str)
        if not quantised.block_size(size)
    ]


class Adaptable(Protocol):
    """A model with specs that can be replaced."""

    @property
    def specs(self) -> Params: ...

    def with_specs(self: M, specs: Params) -> M: ...


def adapt_model(
    model: M,
    config: LoraConfig,
    precision: PrecisionConfig,
    trainable: tuple[str, ...] = (),
    is_quantised: Select = is_block_matrix,
) -> tuple[M, Params, Params]:
    """Divide the parameters of a model into trained and frozen ones, and add adapters if `lora.rank` is set.

    Returns the model, and the specs of its trained and of its frozen parameters: the two halves of a `tree.partition`,
    with the dtypes in which the parameters are stored.

    Args:
        trainable, is_quantised: see `problems`.
    """
    patterns = trainable or (() if config.rank else ("*",))
    whole = {path for path, _ in tree.leaves_with_path(model.specs) if tree.first_match(path, patterns)}

    def wrap(path: str, spec: ParamSpec) -> tree.Leaf:
        if path in whole:
            return spec
        base = _freeze(path, spec, config, precision, is_quantised)
        if not (config.rank and _can_adapt(path, spec) and _first_target(path, config.targets)):
            return base
        return replace(leaves.lora_specs(spec, config.rank, config.scale, config.dora, config.dropout), base=base)

    specs = tree.map_with_path(wrap, model.specs)
    trained, frozen = tree.partition(specs, (whole | leaves.adapter_paths(specs)).__contains__)
    masters = jax.tree.map(lambda spec: replace(spec, dtype=np.dtype("float32")), trained)
    return model.with_specs(specs), masters, frozen


def base_problems(specs: Params, config: LoraConfig) -> list[str]:
    """Find problems in the storage of a frozen base. specs: of the model without adapters."""
    return _nf4_problems(specs, config, is_block_matrix)


def freeze_model(model: M, config: LoraConfig, precision: PrecisionConfig) -> tuple[M, Params]:
    """Return a model without trained parameters, and the specs of its parameters, stored as `lora.base` says.

    Raises:
        InputError: the sizes of the model do not support `lora.base`.
    """
    if mistakes := base_problems(model.specs, config):
        raise InputError(mistakes[0])
    specs = tree.map_with_path(lambda path, spec: _freeze(path, spec, config, precision, is_block_matrix), model.specs)
    return model.with_specs(specs), specs


def _freeze(
    path: str, spec: ParamSpec, config: LoraConfig, precision: PrecisionConfig, is_quantised: Select
) -> tree.Leaf:
    """Return the specs of a frozen parameter."""
    if config.base != "float" and is_quantised(path, spec):
        return leaves.quantised_specs(spec, config.base, config.double_quantisation)
    return replace(spec, dtype=np.dtype(precision.for_param(spec).compute_dtype))
