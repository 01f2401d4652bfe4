"""What trains: parameters by path, or LoRA's adapters beside a frozen base; and in which dtypes the rest rests."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import numpy as np

from jaxopt_llm import tree
from jaxopt_llm.model import leaves, nf4
from jaxopt_llm.model.decoder import Params, Parts
from jaxopt_llm.model.param import ParamSpec
from jaxopt_llm.parallel.precision import PrecisionConfig

ALL_LINEAR = "all-linear"  # a target that is no glob: PEFT's word for the matrices of the blocks


@dataclass(frozen=True)
class LoraConfig:
    pretrained: str = ""
    """folder of a PEFT adapter of the model: adapters begin as it has them, and rank, alpha, targets, rslora and dora
    come from it"""
    rank: int = 0
    """inner size of the adapters, which alone are trained; 0 trains the parameters themselves"""
    alpha: float = 16.0
    """an adapter's product counts alpha / rank"""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """the weights that get adapters: all-linear, the matrices of the blocks, or globs of paths, as in
    */attention/query, where * also fits slashes. The first that fits a path decides, and each must decide at least
    one"""
    base: Literal["float", "int8", "nf4"] = "float"
    """how the frozen base rests: float in precision.compute_dtype; the matrices of the blocks as int8 codes, or as
    4-bit NormalFloat (QLoRA)"""
    double_quantisation: bool = False
    """whether the scales of nf4's blocks are codes of 8 bits, too: 4.1 bits for each weight in place of 4.5"""
    rslora: bool = False
    """an adapter's product counts alpha / √rank, so that its size does not depend on the rank (Kalajdzievski 2023)"""
    dora: bool = False
    """whether the length of each output channel of a weight is trained apart from its direction (Liu et al. 2024)"""
    dropout: float = 0.0
    """share of what an adapter of the blocks reads that a step drops"""

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def problems(self) -> list[str]:
        found = []
        if self.rank < 0:
            found.append(f"lora.rank={self.rank}: must be at least 0")
        if not self.alpha > 0:
            found.append(f"lora.alpha={self.alpha}: must be above 0")
        if not 0 <= self.dropout < 1:
            found.append(f"lora.dropout={self.dropout}: must lie in [0, 1)")
        if self.rank > 0 and not self.targets:
            found.append("lora.targets: must name at least one weight")
        if self.rank == 0 and not self.pretrained:
            found += [
                f"lora.{name}={getattr(self, name)} is of adapters, and lora.rank=0 trains the parameters themselves: "
                "set --lora.rank, too, or leave that out"
                for name in ("alpha", "targets", "base", "rslora", "dora", "dropout")
                if getattr(self, name) != getattr(LoraConfig, name)
            ]
        if self.double_quantisation and self.base != "nf4":
            found.append(f"lora.double_quantisation is of nf4's scales, and lora.base={self.base}: set --lora.base nf4")
        return found


def problems(specs: Params, config: LoraConfig, trainable: tuple[str, ...] = ()) -> list[str]:
    """What these settings select wrongly of a model. specs: of the bare one; trainable: see TrainingConfig."""
    paths = jax.tree.leaves(tree.map_with_path(lambda path, spec: path, specs))
    found = [f"training.trainable: {said}" for said in _undecided(paths, paths, trainable, "parameter")]
    if not config.rank:
        return found
    weights = jax.tree.leaves(tree.map_with_path(lambda path, spec: path if spec.contracting else None, specs))
    found += [f"lora.targets: {said}" for said in _undecided(paths, weights, config.targets, "matrix")]
    both = [path for path in weights if _fits(path, config.targets) and tree.first_match(path, trainable)]
    if both:
        found.append(f"{both[0]} is trained whole by training.trainable and adapted by lora.targets: choose one")
    return found or [
        *_rank_problems(specs, config),
        *_table_problems(weights, config),
        *_expert_problems(specs, config),
        *_nf4_problems(specs, config),
    ]


def _undecided(paths: list[str], weights: list[str], patterns: tuple[str, ...], kind: str) -> list[str]:
    """Patterns that decide no weight, and what exists instead, in one line."""
    deciding = {_fits(path, patterns) for path in weights}
    found = []
    for number, pattern in enumerate(patterns):
        fits = [path for path in paths if _fits(path, (pattern,))]
        if pattern in deciding and pattern not in patterns[:number]:
            continue
        if not fits:
            found.append(f"{pattern} fits no parameter")
        elif set(fits).isdisjoint(weights):
            found.append(f"{pattern} fits no {kind}, only {fits[0]}")
        else:
            found.append(f"{pattern} comes after patterns that fit all that it fits")
    one_of_each = {path if path.startswith("outer/") else path.rsplit("/", 1)[-1]: path for path in reversed(weights)}
    return [f"{'; '.join(found)} (there are {', '.join(sorted(one_of_each.values()))})"] if found else []


