"""PEFT folders of LoRA adapters, adapter_config.json and safetensors, read into our leaves.

adapter_writer.py writes such folders. Beside adapters, a folder may hold whole weights: `modules_to_save`, and tables
of another size. PEFT loads such a tensor in place of the model's own. It may also hold single rows: token_rows.py.

A PEFT adapter belongs to a module, or to a parameter (see adapter_config.py). It has A [rank, in] and B [out, rank],
whatever the layout of the weight; for stacked experts, A [experts, rank, in] and B [out, rank, experts]. (If
PEFT mistakes the inputs of experts for outputs, the file's A is our B, and its B our A: `PeftModule.is_swapped`.) A
fused module has one adapter for all parameters that lie next to each other in it. On reading, each of our parameters
gets this A and its own rows of B. On writing, the A of the parameters are stacked along the rank, and their B are
blocks on a diagonal: the same adapter with a higher rank. An embedding table that is also the head has the same adapter
in both modules.
"""

import functools
import itertools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxopt_llm.checkpoint.huggingface import model_folder as huggingface
from jaxopt_llm.checkpoint.huggingface import safetensors, text_part
from jaxopt_llm.checkpoint.huggingface.family import SCORE_TENSOR, Family
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder, have_equal_values
from jaxopt_llm.checkpoint.huggingface.safetensors import StoredFile, StoredTensor
from jaxopt_llm.checkpoint.huggingface.tensor_layout import TensorLayout, TensorPiece, list_tensor_layouts
from jaxopt_llm.checkpoint.peft import adapter_config, token_rows
from jaxopt_llm.checkpoint.peft.adapter_config import (
    BASE,
    EMBEDDING_FACTORS,
    HEAD,
    KINDS,
    LINEAR_FACTORS,
    MAGNITUDE,
    PREFIX,
    PeftConfig,
    PeftModule,
    find_endings,
    find_modules,
    find_separate_modules,
    find_table,
    name_stems,
    read_peft_config,
)
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Params
from jaxopt_llm.model.param import ParamSpec

CHECK_MODEL = "check that the adapter belongs to the model"

# --- whole weights


def is_table(layout: TensorLayout) -> bool:
    """Return whether a tensor has a row for each token id."""
    return "vocabulary" in layout.pieces[0].spec.axes


def list_enclosing(tensor: str) -> list[str]:
    """Return the names of the modules that a tensor is in, from the outermost one."""
    words = tensor.split(".")[:-1]
    return [".".join(words[: count + 1]) for count in range(len(words))]


HEAD_WEIGHT = f"{HEAD}.weight"
# Copies of a whole weight, and what it replaced, which some versions also save.
_COPY = re.compile(r"(.*)\.(?:modules_to_save|original_module)(\.(?:weight|bias))")


@dataclass(frozen=True)
class WholeWeights:
    """Whole weights of a PEFT folder, and single rows.

    Attributes:
        stored: the tensors by their names in the model. A table that is also the head is one tensor.
        paths: paths of our parameters in them.
        rows: rows in place of those of the tables.
    """

    stored: Mapping[str, StoredTensor]
    paths: tuple[str, ...]
    rows: token_rows.Rows = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stored or self.rows)

    def replace_in(self, folder: ModelFolder, config: ModelConfig) -> ModelFolder:
        """Return a model's folder with these values in place of its own. config: the model with them."""
        stored = {**folder.stored, **{text_part.rename(name) or name: each for name, each in self.stored.items()}}
        table, size = f"{find_table(folder.family)}.weight", config.vocabulary_size
        if not (config.tied_head or config.scores):  # PEFT trains a copy of the table, and the head keeps the original
            stored.setdefault(HEAD_WEIGHT, folder.stored[table])
        own = replace(folder.config, vocabulary_size=len(stored[table].array), tied_head=config.tied_head)
        own = replace(own, scores=config.scores if SCORE_TENSOR in stored else 0)
        return token_rows.replace_in(replace(folder, config=own, stored=stored, vocabulary_size=size), self.rows)


