"""LoRA: which weights get adapters, what trains, and in which dtypes the rest rests."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import numpy as np

from jaxopt_llm import tree
from jaxopt_llm.model import leaves
from jaxopt_llm.model.decoder import Params, Parts
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.precision import PrecisionConfig


@dataclass(frozen=True)
class LoraConfig:
    rank: int = 0
    """inner size of the adapters, which alone are trained; 0 trains the parameters themselves"""
    alpha: float = 16.0
    """an adapter's product counts alpha / rank"""
    targets: tuple[str, ...] = ("*/attention/*", "*/mlp/*")
    """globs of the paths of the weights that get adapters, as in */attention/query, where * also fits slashes. The
    first pattern that fits a path decides, and each must decide at least one"""
    base: Literal["float", "int8"] = "float"
    """how the frozen base rests: float in precision.compute_dtype, int8 the matrices of the blocks as codes"""

    def problems(self) -> list[str]:
        found = []
        if self.rank < 0:
            found.append(f"lora.rank={self.rank}: must be at least 0")
        if not self.alpha > 0:
            found.append(f"lora.alpha={self.alpha}: must be above 0")
        if self.rank > 0 and not self.targets:
            found.append("lora.targets: must name at least one weight")
        if self.rank == 0 and self.base != "float":
            found.append(f"lora.base={self.base} wants lora.rank of at least 1: without adapters nothing would train")
        return found


def target_problems(specs: Params, config: LoraConfig) -> list[str]:
    """Patterns that decide no weight, and what exists instead. specs: of the bare model."""
    if config.rank == 0:
        return []
    paths = jax.tree.leaves(tree.map_with_path(lambda path, spec: path, specs))
    weights = jax.tree.leaves(tree.map_with_path(lambda path, spec: path if spec.contracting else None, specs))
    deciding = {tree.first_match(path, config.targets) for path in weights}
    found = []
    for number, pattern in enumerate(config.targets):
        fits = [path for path in paths if tree.first_match(path, (pattern,))]
        if pattern in deciding and pattern not in config.targets[:number]:
            continue
        if not fits:
            found.append(f"{pattern} fits no parameter")
        elif set(fits).isdisjoint(weights):
            found.append(f"{pattern} fits no matrix, only {fits[0]}")
        else:
            found.append(f"{pattern} comes after patterns that fit all that it fits")
    if not found:
        return _rank_problems(specs, config)
    one_of_each = {path.rsplit("/", 1)[-1]: path for path in reversed(weights)}
    return [f"lora.targets: {'; '.join(found)} (there are {', '.join(sorted(one_of_each.values()))})"]


def _rank_problems(specs: Params, config: LoraConfig) -> list[str]:
    """A rank above the smaller side of a matrix makes an adapter that is larger than what it adapts."""

    def most(path: str, spec: ParamSpec) -> tuple[int, str] | None:
        if not (spec.contracting and tree.first_match(path, config.targets)):
            return None
        rows = spec.layer().fan_in
        return min(rows, math.prod(spec.layer().shape) // rows), path

    pairs = tree.map_with_path(most, specs)
    rank, path = min(jax.tree.leaves(pairs, is_leaf=lambda pair: isinstance(pair, tuple)))
    return [f"lora.rank={config.rank} is above {rank}, the rank that {path} can have"] if config.rank > rank else []


def adapt(parts: Parts, config: LoraConfig, precision: PrecisionConfig) -> tuple[Parts, Params, Params]:
    """The parts over adapted weights, and the two halves of their specs, as they rest: trained, and frozen."""

    def wrap(path: str, spec: ParamSpec) -> tree.Leaf:
        in_codes = config.base == "int8" and spec.leading and spec.contracting
        base = leaves.int8_specs(spec) if in_codes else replace(spec, dtype=np.dtype(precision.compute_dtype))
        targeted = spec.contracting and tree.first_match(path, config.targets)
        return replace(leaves.lora_specs(spec, config.rank, config.alpha), base=base) if targeted else base

    specs = tree.map_with_path(wrap, parts.specs) if config.rank else parts.specs
    trained, frozen = tree.partition(specs, leaves.is_adapter if config.rank else lambda path: True)
    masters = jax.tree.map(lambda spec: replace(spec, dtype=np.dtype(precision.param_dtype)), trained)
    return replace(parts, specs=specs), masters, frozen
