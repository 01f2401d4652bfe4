"""PEFT's folders of LoRA adapters, adapter_config.json beside safetensors, read into our leaves; peft_writing.py
writes them.

An adapter of theirs is of a module: A [rank, in] and B [out, rank], whatever the layout of the module's weight. A fused
module has one of them for all that is side by side in it. Read, each of our parameters has that A and its rows of B.
Written, the A of its parameters lie below each other and their B are blocks on a diagonal: the same adapter, of a
higher rank. A table that is the head, too, has the same adapter as both.
"""

import functools
import math
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxopt_llm import tree
from jaxopt_llm.checkpoint import huggingface, peft_config, safetensors
from jaxopt_llm.checkpoint.family import Family
from jaxopt_llm.checkpoint.huggingface import Folder
from jaxopt_llm.checkpoint.peft_config import PeftConfig, endings
from jaxopt_llm.checkpoint.safetensors import Stored
from jaxopt_llm.checkpoint.tensors import Piece, Tensor, tensors
from jaxopt_llm.errors import InputError
from jaxopt_llm.model import leaves
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params
from jaxopt_llm.model.param import ParamSpec

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
HEAD = "lm_head"  # in every family
EMBEDDING = "outer/embedding/table"
MLP = "/mlp/"
LOOKED_UP = (EMBEDDING, "outer/positions/table")  # modules of these have no product, and factors of other names

LINEAR = ("lora_A.weight", "lora_B.weight")  # [rank, in], [out, rank]
LOOK_UP = ("lora_embedding_B", "lora_embedding_A")  # [width, rank], [rank, rows]
MAGNITUDE = "lora_magnitude_vector"  # [out]
BASE = "base_layer.weight"  # the model's own, which may come along with adapters of its tables
KINDS = (*LINEAR, *LOOK_UP, MAGNITUDE, BASE)


class Module(NamedTuple):
    """A module that may have an adapter, and its weight. looked_up: whether it is an embedding of theirs."""

    name: str
    weight: Tensor
    looked_up: bool

    @property
    def inputs(self) -> int:
        return self.weight.pieces[0].spec.fan_in

    @property
    def outputs(self) -> int:
        return sum(piece.width for piece in self.weight.pieces)

    def shapes(self, rank: int, dora: bool) -> dict[str, tuple[int, ...]]:
        """Of its adapter's tensors."""
        if self.looked_up:
            return dict(zip(LOOK_UP, ((self.inputs, rank), (rank, self.outputs)), strict=True))
        factors = dict(zip(LINEAR, ((rank, self.inputs), (self.outputs, rank)), strict=True))
        return {**factors, MAGNITUDE: (self.outputs,)} if dora else {**factors}

    @property
    def in_block(self) -> bool:
        return self.weight.pieces[0].layer is not None


def modules(family: Family, config: ModelConfig) -> dict[str, Module]:
    """By their names, in the order of the layers. Experts and their routers are none, for transformers' classes hold
    them as bare parameters; nor are, beside experts, the MLPs of other layers, whose names PEFT takes for theirs."""
    found = {}
    for tensor_name, tensor in tensors(family, config).items():
        name, first = tensor_name.removesuffix(".weight"), tensor.pieces[0]
        if first.spec.contracting and not (config.experts and MLP in first.path):
            found[name] = Module(name, tensor, first.path in LOOKED_UP)
            if first.path == EMBEDDING and config.tied_head:
                found[HEAD] = Module(HEAD, tensor, looked_up=False)
    return found


class Factors(NamedTuple):
    """A module's adapter. a: [in, rank]; b: [out, rank]; magnitude: [out], with DoRA; scale: of A·B."""

    module: str
    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None
    alpha: float
    scale: float


class Part(NamedTuple):
    """What one of our parameters has of a module's adapter. columns: of its factors."""

    factors: Factors
    piece: Piece
    columns: slice

    @property
    def rank(self) -> int:
        return self.columns.stop - self.columns.start

    def view(self, kind: str) -> np.ndarray:
        """In the shape of our leaf of this name, of this rank; nothing of it is read."""
        shape, summed = self.piece.spec.shape, sorted(self.piece.spec.contracting)
        others = [size for dim, size in enumerate(shape) if dim not in summed]
        rows = self.piece.rows
        if kind == "lora_a":
            return self.factors.a[:, self.columns].reshape(*(shape[dim] for dim in summed), self.rank)
        if kind == "lora_b":
            return self.factors.b[rows, self.columns].reshape(*others, self.rank)
        assert kind == "magnitude" and self.factors.magnitude is not None
        return self.factors.magnitude[rows].reshape(others)