def split_whole_weights(
    path: Path, tensors: dict[str, StoredTensor], peft_config: PeftConfig, family: Family, config: ModelConfig
) -> tuple[WholeWeights, ModelConfig]:
    """Take the whole weights out of the tensors of a folder.

    Args:
        path: the file of the tensors.
        tensors: the tensors by name; those that are found are removed.
        peft_config: the folder's configuration.
        family: the family of the model.
        config: the model that the adapters belong to.

    Returns:
        The whole weights, and the model with them, whose tables may have other sizes.

    Raises:
        InputError: `modules_to_save` names something else than weights of the model, or a tensor does not fit.
    """
    layouts, table = list_tensor_layouts(family, config), f"{find_table(family)}.weight"
    if config.table_is_head:
        layouts[HEAD_WEIGHT] = layouts[table]
    selected = _select(path, peft_config, layouts)
    if config.table_is_head and peft_config.ensure_weight_tying and selected & {table, HEAD_WEIGHT}:
        selected |= {table, HEAD_WEIGHT}
    resized, size = _find_size(path, tensors, layouts, config)
    found: dict[str, StoredTensor] = {}
    for name in list(tensors):
        own = name.removeprefix(PREFIX)
        copied = _COPY.fullmatch(own)
        base = own.removesuffix(f".{BASE}") + ".weight"
        if own in selected or (resized and own in layouts):
            found[own] = tensors.pop(name)
        elif copied and copied[1] + copied[2] in layouts:
            del tensors[name]
        elif resized and own.endswith(f".{BASE}") and base in layouts:
            found[base] = tensors.pop(name)
        elif own in layouts and is_table(layouts[own]):  # not trained: it must equal the base's
            tensors[f"{PREFIX}{own.removesuffix('.weight')}.{BASE}"] = tensors.pop(name)
    ties = config.table_is_head
    config = replace(config, vocabulary_size=size)
    if ties and found.keys() & {HEAD_WEIGHT, table}:
        selected.discard(HEAD_WEIGHT)  # PEFT leaves it out where it keeps the original
        config = replace(config, tied_head=_remove_equal_head(table, found))
    layouts = list_tensor_layouts(family, config)
    required = selected & layouts.keys()
    required |= {name for name, layout in layouts.items() if resized and is_table(layout)}
    if missing := sorted(required - found.keys()):
        why = "the tables have another size than those of the base model" if resized else "modules_to_save names it"
        raise InputError(
            f"{path}: tensor '{PREFIX}{missing[0]}' is missing, and {why}; save the adapter with all of them, or "
            "merge it with PEFT where it was trained (merge_and_unload), and use the merged model"
        )
    _check_shapes(path, found, layouts)
    return WholeWeights(found, _list_paths(found, layouts)), config


def _list_paths(found: Collection[str], layouts: Mapping[str, TensorLayout]) -> tuple[str, ...]:
    return tuple(sorted({piece.path for name in found for piece in layouts[name].pieces}))


def split_rows(
    path: Path,
    tensors: dict[str, StoredTensor],
    peft_config: PeftConfig,
    family: Family,
    base: ModelConfig,
    whole: WholeWeights,
    config: ModelConfig,
) -> tuple[WholeWeights, ModelConfig]:
    """Take the single rows out of the tensors of a folder, after its whole weights.

    Args:
        path, tensors, peft_config, family: see `split_whole_weights`.
        base: the model that the adapters belong to.
        whole, config: the whole weights, and the model with them.

    Returns:
        The whole weights and the rows, and the model with them: if a table that is also the head has rows in only one
        of the two modules, or others in each, PEFT computes with two tables.

    Raises:
        InputError: see `token_rows.take_rows`; or a table is also in `modules_to_save`.
    """
    table = find_table(family)
    rows = token_rows.take_rows(path, tensors, peft_config, table, find_modules(family, config), base.table_is_head)
    if not rows:
        return whole, config
    tied = base.table_is_head and table in rows and HEAD not in rows
    saved = {
        module
        for module in (*rows, *([HEAD] if tied else []))
        if any(module.endswith(ending) for ending in peft_config.modules_to_save or ())
    }
    token_rows.check_is_alone(path, {*rows, *saved}, saved, "modules_to_save")
    stored, weight = dict(whole.stored), f"{table}.weight"
    if tied and not config.tied_head:
        raise InputError(
            f"{path}: the tables of {table} and {HEAD} differ, but the base model ties them, and both have the same "
            f"{token_rows.FIELD}; merge the adapter with PEFT (merge_and_unload), and use the merged model"
        )
    if config.table_is_head and HEAD in rows:
        config = replace(config, tied_head=False)
        stored |= {HEAD_WEIGHT: stored[weight]} if weight in stored else {}
    return WholeWeights(stored, _list_paths(stored, list_tensor_layouts(family, config)), rows), config


