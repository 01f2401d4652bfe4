"""Hugging Face's tensors as pieces of our leaves: which leaf, which layer, which expert, and how they lie there."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxopt_llm import tree
from jaxopt_llm.checkpoint.codecs import Unsupported
from jaxopt_llm.checkpoint.family import Family
from jaxopt_llm.checkpoint.names import BY_HEAD
from jaxopt_llm.model import decoder
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.experts import ROUTER
from jaxopt_llm.model.param import ParamSpec


class Piece(NamedTuple):
    """A parameter of ours within a tensor of theirs.

    path: of our leaf; layer: its place in the leaf's stack, None for what is in none; expert: its place among the
    layer's, None for what is of none; spec: of one layer and expert, without padding; begin: where it begins along the
    tensor's output dimension, or along each of its equal `parts`; every: outputs of such a part.
    """

    path: str
    layer: int | None
    expert: int | None
    spec: ParamSpec
    begin: int
    parts: int = 1
    every: int = 0

    @property
    def width(self) -> int:
        """Along the tensor's output dimension."""
        return math.prod(self.spec.shape) // self.spec.fan_in

    @property
    def rows(self) -> slice | np.ndarray:
        """Where it is along the tensor's output dimension."""
        size = self.width // self.parts
        if self.parts == 1:
            return slice(self.begin, self.begin + size)
        return (self.every * np.arange(self.parts)[:, None] + self.begin + np.arange(size)).reshape(-1)


@dataclass(frozen=True)
class Tensor:
    """One of theirs: pieces of ours, side by side along the output, or within each of its equal parts. A matrix is
    [out, in], or [in, out]."""

    pieces: tuple[Piece, ...]
    input_first: bool

    @property
    def parts(self) -> int:
        return self.pieces[0].parts

    @property
    def of_expert(self) -> bool:
        return self.pieces[0].expert is not None

    @property
    def shape(self) -> tuple[int, ...]:
        spec = self.pieces[0].spec
        width = sum(piece.width for piece in self.pieces)
        if not spec.contracting:
            return (width,)
        return (spec.fan_in, width) if self.input_first else (width, spec.fan_in)

    def view(self, array: np.ndarray, piece: Piece) -> np.ndarray:
        """The piece as our leaf's shape has it: a view, of which nothing is read."""
        order = self._order(piece.spec)
        part = slice(piece.begin, piece.begin + piece.width // self.parts)
        if self.input_first and piece.spec.contracting:
            assert self.parts == 1
            cut = array[:, part]
        else:
            cut = array.reshape(self.parts, -1, *array.shape[1:])[:, part]
        return cut.reshape([piece.spec.shape[dim] for dim in order]).transpose(np.argsort(order))

    def join(self, arrays: list[np.ndarray]) -> np.ndarray:
        """The tensor of its pieces: the inverse of `view`."""
        parts = []
        for array, piece in zip(arrays, self.pieces, strict=True):
            sizes = (piece.spec.fan_in, -1) if self.input_first else (self.parts, -1, piece.spec.fan_in)
            turned = array.transpose(self._order(piece.spec))
            parts.append(turned.reshape(sizes if piece.spec.contracting else (self.parts, -1)))
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return whole.reshape(self.shape)

    def _order(self, spec: ParamSpec) -> list[int]:
        """Our dimensions in the order that theirs has them."""
        summed = sorted(spec.contracting)
        others = [dim for dim in range(len(spec.shape)) if dim not in summed]
        return summed + others if self.input_first else others + summed


def tensors(family: Family, config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a model by their names, in the order of the layers; those of a leaf's experts are side by side."""
    by_path = dict(tree.leaves_with_path(decoder.param_specs(config)))
    # Our prefix, its place in the stack, the layer's number; first of what is outside the stacks.
    places: list[tuple[str, int | None, int | None]] = [("", None, None), *decoder.places(config)]
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for prefix, row, layer in places:
        for name, ours in family.names.items():
            paths = [prefix + each for each in ours.replace(BY_HEAD, " ").split()]
            if ("{}" in name) != bool(prefix) or paths[0] not in by_path:
                continue
            specs = [_as_theirs(path, by_path[path], config) for path in paths]
            of_experts = "experts" in specs[0].axes
            if of_experts != (name.count("{}") == 2):
                continue
            specs = [spec.without(1) if of_experts else spec for spec in specs]
            for expert in range(config.experts) if of_experts else (None,):
                parts = config.heads if BY_HEAD in ours else 1
                pieces: list[Piece] = []
                for path, spec in zip(paths, specs, strict=True):
                    begin = sum(piece.width for piece in pieces) // parts
                    pieces.append(Piece(path, row, expert, spec, begin, parts))
                pieces = [piece._replace(every=sum(each.width for each in pieces) // parts) for piece in pieces]
                # Tables are [rows, width] whatever the matrices are.
                found[name.format(layer, expert)] = Tensor(tuple(pieces), family.input_first and bool(prefix))
            used |= set(paths)
    missing = by_path.keys() - used
    if missing:
        raise Unsupported(f"{family.model_type} has no tensor for {min(missing)}")
    return found


def _as_theirs(path: str, spec: ParamSpec, config: ModelConfig) -> ParamSpec:
    """Of one layer, without padding; a router, whose product is as no other matrix's here, is one there."""
    one = spec if spec.layers is None else spec.layer()
    sizes = zip(one.shape, one.axes, strict=True)
    return replace(
        one,
        shape=tuple(config.vocabulary_size if axis == "vocabulary" else size for size, axis in sizes),
        contracting=(0,) if path.endswith(ROUTER) else one.contracting,
    )
