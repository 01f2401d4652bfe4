"""Layout of Hugging Face tensors: which leaf, layer and expert each part of a tensor belongs to, and its axis order."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxopt_llm.checkpoint.huggingface.codecs import Unsupported
from jaxopt_llm.checkpoint.huggingface.family import BY_HEAD, Family
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core import tree
from jaxopt_llm.model import decoder_specs
from jaxopt_llm.model.param import ParamSpec


class TensorPiece(NamedTuple):
    """Part of a Hugging Face tensor that holds one of our parameters, for one layer and one expert.

    Attributes:
        path: path of our leaf.
        layer: index of the layer in the leaf's stack; None for a leaf that is not stacked.
        expert: index of the expert in the layer; None for a parameter without experts.
        spec: spec of one layer and one expert, without padding.
        begin: first index along the tensor's output dimension, or within each of its equal `groups`.
        groups: number of equal groups of outputs: 1, or the number of heads if leaves alternate head by head.
        group_size: outputs of one group.
    """

    path: str
    layer: int | None
    expert: int | None
    spec: ParamSpec
    begin: int
    groups: int = 1
    group_size: int = 0

    @property
    def width(self) -> int:
        """Size along the tensor's output dimension."""
        return math.prod(self.spec.shape) // self.spec.fan_in

    @property
    def output_index(self) -> slice | np.ndarray:
        """Indices along the tensor's output dimension."""
        size = self.width // self.groups
        if self.groups == 1:
            return slice(self.begin, self.begin + size)
        return (self.group_size * np.arange(self.groups)[:, None] + self.begin + np.arange(size)).reshape(-1)


@dataclass(frozen=True)
class TensorLayout:
    """Layout of one Hugging Face tensor.

    Its pieces lie next to each other along the output dimension, or within each of its equal groups. A matrix is
    [out, in], or [in, out] with `input_first`.
    """

    pieces: tuple[TensorPiece, ...]
    input_first: bool

    @property
    def groups(self) -> int:
        return self.pieces[0].groups

    @property
    def is_expert(self) -> bool:
        return self.pieces[0].expert is not None

    @property
    def shape(self) -> tuple[int, ...]:
        spec = self.pieces[0].spec
        width = sum(piece.width for piece in self.pieces)
        if not spec.contracting:
            return (width,)
        return (spec.fan_in, width) if self.input_first else (width, spec.fan_in)

    def view(self, array: np.ndarray, piece: TensorPiece) -> np.ndarray:
        """Return a view of a piece of the tensor in the shape of our leaf, without reading the data."""
        order = self._axis_order(piece.spec)
        outputs = slice(piece.begin, piece.begin + piece.width // self.groups)
        if self.input_first and piece.spec.contracting:
            assert self.groups == 1
            part = array[:, outputs]
        else:
            part = array.reshape(self.groups, -1, *array.shape[1:])[:, outputs]
        return part.reshape([piece.spec.shape[dim] for dim in order]).transpose(np.argsort(order))

    def join(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Join the pieces to the tensor: the inverse of `view`."""
        parts = []
        for array, piece in zip(arrays, self.pieces, strict=True):
            sizes = (piece.spec.fan_in, -1) if self.input_first else (self.groups, -1, piece.spec.fan_in)
            transposed = array.transpose(self._axis_order(piece.spec))
            parts.append(transposed.reshape(sizes if piece.spec.contracting else (self.groups, -1)))
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return whole.reshape(self.shape)

    def _axis_order(self, spec: ParamSpec) -> list[int]:
        """Return our dimensions in the order of the tensor's dimensions."""
        contracting = sorted(spec.contracting)
        others = [dim for dim in range(len(spec.shape)) if dim not in contracting]
        return contracting + others if self.input_first else others + contracting


def list_tensor_layouts(family: Family, config: ModelConfig) -> dict[str, TensorLayout]:
    """Return the layouts of a model's tensors by tensor name, in layer order; experts of a leaf are adjacent.

    Raises:
        Unsupported: the family has no tensor for a parameter of the model.
    """
    specs = dict(tree.leaves_with_path(decoder_specs.param_specs(config)))
    # Path prefix, index in the stack, and layer number; the first entry is for leaves outside the stacks.
    positions: list[tuple[str, int | None, int | None]] = [("", None, None), *decoder_specs.locate_layers(config)]
    layouts: dict[str, TensorLayout] = {}
    used: set[str] = set()
    for prefix, row, layer in positions:
        for name, leaves in family.names.items():
            paths = [prefix + leaf for leaf in leaves.replace(BY_HEAD, " ").split()]
            if ("{}" in name) != bool(prefix) or paths[0] not in specs:
                continue
            layer_specs = [_layer_spec(specs[path], config) for path in paths]
            has_experts = "experts" in layer_specs[0].axes
            if has_experts != (name.count("{}") == 2):
                continue
            piece_specs = [spec.drop_leading(1) if has_experts else spec for spec in layer_specs]
            groups = config.heads if BY_HEAD in leaves else 1
            for expert in range(config.moe.experts) if has_experts else (None,):
                pieces: list[TensorPiece] = []
                for path, spec in zip(paths, piece_specs, strict=True):
                    begin = sum(piece.width for piece in pieces) // groups
                    pieces.append(TensorPiece(path, row, expert, spec, begin, groups))
                group_size = sum(piece.width for piece in pieces) // groups
                pieces = [piece._replace(group_size=group_size) for piece in pieces]
                # Tables are [rows, width], whatever the layout of the matrices.
                layouts[name.format(layer, expert)] = TensorLayout(tuple(pieces), family.input_first and bool(prefix))
            used |= set(paths)
    if missing := specs.keys() - used:
        raise Unsupported(f"{family.model_type} has no tensor for {min(missing)}")
    return layouts


def _layer_spec(spec: ParamSpec, config: ModelConfig) -> ParamSpec:
    """Return the spec of one layer, without padding.

    A router's product differs from that of all our other matrices; in Hugging Face tensors it is an ordinary matrix.
    """
    layer_spec = spec if spec.layers is None else spec.unstack()
    sizes = zip(layer_spec.shape, layer_spec.axes, strict=True)
    return replace(
        layer_spec,
        shape=tuple(config.vocabulary_size if axis == "vocabulary" else size for size, axis in sizes),
        contracting=layer_spec.contracting or ((0,) if layer_spec.is_multiplied else ()),
    )