def _select(path: Path, peft_config: PeftConfig, layouts: Mapping[str, TensorLayout]) -> set[str]:
    """Return the names of the tensors in the modules that `modules_to_save` names by their ends, as PEFT does."""
    selected = set()
    for ending in peft_config.modules_to_save or ():
        inside = {name for name in layouts if any(each.endswith(ending) for each in list_enclosing(name))}
        if not inside:
            raise InputError(
                f"{path.parent / adapter_config.FILE}: modules_to_save={peft_config.modules_to_save}: {ending!r} is no "
                "module of this decoder with weights of its own; use the model that the adapter was trained over, or "
                "merge the adapter with PEFT (merge_and_unload), and use the merged model"
            )
        selected |= inside
    return selected


def _find_size(
    path: Path, tensors: Mapping[str, StoredTensor], layouts: Mapping[str, TensorLayout], config: ModelConfig
) -> tuple[bool, int]:
    """Return whether the folder has tables of another size than the base model's, and their number of rows."""
    tables = [name.removesuffix(".weight") for name, layout in layouts.items() if is_table(layout)]
    names = [f"{PREFIX}{table}.{kind}" for table in tables for kind in ("weight", BASE)]
    sizes = {name: tensors[name].array.shape[0] for name in names if name in tensors and tensors[name].array.ndim}
    if len({*sizes.values()}) > 1:
        described = ", ".join(f"{name} has {size} rows" for name, size in sizes.items())
        raise InputError(f"{path}: {described}; all tables must have the same; download the folder again")
    size = next(iter(sizes.values()), config.vocabulary_size)
    return bool(sizes) and (size != config.vocabulary_size or config.resize_vocabulary > 0), size


def _remove_equal_head(table: str, found: dict[str, StoredTensor]) -> bool:
    """Remove the head of a model that ties it to its table, if both are equal. Return whether they are."""
    if not {table, HEAD_WEIGHT} <= found.keys() or not have_equal_values(found[table], found[HEAD_WEIGHT]):
        return False
    del found[HEAD_WEIGHT]
    return True


def _check_shapes(path: Path, found: Mapping[str, StoredTensor], layouts: Mapping[str, TensorLayout]) -> None:
    """Raise InputError if a tensor has another shape than the model's, or if some layers of a stack have no tensor."""
    for name, stored in found.items():
        safetensors.check_shape(f"{PREFIX}{name}", stored, layouts[name].shape, "the model requires", CHECK_MODEL)
    paths = {piece.path for name in found for piece in layouts[name].pieces}
    partial = [name for name in layouts if name not in found and any(p.path in paths for p in layouts[name].pieces)]
    if partial:
        raise InputError(
            f"{path.parent / adapter_config.FILE}: modules_to_save without {partial[0]}: weights of some "
            "layers only are not supported; name the module in all layers, or merge the adapter with PEFT "
            "(merge_and_unload), and use the merged model"
        )


# --- adapters

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"


class LoraFactors(NamedTuple):
    """Adapter of a module, in a file.

    a: [in, rank]; b: [out, rank]; of stacked experts, both have the expert as first dimension. magnitude: [out], with
    DoRA. These are views, see `StoredFile`. scale: factor of A·B.
    """

    module: str
    source: StoredFile
    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None
    alpha: float
    scale: float

    def has_values_of(self, other: "LoraFactors") -> bool:
        return self.scale == other.scale and all(
            np.array_equal(self.source.read(mine), other.source.read(theirs))
            for mine, theirs in ((self.a, other.a), (self.b, other.b))
        )


