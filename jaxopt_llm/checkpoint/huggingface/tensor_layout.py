"""Layout of Hugging Face tensors: which leaf, layer and expert each part of a tensor belongs to, and its axis order."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np

from jaxopt_llm.checkpoint.huggingface.codecs import Unsupported
from jaxopt_llm.checkpoint.huggingface.family import ALL_EXPERTS, BY_HEAD, BY_OUTPUT, EITHER, Family
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core import tree
from jaxopt_llm.model import decoder_specs
from jaxopt_llm.model.param import ParamSpec


class TensorPiece(NamedTuple):
    """Part of a Hugging Face tensor that holds one of our parameters, for one layer and one expert.

    Attributes:
        path: path of our leaf.
        layer: index of the layer in the leaf's stack; None for a leaf that is not stacked.
        expert: index of the expert in the layer; None for a parameter without experts, or of all experts.
        spec: spec of one layer, and of one expert if `expert` names it, without padding.
        begin: first index along the tensor's output dimension, or within each of its equal `groups`.
        groups: number of equal groups of outputs: 1, or the number of heads, or of outputs, by which leaves alternate.
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
        return _count_outputs(self.spec)

    @property
    def output_index(self) -> slice | np.ndarray:
        """Indices along the tensor's output dimension."""
        size = self.width // self.groups
        if self.groups == 1:
            return slice(self.begin, self.begin + size)
        return (self.group_size * np.arange(self.groups)[:, None] + self.begin + np.arange(size)).reshape(-1)


def _count_outputs(spec: ParamSpec) -> int:
    """Return the number of outputs of one layer and one expert."""
    return (
        math.prod(spec.shape) // spec.fan_in // _count_taps(spec) // math.prod(spec.shape[d] for d in spec.expert_dims)
    )


def _count_taps(spec: ParamSpec) -> int:
    """Return the number of taps of a convolution in which each output has its own kernel; 1 for other parameters."""
    return spec.shape[-1] if spec.axes[-1:] == ("taps",) else 1


@dataclass(frozen=True)
class TensorLayout:
    """Layout of one Hugging Face tensor.

    Its pieces lie next to each other along the output dimension, or within each of its equal groups. A matrix is
    [out, in], or [in, out] with `input_first`. A tensor that holds all experts of a layer has them as first dimension.
    A vector is [1, out] with `is_row`. The kernels of a convolution are [out, 1, taps].
    """

    pieces: tuple[TensorPiece, ...]
    input_first: bool
    is_row: bool = False

    @property
    def groups(self) -> int:
        return self.pieces[0].groups

    @property
    def is_expert(self) -> bool:
        return self.pieces[0].expert is not None

    @property
    def shape(self) -> tuple[int, ...]:
        before, after = self._other_dims
        return (*before, sum(piece.width for piece in self.pieces), *after)

    @property
    def _other_dims(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tensor's dimensions before and after the output dimension."""
        spec = self.pieces[0].spec
        experts = tuple(spec.shape[dim] for dim in spec.expert_dims)
        inputs = (spec.fan_in,) if spec.contracting else (1, taps) if (taps := _count_taps(spec)) > 1 else ()
        before, after = (inputs, ()) if self.input_first else ((), inputs)
        return (*((1,) if self.is_row else ()), *experts, *before), after

    def view(self, array: np.ndarray, piece: TensorPiece) -> np.ndarray:
        """Return a view of a piece of the tensor in the shape of our leaf, without reading the data."""
        order = self._axis_order(piece.spec)
        before, after = self._other_dims
        part = array.reshape(*before, self.groups, -1, *after)
        outputs = slice(piece.begin, piece.begin + piece.width // self.groups)
        part = part[(*[slice(None)] * len(before), slice(None), outputs)]
        return part.reshape([piece.spec.shape[dim] for dim in order]).transpose(np.argsort(order))

    def join(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Join the pieces to the tensor: the inverse of `view`."""
        before, after = self._other_dims
        parts = [
            array.transpose(self._axis_order(piece.spec)).reshape(*before, self.groups, -1, *after)
            for array, piece in zip(arrays, self.pieces, strict=True)
        ]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=len(before) + 1)
        return whole.reshape(self.shape)

    def _axis_order(self, spec: ParamSpec) -> list[int]:
        """Return our dimensions in the order of the tensor's dimensions."""
        contracting, experts = sorted(spec.contracting), [*spec.expert_dims]
        others = [dim for dim in range(len(spec.shape)) if dim not in (*contracting, *experts)]
        return experts + (contracting + others if self.input_first else others + contracting)


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
        for name, choices in family.tensor_names.items():
            leaves = next((each for each in choices.split(EITHER) if prefix + each in specs), choices)
            paths = [prefix + leaf for leaf in _split(leaves)]
            if ("{}" in name) != bool(prefix) or paths[0] not in specs:
                continue
            layer_specs = [_layer_spec(specs[path], config) for path in paths]
            by_expert = name.count("{}") == 2
            if bool(layer_specs[0].expert_dims) != (by_expert or leaves.startswith(ALL_EXPERTS)):
                continue
            piece_specs = [spec.drop_leading(1) if by_expert else spec for spec in layer_specs]
            heads = config.delta.key_heads if leaves.startswith("delta/") else config.heads
            groups = heads if BY_HEAD in leaves else _count_outputs(piece_specs[0]) if BY_OUTPUT in leaves else 1
            for expert in range(config.moe.experts) if by_expert else (None,):
                pieces: list[TensorPiece] = []
                for path, spec in zip(paths, piece_specs, strict=True):
                    begin = sum(piece.width for piece in pieces) // groups
                    pieces.append(TensorPiece(path, row, expert, spec, begin, groups))
                group_size = sum(piece.width for piece in pieces) // groups
                pieces = [piece._replace(group_size=group_size) for piece in pieces]
                input_first, is_row = (fnmatchcase(name, each) for each in (family.input_first, family.rows))
                layouts[name.format(layer, expert)] = TensorLayout(tuple(pieces), input_first, is_row)
            used |= set(paths)
    if missing := specs.keys() - used:
        raise Unsupported(f"{family.model_type} has no tensor for {min(missing)}")
    return layouts


def find_form(family: Family, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Family:
    """Return the family in the form that a folder's tensors have.

    A tensor of the folder tells the form if no other form has a tensor of this name and shape. Between [in, out] and
    [out, in], a square matrix tells nothing; gate and up together, [D, 2F], and down, [F, D], are never both square.

    shapes: those of the folder's tensors by name; none for a new folder.
    """
    own = list_tensor_layouts(family, config) if family.forms else {}
    for changes in family.forms:
        form = replace(family, **changes)
        for name, layout in list_tensor_layouts(form, config).items():
            if shapes.get(name) == layout.shape and (name not in own or own[name].shape != layout.shape):
                return form
    return family


def _split(leaves: str) -> list[str]:
    """Return the paths of the leaves of a tensor in `Family.names`."""
    return leaves.removeprefix(ALL_EXPERTS).replace(BY_HEAD, " ").replace(BY_OUTPUT, " ").split()


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