@dataclass(frozen=True)
class Adapter:
    """A folder whose headers are checked: every module that is selected has its tensors, and there are no others.

    lora: the fields of LoraConfig that it settles. scale: of its A·B, as these have it. parts: by our parameter and the
    place in its stack; not all places of a stack need have one. base: tensors of the model that came along, by module.
    """

    path: Path
    lora: dict[str, Any]
    scale: float
    parts: Mapping[tuple[str, int | None], Part]
    file: Stored
    base: Mapping[str, Stored]

    def adapted(self, specs: Params) -> Params:
        """The specs of a bare model with these adapters."""
        weights = {weight for weight, _ in self.parts}

        def wrap(path: str, spec: ParamSpec) -> tree.Leaf:
            rank, dora = self.lora["rank"], self.lora["dora"]
            return leaves.lora_specs(spec, rank, self.scale, dora) if path in weights else spec

        return tree.map_with_path(wrap, specs)

    def read(self, path: str, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        """An adapter's leaf, as */attention/query/lora_a, in the shape and dtype of its spec. Raises InputError for
        values that are not finite there.

        Zeros stand where a layer has no adapter, and where its rank is lower than the spec's. Where a module's scale
        is another than ours, its B makes up for it.
        """
        weight, _, kind = path.rpartition("/")
        leaf = huggingface.filled(spec, sharding, functools.partial(self._fill, weight, kind))
        self.file.release()
        return leaf

    def _fill(self, weight: str, kind: str, out: np.ndarray, layer: int | None, index: tuple[slice, ...]) -> None:
        part = self.parts.get((weight, layer))
        if part is None:
            return
        source = part.view(kind)[index]
        ratio = np.float32(part.factors.scale / self.scale)
        if kind == "lora_b" and ratio != 1:
            source = source.astype(np.float32) * ratio
        out = out[tuple(slice(size) for size in source.shape)]  # fewer than ours where ours are padded
        with np.errstate(over="ignore"):  # told below
            out[...] = source
        if not np.isfinite(out).all():
            module = part.factors.module
            raise InputError(f"{self.file.file}: adapter of {module}: it has values that are not finite in {out.dtype}")

    def check_base(self, folder: Folder | None) -> None:
        """Raises InputError where tensors of the model that came along are not this folder's. None: where its weights
        come from no folder."""
        for module, stored in self.base.items():
            if folder is None:
                raise InputError(f"{stored.file}: weights of {module} came along, of a base: set --model.pretrained")
            table = next(name for name, ours in folder.family.names.items() if ours == EMBEDDING)
            name = table if module == HEAD and folder.config.tied_head else f"{module}.weight"
            if not huggingface.equal(stored, folder.stored[name]):
                raise InputError(
                    f"{stored.file}: the weights of {module} that came along are not those in {folder.path}: bring the "
                    "base that it was trained over, or save the adapter with save_embedding_layers=False"
                )


def open_adapter(path: Path, family: Family, config: ModelConfig) -> Adapter:
    """A folder's adapters of a model. Raises InputError for what is no whole folder of LoRA adapters of it, and for
    what they can be and ours cannot."""
    said = peft_config.read(path)
    every = modules(family, config)
    selected = {name for name, module in every.items() if said.selects(name, module.in_block)}
    if said.ensure_weight_tying and any(every[name].weight is every[HEAD].weight for name in selected):
        selected.add(HEAD)  # PEFT makes its adapter of the table's
    if not selected:
        raise InputError(
            f"{path / peft_config.FILE}: target_modules={said.target_modules!r}, with layers_to_transform="
            f"{said.layers_to_transform}, selects nothing of the model"
        )
    stored = _by_module(path, every, tensors(family, config))
    base = {name: each.pop(BASE) for name, each in stored.items() if BASE in each}
    for name, each in stored.items():
        if name not in selected and each:
            raise InputError(f"{path / WEIGHTS}: {name} has an adapter there, and none by {peft_config.FILE}")
    found = {name: _factors(path, said, every[name], stored.get(name, {})) for name in every if name in selected}
    if config.tied_head:
        _check_tied(path, every, found)
    parts = {
        (part.piece.path, part.piece.layer): part
        for name, factors in found.items()
        if not (name == HEAD and config.tied_head)
        for part in _parts(factors, every[name])
    }
    places = {(piece.path, piece.layer) for module in every.values() for piece in module.weight.pieces}
    paths = dict.fromkeys(path for path, _ in parts)
    partly = [weight for weight, _ in places - parts.keys() if weight in paths]
    if said.use_dora and partly:
        raise InputError(
            f"{path / peft_config.FILE}: use_dora on some layers alone of {min(partly)}: here it is on all, or "
            "on the last ones, where --model.last-layers sets them apart"
        )
    globs = endings(paths, {weight for weight, _ in places}, "/")
    widest = max(parts.values(), key=lambda part: part.rank)
    share = widest.factors.a.shape[1] / widest.rank  # more than 1 of a module that was written here of several
    lora = {
        "rank": widest.rank,
        "alpha": float(widest.factors.alpha / (math.sqrt(share) if said.use_rslora else share)),
        "targets": tuple(each if each in paths else f"*/{each}" for each in globs),
        "rslora": said.use_rslora,
        "dora": said.use_dora,
    }
    file = next(iter(stored[next(iter(found))].values()))
    return Adapter(path, lora, widest.factors.scale, parts, file, base)


def _by_module(path: Path, every: Collection[str], weights: Mapping[str, Tensor]) -> dict[str, dict[str, Stored]]:
    """The tensors of a folder by module and kind. weights: the model's tensors."""
    file = path / WEIGHTS
    if not file.is_file() and (path / PICKLE).is_file():
        code = (
            "import sys, torch; from safetensors.torch import save_file; "
            "save_file(torch.load(sys.argv[1], weights_only=True), sys.argv[2])"
        )
        paths = f"{shlex.quote(str(path / PICKLE))} {shlex.quote(str(file))}"
        raise InputError(
            f"{path}: its weights are a pickle, which can run code and is not opened; if you trust it, convert it: "
            f'python -c "{code}" {paths}'
        )
    if not file.is_file():
        raise InputError(f"{path}: it holds no adapter: {WEIGHTS} is not there")
    found: dict[str, dict[str, Stored]] = {}
    for name, stored in safetensors.open_file(file).items():
        kind = next((kind for kind in KINDS if name.endswith(f".{kind}")), "")
        module = name.removeprefix(PREFIX).removesuffix(f".{kind}")
        weight = weights.get(f"{module}.weight")
        if weight is not None and module not in every and MLP in weight.pieces[0].path:
            raise InputError(
                f"{file}: tensor {name!r}: adapters of experts, and of MLPs beside them, are not read here"
            )
        if not (kind and name.startswith(PREFIX) and module in every):
            raise InputError(f"{file}: tensor {name!r} is of no adapter of a matrix of the model")
        if stored.array.dtype not in safetensors.FLOATS.values():
            raise safetensors.not_float(file, name, str(stored.array.dtype))
        found.setdefault(module, {})[kind] = stored
    return found


def _factors(path: Path, said: PeftConfig, module: Module, stored: Mapping[str, Stored]) -> Factors:
    if said.use_dora and not module.in_block:
        raise InputError(f"{path / peft_config.FILE}: use_dora on {module.name}: here it is for matrices of the blocks")
    shapes = module.shapes(said.rank(module.name), said.use_dora)
    file, name = path / WEIGHTS, f"{PREFIX}{module.name}"
    for kind, shape in shapes.items():
        if kind not in stored:
            raise InputError(f"{file}: tensor '{name}.{kind}' is missing")
        if stored[kind].array.shape != shape:
            raise InputError(
                f"{file}: tensor '{name}.{kind}' is {list(stored[kind].array.shape)}, and by {peft_config.FILE} and "
                f"the model it must be {list(shape)}"
            )
    for kind in stored.keys() - shapes.keys():
        raise InputError(f"{file}: tensor '{name}.{kind}' is none that {peft_config.FILE} has there")
    arrays = {kind: each.array for kind, each in stored.items()}
    return Factors(
        module.name,
        a=arrays[LOOK_UP[0]] if module.looked_up else arrays[LINEAR[0]].T,
        b=arrays[LOOK_UP[1]].T if module.looked_up else arrays[LINEAR[1]],
        magnitude=arrays.get(MAGNITUDE),
        alpha=said.alpha(module.name),
        scale=said.scale(module.name),
    )


def _check_tied(path: Path, every: Mapping[str, Module], found: Mapping[str, Factors]) -> None:
    """A table that is the head, too, has one adapter."""
    both = [name for name, module in every.items() if module.weight is every[HEAD].weight]
    one, other = (found.get(name) for name in both)
    if one is other:  # there is none
        return
    if one and other and one.scale == other.scale and np.array_equal(one.a, other.a) and np.array_equal(one.b, other.b):
        return
    raise InputError(
        f"{path}: the model's head is its embedding table, and {' and '.join(both)} do not have the same adapter: "
        "train it with both in target_modules and ensure_weight_tying=True, or with neither"
    )


def _parts(factors: Factors, module: Module) -> list[Part]:
    """A module's adapter by our parameters. Where B is blocks on a diagonal, as it is written here of several of them,
    each has the columns of its block alone, and one whose rows are all zero has no adapter."""
    rank = factors.a.shape[1]
    whole = [Part(factors, piece, slice(0, rank)) for piece in module.weight.pieces]
    if len(whole) == 1:
        return whole
    used = [np.flatnonzero(np.any(factors.b[p.rows] != 0, axis=0)) for p in module.weight.pieces]
    several = [(part, columns) for part, columns in zip(whole, used, strict=True) if columns.size]
    if not several or rank % len(several):
        return whole
    width = rank // len(several)
    blocks = [part._replace(columns=slice(n * width, (n + 1) * width)) for n, (part, _) in enumerate(several)]
    apart = all(
        block.columns.start <= columns[0] and columns[-1] < block.columns.stop
        for block, (_, columns) in zip(blocks, several, strict=True)
    )
    return blocks if apart and (factors.magnitude is None or len(blocks) == len(whole)) else whole