class AdapterPart(NamedTuple):
    """Part of a module's adapter that belongs to one of our parameters, or to one of its experts.

    columns: its range of the rank.
    """

    factors: LoraFactors
    piece: TensorPiece
    columns: slice

    @property
    def rank(self) -> int:
        return self.columns.stop - self.columns.start

    @property
    def is_one_expert(self) -> bool:
        return self.piece.expert is not None and self.factors.a.ndim == 2

    def read(self, kind: str, index: tuple[slice, ...]) -> np.ndarray:
        """Read the slices `index` of lora_a, lora_b or magnitude in the shape of our leaf."""
        read = self.factors.source.read
        shape, contracting = self.piece.spec.shape, sorted(self.piece.spec.contracting)
        others = [size for dim, size in enumerate(shape) if dim not in (*contracting, *self.piece.spec.expert_dims)]
        outputs, experts = self.piece.output_index, self.factors.a.shape[:-2]
        if kind == "lora_a":
            inputs = [shape[dim] for dim in contracting]
            return read(self.factors.a[..., self.columns].reshape(*experts, *inputs, self.rank)[index])
        if kind == "lora_b":
            columns = self.factors.b[..., self.columns]
            if isinstance(outputs, slice):
                return read(columns[..., outputs, :].reshape(*experts, *others, self.rank)[index])
            return read(columns)[..., outputs, :].reshape(*experts, *others, self.rank)[index]
        assert kind == "magnitude" and self.factors.magnitude is not None
        return read(self.factors.magnitude)[outputs].reshape(others)[index]