def _fits(path: str, targets: tuple[str, ...]) -> str | None:
    """The first of the targets that fits a path."""
    for target in targets:
        glob = "segment_*/*" if target == ALL_LINEAR else target
        if tree.first_match(path, (glob,)):
            return target
    return None


def _rank_problems(specs: Params, config: LoraConfig) -> list[str]:
    """A rank above the smaller side of a matrix makes an adapter that is larger than what it adapts."""

    def most(path: str, spec: ParamSpec) -> tuple[int, str] | None:
        if not (spec.contracting and _fits(path, config.targets)):
            return None
        one = spec.layer()
        experts = math.prod(one.shape[dim] for dim in one.numbered)
        return min(one.fan_in, math.prod(one.shape) // experts // one.fan_in), path

    pairs = tree.map_with_path(most, specs)
    rank, path = min(jax.tree.leaves(pairs, is_leaf=lambda pair: isinstance(pair, tuple)))
    return [f"lora.rank={config.rank} is above {rank}, the rank that {path} can have"] if config.rank > rank else []


def _table_problems(weights: list[str], config: LoraConfig) -> list[str]:
    adapted = [path for path in weights if _fits(path, config.targets)]
    tables = [path for path in adapted if path.startswith("outer/")]
    if config.dropout and adapted == tables:
        return [f"lora.dropout is of what the blocks read, and lora.targets select {tables[0]} alone: set 0"]
    if not (config.dora and tables):
        return []
    return [f"lora.dora is for the matrices of the blocks, and lora.targets select {tables[0]}: leave that out"]


def _expert_problems(specs: Params, config: LoraConfig) -> list[str]:
    """What adapters of experts do not have."""
    fits = tree.map_with_path(lambda path, spec: path if spec.numbered and _fits(path, config.targets) else None, specs)
    names = [name for name in ("dora", "dropout") if getattr(config, name)]
    return [
        f"lora.{name} is not for experts, and lora.targets select {path}: leave that out, or set lora.targets"
        for path in jax.tree.leaves(fits)[:1]
        for name in names
    ]


def _nf4_problems(specs: Params, config: LoraConfig) -> list[str]:
    if config.base != "nf4":
        return []
    matrices = [spec for spec in jax.tree.leaves(specs) if spec.leading and spec.contracting]
    along = {(spec.axes[dim], spec.shape[dim]) for spec in matrices for dim in (leaves.nf4_dim(spec),)}
    return [
        f"lora.base=nf4: {'model.width=' if axis == 'embed' else 'the rank of a latent, '}{size} is no multiple of "
        f"{nf4.BLOCKS[-1]}: set --lora.base int8"
        for axis, size in sorted(along)
        if not nf4.block(size)
    ]


def adapt(
    parts: Parts, config: LoraConfig, precision: PrecisionConfig, trainable: tuple[str, ...] = ()
) -> tuple[Parts, Params, Params]:
    """The parts over adapted weights, and the two halves of their specs, as they rest: trained, and frozen.

    trainable: see TrainingConfig.
    """

    bare = jax.tree.leaves(tree.map_with_path(lambda path, spec: path, parts.specs))
    whole = {path for path in bare if tree.first_match(path, trainable or (() if config.rank else ("*",)))}

    def wrap(path: str, spec: ParamSpec) -> tree.Leaf:
        if path in whole:
            return spec
        base: tree.Leaf = replace(spec, dtype=np.dtype(precision.of(spec).compute_dtype))
        if config.base != "float" and spec.leading and spec.contracting:
            base = leaves.coded_specs(spec, config.base, config.double_quantisation)
        if not (config.rank and spec.contracting and _fits(path, config.targets)):
            return base
        return replace(leaves.lora_specs(spec, config.rank, config.scale, config.dora, config.dropout), base=base)

    specs = tree.map_with_path(wrap, parts.specs)
    trained, frozen = tree.partition(specs, lambda path: path in whole or leaves.is_adapter(path))
    masters = jax.tree.map(lambda spec: replace(spec, dtype=np.dtype(precision.param_dtype)), trained)
    return replace(parts, specs=specs), masters, frozen
