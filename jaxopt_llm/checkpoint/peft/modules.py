"""PEFT modules of a model: which modules can have an adapter, and the shapes of the adapter's tensors."""

from typing import NamedTuple

from jaxopt_llm.checkpoint.huggingface.family import Family
from jaxopt_llm.checkpoint.huggingface.tensor_layout import TensorLayout, list_tensor_layouts
from jaxopt_llm.config import ModelConfig

PREFIX = "base_model.model."
HEAD = "lm_head"  # in every family
EMBEDDING = "non_layer/embedding/table"
MLP = "/mlp/"
EMBEDDING_TABLES = (EMBEDDING, "non_layer/positions/table")  # their modules look up rows; factors have other names

LINEAR_FACTORS = ("lora_A.weight", "lora_B.weight")  # [rank, in], [out, rank]
EMBEDDING_FACTORS = ("lora_embedding_B", "lora_embedding_A")  # [width, rank], [rank, rows]
MAGNITUDE = "lora_magnitude_vector"  # [out]
BASE = "base_layer.weight"  # the base model's table, which PEFT may save together with an adapter of it
KINDS = (*LINEAR_FACTORS, *EMBEDDING_FACTORS, MAGNITUDE, BASE)


class PeftModule(NamedTuple):
    """Module that can have an adapter. layout: of its weight; is_embedding: whether it looks up rows of a table."""

    name: str
    layout: TensorLayout
    is_embedding: bool

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
        factors = {LINEAR_FACTORS[0]: (rank, self.inputs), LINEAR_FACTORS[1]: (self.outputs, rank)}
        return factors | ({MAGNITUDE: (self.outputs,)} if dora else {})


def find_table(family: Family) -> str:
    """Return the module of the embedding table."""
    return next(name for name, path in family.names.items() if path == EMBEDDING).removesuffix(".weight")


def is_table(layout: TensorLayout) -> bool:
    """Return whether a tensor has a row for each token id."""
    return "vocabulary" in layout.pieces[0].spec.axes


def list_enclosing(tensor: str) -> list[str]:
    """Return the names of the modules that a tensor is in, from the outermost one."""
    words = tensor.split(".")[:-1]
    return [".".join(words[: count + 1]) for count in range(len(words))]


def find_modules(family: Family, config: ModelConfig) -> dict[str, PeftModule]:
    """Return the modules of a model that can have an adapter, by name, in layer order.

    Experts and routers are not among them, because transformers' classes hold them as bare parameters. In a model with
    experts, the MLPs of the other layers are not among them either, because PEFT takes their names for experts.
    """
    modules = {}
    for tensor_name, layout in list_tensor_layouts(family, config).items():
        name, first = tensor_name.removesuffix(".weight"), layout.pieces[0]
        if first.spec.contracting and not (config.moe.experts and MLP in first.path):
            modules[name] = PeftModule(name, layout, first.path in EMBEDDING_TABLES)
            if first.path == EMBEDDING and config.tied_head:
                modules[HEAD] = PeftModule(HEAD, layout, is_embedding=False)
    return modules
