"""Whole weights in a PEFT folder, next to its adapters: `modules_to_save`, and tables of another size.

PEFT loads such a tensor in place of the model's own. A tensor has the name that it has in the model, after a prefix.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxopt_llm.checkpoint.huggingface.family import Family
from jaxopt_llm.checkpoint.huggingface.model_folder import ModelFolder, have_equal_values
from jaxopt_llm.checkpoint.huggingface.stored_tensor import StoredTensor
from jaxopt_llm.checkpoint.huggingface.tensor_layout import TensorLayout, list_tensor_layouts
from jaxopt_llm.checkpoint.peft import adapter_config
from jaxopt_llm.checkpoint.peft import modules as peft
from jaxopt_llm.checkpoint.peft.adapter_config import PeftConfig
from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core.errors import InputError

HEAD_WEIGHT = f"{peft.HEAD}.weight"
# Copies of a whole weight, and what it replaced, which some versions also save.
_COPY = re.compile(r"(.*)\.(?:modules_to_save|original_module)(\.(?:weight|bias))")


@dataclass(frozen=True)
class WholeWeights:
    """Whole weights of a PEFT folder.

    Attributes:
        stored: the tensors by their names in the model. Of a table that is also the head there is one.
        paths: paths of our parameters in them.
    """

    stored: Mapping[str, StoredTensor]
    paths: tuple[str, ...]

    def replace_in(self, folder: ModelFolder, config: ModelConfig) -> ModelFolder:
        """Return a model's folder with these tensors in place of its own. config: the model with them."""
        stored = {**folder.stored, **self.stored}
        if not config.tied_head:  # PEFT trains a copy of the table, and the head keeps the original
            stored.setdefault(HEAD_WEIGHT, folder.stored[f"{peft.find_table(folder.family)}.weight"])
        size = config.vocabulary_size
        own = replace(folder.config, vocabulary_size=size, tied_head=config.tied_head)
        return replace(folder, config=own, stored=stored, vocabulary_size=size)


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
    layouts, table = list_tensor_layouts(family, config), f"{peft.find_table(family)}.weight"
    if config.tied_head:
        layouts[HEAD_WEIGHT] = layouts[table]
    selected = _select(path, peft_config, layouts)
    if config.tied_head and peft_config.ensure_weight_tying and selected & {table, HEAD_WEIGHT}:
        selected |= {table, HEAD_WEIGHT}
    resized, size = _find_size(path, tensors, layouts, config)
    found: dict[str, StoredTensor] = {}
    for name in list(tensors):
        own = name.removeprefix(peft.PREFIX)
        copied = _COPY.fullmatch(own)
        base = own.removesuffix(f".{peft.BASE}") + ".weight"
        if own in selected or (resized and own in layouts):
            found[own] = tensors.pop(name)
        elif copied and copied[1] + copied[2] in layouts:
            del tensors[name]
        elif resized and own.endswith(f".{peft.BASE}") and base in layouts:
            found[base] = tensors.pop(name)
        elif own in layouts and peft.is_table(layouts[own]):  # not trained: it must equal the base's
            tensors[f"{peft.PREFIX}{own.removesuffix('.weight')}.{peft.BASE}"] = tensors.pop(name)
    ties = config.tied_head
    config = replace(config, vocabulary_size=size)
    if ties and found.keys() & {HEAD_WEIGHT, table}:
        selected.discard(HEAD_WEIGHT)  # PEFT leaves it out where it keeps the original
        config = replace(config, tied_head=_remove_equal_head(table, found))
    layouts = list_tensor_layouts(family, config)
    required = selected & layouts.keys()
    required |= {name for name, layout in layouts.items() if resized and peft.is_table(layout)}
    if missing := sorted(required - found.keys()):
        why = "the tables have another size than those of the base model" if resized else "modules_to_save names it"
        raise InputError(
            f"{path}: tensor '{peft.PREFIX}{missing[0]}' is missing, and {why}; save the adapter with all of them, or "
            "merge it with PEFT where it was trained (merge_and_unload), and use the merged model"
        )
    _check_shapes(path, found, layouts)
    paths = {piece.path for name in found for piece in layouts[name].pieces}
    return WholeWeights(found, tuple(sorted(paths))), config


def _select(path: Path, peft_config: PeftConfig, layouts: Mapping[str, TensorLayout]) -> set[str]:
    """Return the names of the tensors in the modules that `modules_to_save` names by their ends, as PEFT does."""
    selected = set()
    for ending in peft_config.modules_to_save or ():
        inside = {name for name in layouts if any(each.endswith(ending) for each in peft.list_enclosing(name))}
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
    tables = [name.removesuffix(".weight") for name, layout in layouts.items() if peft.is_table(layout)]
    names = [f"{peft.PREFIX}{table}.{kind}" for table in tables for kind in ("weight", peft.BASE)]
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
        if stored.array.shape != layouts[name].shape:
            raise InputError(
                f"{path}: tensor '{peft.PREFIX}{name}' has shape {list(stored.array.shape)}, but the model requires "
                f"{list(layouts[name].shape)}; check that the adapter belongs to the model"
            )
    paths = {piece.path for name in found for piece in layouts[name].pieces}
    partial = [name for name in layouts if name not in found and any(p.path in paths for p in layouts[name].pieces)]
    if partial:
        raise InputError(
            f"{path.parent / adapter_config.FILE}: modules_to_save without {partial[0]}: weights of some "
            "layers only are not supported; name the module in all layers, or merge the adapter with PEFT "
            "(merge_and_unload), and use the merged model"
        )
