"""Modules and parameters of transformers' classes that can have an adapter of PEFT, and the names of their tensors.

Most adapters belong to a module. Experts are bare parameters in these classes, one for all experts of a layer; PEFT
adds adapters to those by `target_parameters`. In a model with experts, the matrices of its other MLPs, and others whose
modules have the same name, are targeted as parameters, too, because PEFT takes their modules for experts.

The adapter of a parameter belongs to the module that holds it. If several parameters of a module have one, PEFT nests
them in the order of the parameters: that of the last one has the plain name, and the others are in `base_layer`.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxopt_llm.checkpoint.huggingface.family import Family
from jaxopt_llm.checkpoint.huggingface.tensor_layout import TensorLayout, TensorPiece, list_tensor_layouts
from jaxopt_llm.config import ModelConfig

PREFIX = "base_model.model."
HEAD = "lm_head"  # in every family
EMBEDDING = "non_layer/embedding/table"
MLP = "/mlp/"
EMBEDDING_TABLES = (EMBEDDING, "non_layer/positions/table")  # their modules look up rows; factors have other names

LINEAR_FACTORS = ("lora_A.weight", "lora_B.weight")  # [rank, in], [out, rank]; experts: [E * rank, in], [out, rank * E]
EMBEDDING_FACTORS = ("lora_embedding_B", "lora_embedding_A")  # [width, rank], [rank, rows]
MAGNITUDE = "lora_magnitude_vector"  # [out]
BASE = "base_layer.weight"  # the base model's table, which PEFT may save together with an adapter of it
KINDS = (*LINEAR_FACTORS, *EMBEDDING_FACTORS, MAGNITUDE, BASE)


class PeftModule(NamedTuple):
    """Module or parameter that can have an adapter.

    Attributes:
        name: its name, which PEFT compares with targets and patterns.
        layouts: of its weight; of stacked experts, one for each expert.
        is_embedding: whether it looks up rows of a table.
        is_parameter: whether PEFT targets it as a parameter.
        is_swapped: whether A belongs to its outputs, and B to its inputs.
    """

    name: str
    layouts: tuple[TensorLayout, ...]
    is_embedding: bool = False
    is_parameter: bool = False
    is_swapped: bool = False

    @property
    def layout(self) -> TensorLayout:
        return self.layouts[0]

    @property
    def experts(self) -> int:
        """The number of experts that it holds; 0 for a parameter without experts."""
        spec = self.layout.pieces[0].spec
        if spec.expert_dims:
            return math.prod(spec.shape[dim] for dim in spec.expert_dims)
        return len(self.layouts) if self.is_parameter and self.layout.is_expert else 0

    @property
    def inputs(self) -> int:
        return self.layout.pieces[0].spec.fan_in

    @property
    def outputs(self) -> int:
        return sum(piece.width for piece in self.layout.pieces)

    @property
    def in_block(self) -> bool:
        return self.layout.pieces[0].layer is not None

    def shapes(self, rank: int, dora: bool) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its adapter's tensors by kind."""
        if self.is_embedding:
            return {EMBEDDING_FACTORS[0]: (self.inputs, rank), EMBEDDING_FACTORS[1]: (rank, self.outputs)}
        rows = rank * max(1, self.experts)
        inputs, outputs = (self.outputs, self.inputs) if self.is_swapped else (self.inputs, self.outputs)
        factors = {LINEAR_FACTORS[0]: (rows, inputs), LINEAR_FACTORS[1]: (outputs, rows)}
        return factors | ({MAGNITUDE: (self.outputs,)} if dora else {})


def find_table(family: Family) -> str:
    """Return the module of the embedding table."""
    return next(name for name, path in family.names.items() if path == EMBEDDING).removesuffix(".weight")


def find_modules(family: Family, config: ModelConfig) -> dict[str, PeftModule]:
    """Return what can have an adapter that PEFT adds to the classes of transformers 5, by name, in layer order.

    Routers are not among them, because ours have no adapters.
    """
    modules, layouts = {}, list_tensor_layouts(family, config)
    of_mlps = _name_projections(layouts) if config.moe.experts else set()
    renamed = {
        published.format(layer): name.format(layer)
        for layer, (name, published) in itertools.product(range(config.layers), family.in_memory_names.items())
        if published.count("{}") == 1
    }
    for tensor_name, layout in layouts.items():
        name, first = tensor_name.removesuffix(".weight"), layout.pieces[0]
        if not first.spec.contracting or layout.is_expert or is_router(layout):
            continue
        if first.spec.expert_dims:
            name = renamed.get(tensor_name, tensor_name)
            modules[name] = PeftModule(name, (layout,), is_parameter=True, is_swapped=family.swaps_expert_factors)
            continue
        if name.rpartition(".")[2] in of_mlps:
            modules[tensor_name] = PeftModule(tensor_name, (layout,), is_parameter=True)
            continue
        modules[name] = PeftModule(name, (layout,), first.path in EMBEDDING_TABLES)
        if first.path == EMBEDDING and config.table_is_head:
            modules[HEAD] = PeftModule(HEAD, (layout,))
    for layer, (in_memory, published) in itertools.product(range(config.layers), family.in_memory_names.items()):
        parts = [name for name in published.split() if name.count("{}") == 2]
        if not parts or parts[0].format(layer, 0) not in layouts:
            continue
        experts = range(config.moe.experts)
        joined = tuple(_join(layouts[part.format(layer, expert)] for part in parts) for expert in experts)
        modules[in_memory.format(layer)] = PeftModule(in_memory.format(layer), joined, is_parameter=True)
    return modules


def find_separate_modules(family: Family, config: ModelConfig) -> dict[str, PeftModule]:
    """Return the modules of a model with experts in the classes of transformers 4: each matrix of its MLPs is one."""
    layouts = list_tensor_layouts(family, config)
    of_mlps = _name_projections(layouts) if config.moe.experts else set()
    return {
        (module := name.removesuffix(".weight")): PeftModule(module, (layout,))
        for name, layout in layouts.items()
        if name.endswith(".weight") and name.split(".")[-2] in of_mlps and not layout.pieces[0].spec.expert_dims
    }


def _name_projections(layouts: Mapping[str, TensorLayout]) -> set[str]:
    """Return the last words of the names of all modules that are a matrix of an MLP."""
    return {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, layout in layouts.items()
        if MLP in layout.pieces[0].path and layout.pieces[0].spec.contracting and not is_router(layout)
    }


def is_router(layout: TensorLayout) -> bool:
    return layout.pieces[0].path.endswith(("/router", "/router_of_shared"))


def _join(layouts: Iterable[TensorLayout]) -> TensorLayout:
    """Return the layout of several matrices next to each other along their outputs."""
    pieces: list[TensorPiece] = []
    for layout in layouts:
        (piece,) = layout.pieces
        pieces.append(piece._replace(begin=sum(each.width for each in pieces)))
    return TensorLayout(tuple(pieces), input_first=False)


def name_stems(modules: Mapping[str, PeftModule]) -> dict[str, str]:
    """Return for each module that has an adapter the start of its tensors' names, without `PREFIX`."""
    stems, inside = {}, dict[str, int]()
    for name, module in reversed([*modules.items()]):
        owner = name.rpartition(".")[0] if module.is_parameter else name
        depth = inside[owner] = inside.get(owner, -1) + 1
        stems[name] = owner + ".base_layer" * depth
    return stems