@dataclass(frozen=True)
class AdapterFolder:
    """PEFT folder with verified headers: each selected module has its tensors, and there are no others.

    Attributes:
        path: the folder.
        lora: the LoraConfig fields that the folder sets; none if it has no adapters, only rows.
        scale: factor of A·B that these fields give.
        parts: (path of our parameter, index in its stack) -> its part, or one for each expert whose adapters are apart;
            some layers of a stack may have none.
        base: tables of the base model that PEFT saved with the adapters, by module.
        whole: whole weights and rows that PEFT saved with the adapters, in place of the base model's.
        model: the base model with these weights: its tables may have other sizes, and the head may be separate.
    """

    path: Path
    lora: dict[str, Any]
    scale: float
    parts: Mapping[tuple[str, int | None], tuple[AdapterPart, ...]]
    base: Mapping[str, StoredTensor]
    whole: WholeWeights
    model: ModelConfig

    def add_to_specs(self, specs: Params) -> Params:
        """Return the specs of a bare model with these adapters."""
        weights = {weight for weight, _ in self.parts}

        def wrap(path: str, spec: ParamSpec) -> tree.Leaf:
            if path not in weights:
                return spec
            return leaves.lora_specs(spec, self.lora["rank"], self.scale, self.lora["dora"])

        return tree.map_with_path(wrap, specs)

    def read(self, path: str, spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
        """Read an adapter's leaf, such as */attention/query/lora_a, in the shape and dtype of its spec.

        The leaf is 0 in layers without an adapter, and in the columns beyond the rank of an adapter whose rank is lower
        than the spec's. If a module's scale differs from `scale`, its B is multiplied by the ratio.

        Raises:
            InputError: a value is not finite in the dtype of the spec.
        """
        return huggingface.build_leaf(spec, sharding, functools.partial(self.fill, path))

    def fill(self, path: str, out: np.ndarray, layer: int | None, index: tuple[slice, ...]) -> None:
        """Write the slices `index` of one layer of an adapter's leaf into zeros: see `build_leaf`."""
        weight, _, kind = path.rpartition("/")
        parts = self.parts.get((weight, layer), ())
        if not parts:
            return
        if parts[0].is_one_expert:
            for part, expert_out in zip(parts[index[0]], out, strict=True):
                self._fill(part, kind, expert_out, index[1:])
        else:
            self._fill(parts[0], kind, out, index)

    def _fill(self, part: AdapterPart, kind: str, out: np.ndarray, index: tuple[slice, ...]) -> None:
        source = part.read(kind, index)
        ratio = np.float32(part.factors.scale / self.scale)
        if kind == "lora_b" and ratio != 1:
            source = source.astype(np.float32) * ratio
        huggingface.copy_finite(source, out, f"{part.factors.source.path}: adapter of {part.factors.module}")

    def check_base(self, folder: ModelFolder | None) -> None:
        """Check the tables of the base model that PEFT saved with the adapters.

        Args:
            folder: the folder of the model's weights; None if the weights come from no folder.

        Raises:
            InputError: a table differs from the one in the model's folder.
        """
        for module, stored in self.base.items():
            if folder is None:
                raise InputError(
                    f"{stored.file}: it has base weights of {module}, which no Hugging Face folder is given to compare "
                    "with; name the folder of the base model, or save the adapter with save_embedding_layers=False"
                )
            name = f"{find_table(folder.family) if module == HEAD and folder.config.table_is_head else module}.weight"
            name = text_part.rename(name) or name
            if not huggingface.have_equal_values(stored, folder.stored[name]):
                raise InputError(
                    f"{stored.file}: the base weights of {module} differ from those in {folder.path}; use the base "
                    "model that the adapter was trained with, or save the adapter with save_embedding_layers=False"
                )


def open_adapter_folder(path: Path, family: Family, config: ModelConfig) -> AdapterFolder:
    """Open a PEFT folder of LoRA adapters of a model, and check its headers.

    Raises:
        InputError: the folder is not a complete folder of adapters of the model, or our model cannot express them.
    """
    peft_config = read_peft_config(path, config.scores > 0)
    tensors, base_config = _open_tensors(path), config
    # Versions of transformers differ in the names of the text model's modules: read them as this folder has them.
    own = text_part.find_spelling(family.names)
    spelling = text_part.find_spelling((name.removeprefix(PREFIX) for name in tensors), own)
    family = text_part.spell_modules(family, spelling)
    if peft_config.trainable_token_indices:
        token_rows.rename(tensors)
    whole, config = split_whole_weights(path / WEIGHTS, tensors, peft_config, family, config)
    whole, config = split_rows(path / WEIGHTS, tensors, peft_config, family, base_config, whole, config)
    modules = find_modules(family, config)
    selected = _select_modules(path, peft_config, modules)
    token_rows.check_is_alone(path / WEIGHTS, whole.rows, selected, "target_modules")
    if peft_config.ensure_weight_tying and any(modules[name].layout is modules[HEAD].layout for name in selected):
        selected.add(HEAD)  # PEFT copies the table's adapter to the head
    modules |= (separate := find_separate_modules(family, config))
    selected |= _select_separate(peft_config, separate, tensors, selected)
    if not selected and (peft_config.target_modules or peft_config.target_parameters or not whole.rows):
        parameters = f" or target_parameters={given}" if (given := peft_config.target_parameters) else ""
        raise InputError(
            f"{path / adapter_config.FILE}: target_modules={peft_config.target_modules!r}{parameters}, with "
            f"layers_to_transform={peft_config.layers_to_transform}, selects no module of the model; check that the "
            "adapter belongs to it"
        )
    stems = name_stems(modules) | name_stems({name: each for name, each in modules.items() if name in selected})
    stored = _group_by_module(path / WEIGHTS, tensors, {stems[name]: name for name in (*modules, *sorted(selected))})
    base = {name: tensors.pop(BASE) for name, tensors in stored.items() if BASE in tensors}
    for name, tensors in stored.items():
        if name not in selected and tensors:
            raise InputError(
                f"{path / WEIGHTS}: {name} has an adapter, but {adapter_config.FILE} does not select it; use the "
                f"{adapter_config.FILE} of these weights"
            )
    factors = {
        name: _make_factors(path, peft_config, module, stems[name], stored.get(name, {}))
        for name, module in modules.items()
        if name in selected
    }
    if config.table_is_head:
        _check_tied(path, modules, factors)
    parts: dict[tuple[str, int | None], tuple[AdapterPart, ...]] = {}
    for name, each in factors.items():
        if not (name == HEAD and config.table_is_head):
            for part in _split_factors(each, modules[name]):
                key = part.piece.path, part.piece.layer
                parts[key] = (*parts.get(key, ()), part)
    for several in parts.values():
        _check_experts(path, several, config.moe.experts)
    locations = {(piece.path, piece.layer) for module in modules.values() for piece in module.layout.pieces}
    lora, scale = _lora_fields(path, peft_config, parts, locations)
    whole = replace(whole, rows={text_part.spell_name(name, own): each for name, each in whole.rows.items()})
    return AdapterFolder(path, lora, scale, parts, base, whole, config)


def _lora_fields(
    path: Path,
    peft_config: PeftConfig,
    parts: Mapping[tuple[str, int | None], tuple[AdapterPart, ...]],
    locations: Collection[tuple[str, int | None]],
) -> tuple[dict[str, Any], float]:
    """Return the LoraConfig fields of the adapters, and the factor of A·B; without adapters no fields, and 1.

    locations: (path, index in the stack) of all parameters that can have an adapter.
    """
    if not parts:
        return {}, 1.0
    adapted_paths = dict.fromkeys(weight for weight, _ in parts)
    partial = [weight for weight, layer in locations if weight in adapted_paths and (weight, layer) not in parts]
    if peft_config.use_dora and partial:
        raise InputError(
            f"{path / adapter_config.FILE}: use_dora on some layers only of {min(partial)} is not supported; use it on "
            "all layers, or on the last ones, which --model.last-layers stacks separately"
        )
    endings = find_endings(adapted_paths, {weight for weight, _ in locations}, "/")
    widest = max(itertools.chain(*parts.values()), key=lambda part: part.rank)
    blocks = widest.factors.a.shape[-1] / widest.rank  # above 1 for a fused module that adapter_writer.py wrote
    lora = {
        "rank": widest.rank,
        "alpha": float(widest.factors.alpha / (math.sqrt(blocks) if peft_config.use_rslora else blocks)),
        "targets": tuple(ending if ending in adapted_paths else f"*/{ending}" for ending in endings),
        "rslora": peft_config.use_rslora,
        "dora": peft_config.use_dora,
    }
    return lora, widest.factors.scale


def _open_tensors(path: Path) -> dict[str, StoredTensor]:
    file = path / WEIGHTS
    if not file.is_file() and (path / PICKLE).is_file():
        code = (
            "import sys, torch; from safetensors.torch import save_file; "
            "save_file(torch.load(sys.argv[1], weights_only=True), sys.argv[2])"
        )
        raise safetensors.pickle_error(path, code, str(path / PICKLE), str(file))
    if not file.is_file():
        raise InputError(f"{path}: it has no adapter weights, {WEIGHTS}; download the folder again")
    tensors = safetensors.open_file(file)
    for name, stored in tensors.items():
        safetensors.check_is_float(name, stored)
    return dict(tensors)


def _select_modules(path: Path, peft_config: PeftConfig, modules: Mapping[str, PeftModule]) -> set[str]:
    """Return the modules and the parameters that the configuration of a folder selects."""
    selected = {
        name
        for name, module in modules.items()
        if (peft_config.selects_parameter(name) if module.is_parameter else peft_config.selects(name, module.in_block))
    }
    for target in peft_config.target_parameters or ():
        if not any(f".{name}".endswith(f".{target}") for name in selected):
            raise InputError(
                f"{path / adapter_config.FILE}: target_parameters={peft_config.target_parameters}: {target!r} is no "
                "matrix of an MLP of the model, and routers have no adapters here; merge the adapter with PEFT "
                "(merge_and_unload), and use the merged model"
            )
    return selected


def _select_separate(
    peft_config: PeftConfig,
    modules: Mapping[str, PeftModule],
    tensors: Collection[str],
    parameters: Collection[str],
) -> set[str]:
    """Return the modules of an MLP of a model with experts that an adapter from transformers 4 belongs to.

    The names of target_modules may select them without having been meant for them: the classes of transformers 5 have
    no module for an expert. So a matrix is selected in all layers and experts, or in none.

    parameters: what is selected without these modules.
    """
    targets = {name for name in modules if f"{name}.weight" not in parameters and peft_config.selects(name, True)}
    has_factor = {name for name in targets if f"{PREFIX}{name}.{LINEAR_FACTORS[0]}" in tensors}
    held = {modules[name].layout.pieces[0].path for name in has_factor}
    return {name for name in targets if modules[name].layout.pieces[0].path in held}


def _check_experts(path: Path, parts: tuple[AdapterPart, ...], experts: int) -> None:
    """Raise InputError unless a parameter has one adapter, or one for each expert."""
    name = parts[0].factors.module
    if parts[0].is_one_expert and len(parts) < experts:
        raise InputError(f"{path}: {name} has an adapter, but not all experts of its layer have; select all or none")
    if len(parts) > (experts if parts[0].is_one_expert else 1):
        raise InputError(
            f"{path / adapter_config.FILE}: target_modules and target_parameters both select {name}; remove one of them"
        )


def _group_by_module(
    file: Path, tensors: Mapping[str, StoredTensor], modules: Mapping[str, str]
) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors of adapters by module and kind. modules: start of the tensors' names -> module."""
    grouped: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        # `base_layer` also stands for an adapter that is nested in another one.
        kind = next((kind for kind in KINDS if name.endswith(f".{kind}")), "")
        module = modules.get(name.removeprefix(PREFIX).removesuffix(f".{kind}"))
        if not (kind and name.startswith(PREFIX) and module):
            raise InputError(
                f"{file}: tensor {name!r} belongs to no adapter of the model's matrices, among which are no routers; "
                "check that the adapter belongs to the model"
            )
        grouped.setdefault(module, {})[kind] = stored
    return grouped


def _make_factors(
    path: Path, peft_config: PeftConfig, module: PeftModule, stem: str, stored: Mapping[str, StoredTensor]
) -> LoraFactors:
    """Return the adapter of a module. stem: start of the names of its tensors."""
    if peft_config.use_dora and (module.is_parameter or module.layout.is_expert or not module.in_block):
        raise InputError(
            f"{path / adapter_config.FILE}: use_dora on {module.name}: only matrices of blocks support it, and experts "
            "do not"
        )
    shapes = module.shapes(peft_config.rank(module.name), peft_config.use_dora)
    file, name = path / WEIGHTS, f"{PREFIX}{stem}"
    for kind, shape in shapes.items():
        if kind not in stored:
            raise InputError(f"{file}: tensor '{name}.{kind}' is missing; download the folder again")
        require = f"{adapter_config.FILE} and the model require"
        safetensors.check_shape(f"{name}.{kind}", stored[kind], shape, require, CHECK_MODEL)
    for kind in stored.keys() - shapes.keys():
        raise InputError(
            f"{file}: tensor '{name}.{kind}' does not belong to an adapter as {adapter_config.FILE} describes it; use "
            f"the {adapter_config.FILE} of these weights"
        )
    arrays = {kind: each.array for kind, each in stored.items()}
    a = arrays[EMBEDDING_FACTORS[0]] if module.is_embedding else arrays[LINEAR_FACTORS[0]].T
    b = arrays[EMBEDDING_FACTORS[1]].T if module.is_embedding else arrays[LINEAR_FACTORS[1]]
    if (
        experts := module.experts
    ):  # a column of A has an expert's ranks one after the other, a row of B a rank's experts
        a = a.reshape(len(a), experts, -1).transpose(1, 0, 2)
        b = b.reshape(len(b), -1, experts).transpose(2, 0, 1)
    if module.is_swapped:
        a, b = b, a
    source = next(iter(stored.values())).source
    alpha, scale = peft_config.alpha(module.name), peft_config.scale(module.name)
    return LoraFactors(module.name, source, a, b, arrays.get(MAGNITUDE), alpha, scale)


def _check_tied(path: Path, modules: Mapping[str, PeftModule], factors: Mapping[str, LoraFactors]) -> None:
    """Raise InputError unless the table and the head, which share their weights, have the same adapter or none."""
    names = [name for name, module in modules.items() if module.layout is modules[HEAD].layout]
    table, head = (factors.get(name) for name in names)
    if table is head or (table and head and table.has_values_of(head)):  # the same object: both None
        return
    raise InputError(
        f"{path}: the model's head is its embedding table, but {' and '.join(names)} do not have the same adapter; "
        "train the adapter with both in target_modules and ensure_weight_tying=True, or with neither"
    )


def _split_factors(factors: LoraFactors, module: PeftModule) -> list[AdapterPart]:
    """Split a module's adapter into the parts of our parameters.

    If B consists of blocks on a diagonal, as adapter_writer.py writes it for several parameters, each part has only the
    columns of its block, and a parameter whose rows of B are all zero has no adapter.
    """
    rank = factors.a.shape[-1]
    whole = [AdapterPart(factors, piece, slice(0, rank)) for piece in module.layout.pieces]
    if len(whole) == 1:
        return whole
    b = factors.source.read(factors.b)
    b = b.reshape(-1, *b.shape[-2:])  # a block that any expert uses
    used_columns = [np.flatnonzero(np.any(b[:, piece.output_index], axis=(0, 1))) for piece in module.layout.pieces]
    nonzero = [(part, columns) for part, columns in zip(whole, used_columns, strict=True) if columns.size]
    if not nonzero or rank % len(nonzero):
        return whole
    width = rank // len(nonzero)
    blocks = [part._replace(columns=slice(n * width, (n + 1) * width)) for n, (part, _) in enumerate(nonzero)]
    is_diagonal = all(
        block.columns.start <= columns[0] and columns[-1] < block.columns.stop
        for block, (_, columns) in zip(blocks, nonzero, strict=True)
    )
    return blocks if is_diagonal and (factors.magnitude is None or len(blocks) == len(whole)) else whole
