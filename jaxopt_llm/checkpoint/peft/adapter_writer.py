"""Writing of PEFT folders of LoRA adapters: see adapter_folder.py for how PEFT's modules hold our parameters."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.checkpoint.huggingface import safetensors, text_part
from jaxopt_llm.checkpoint.huggingface.family import Family
from jaxopt_llm.checkpoint.huggingface.model_folder import (
    Layers,
    collect_leaves,
    fetch_layer,
    make_tensor_getter,
    write_nothing,
)
from jaxopt_llm.checkpoint.huggingface.safetensors import NewFolder, TensorSpec
from jaxopt_llm.checkpoint.huggingface.tensor_layout import TensorLayout, TensorPiece, list_tensor_layouts
from jaxopt_llm.checkpoint.peft import adapter_folder as peft
from jaxopt_llm.checkpoint.peft.adapter_config import PeftConfig, find_endings, write_peft_config
from jaxopt_llm.checkpoint.peft.adapter_folder import WEIGHTS, PeftModule, find_modules
from jaxopt_llm.config import LoraConfig, ModelConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.linear.leaves import LoraWeight
from jaxopt_llm.model.model import Params

Adapted = Mapping[str, list[tuple[TensorPiece, LoraWeight]]]  # module name -> its pieces with adapters


@dataclass(frozen=True)
class AdapterOrigin:
    """Facts about the origin of adapters that their folder states.

    Attributes:
        base: the path or name under which PEFT finds the base model; empty: none.
        write_files: writes the files that are not the adapters', such as the tokenizer's, into the new folder.
    """

    base: str = ""
    write_files: Callable[[Path], None] = write_nothing


class WholeParameters(NamedTuple):
    """Whole parameters that are written next to adapters.

    Attributes:
        layers: where they are read.
        trained: paths of those that were trained with the adapters (PEFT: modules_to_save).
        resized: whether the tables have other rows than those of the base model, and are written for that.
    """

    layers: Layers
    trained: frozenset[str]
    resized: bool


def write_adapter_folder(
    path: Path,
    params: Params,
    family: Family,
    config: ModelConfig,
    lora: LoraConfig,
    origin: AdapterOrigin | None = None,
    dtype: Any = None,
    whole: WholeParameters | None = None,
) -> None:
    """Write a new folder of the adapters among a model's parameters, which PEFT can load on top of the base model.

    Args:
        path: the folder to create.
        params: the parameters with adapters.
        family: the family whose tensor names are used.
        config: the model.
        lora: the settings of the adapters.
        origin: what the folder says about its training; None: nothing.
        dtype: dtype of the tensors instead of the parameters' dtype.
        whole: whole parameters to write with the adapters.

    Raises:
        InputError: PEFT cannot express the adapters, the path already exists, or a value is not finite in the dtype.
    """
    origin = origin or AdapterOrigin()
    weights = {name: leaf for name, leaf in collect_leaves(params).items() if isinstance(leaf, LoraWeight)}
    first = next(iter(weights.values()))
    rank, dora = first.lora_a.shape[-1], first.magnitude is not None
    modules = find_modules(family, config)
    adapted = _group_by_module(path, weights, modules)
    specs = _list_adapter_specs(path, adapted, modules, dtype)
    counts = {name: len(pieces) for name, pieces in adapted.items()}
    layouts = list_tensor_layouts(family, config)
    if config.tied_head:
        layouts[f"{peft.HEAD}.weight"] = layouts[f"{peft.find_table(family)}.weight"]
    enclosing = {module for name in layouts for module in peft.list_enclosing(name)}
    saved = _list_trained_modules(path, whole.trained, layouts, adapted, config) if whole else []
    peft_config = dataclasses.replace(
        _describe_targets(counts, modules, rank, lora.alpha, lora.rslora),
        use_dora=dora,
        ensure_weight_tying=config.tied_head and bool({*adapted, *saved} & {peft.HEAD}),
        modules_to_save=find_endings(saved, enclosing, whole_words=False) or None,
    )
    get_tensor = _tensor_getter(path, adapted, modules, specs)
    if whole:
        named = _name_whole_tensors(saved, whole.resized, layouts, adapted)
        specs, get_tensor = _add_whole_tensors(path, specs, get_tensor, named, whole.layers, dtype)
    with NewFolder(path) as folder:
        safetensors.write_file(folder / WEIGHTS, specs, get_tensor)
        write_peft_config(folder, peft_config, family.input_first, origin.base)
        origin.write_files(folder)


def _list_adapter_specs(
    path: Path, adapted: Adapted, modules: Mapping[str, PeftModule], dtype: Any
) -> dict[str, TensorSpec]:
    """Return the tensors of the adapters by name."""
    specs: dict[str, TensorSpec] = {}
    for name, pieces in adapted.items():
        module, first = modules[name], pieces[0][1]
        rank, dora = first.lora_a.shape[-1], first.magnitude is not None
        if dora and len(pieces) < len(module.layout.pieces):
            with_adapter = [piece for piece, _ in pieces]
            without = next(piece.path for piece in module.layout.pieces if piece not in with_adapter)
            raise InputError(
                f"{path}: DoRA of {with_adapter[0].path} without {without}: both are in PEFT's module {name}; use "
                "`convert merge` instead"
            )
        tensor_dtype = jnp.dtype(dtype or first.lora_a.dtype)
        shapes = module.shapes(rank * len(pieces), dora)
        specs |= {f"{peft.PREFIX}{name}.{kind}": TensorSpec(tensor_dtype, shape) for kind, shape in shapes.items()}
    return specs


def _add_whole_tensors(
    path: Path,
    specs: Mapping[str, TensorSpec],
    get_adapter: Callable[[str], np.ndarray],
    named: Mapping[str, TensorLayout],
    layers: Layers,
    dtype: Any,
) -> tuple[dict[str, TensorSpec], Callable[[str], np.ndarray]]:
    """Return the specs of a folder's tensors, and the function that builds them, with the whole tensors `named`."""
    dtypes = {name: jnp.dtype(dtype or layers.dtype(layout.pieces[0].path)) for name, layout in named.items()}
    whole = {name: TensorSpec(dtypes[name], layout.shape) for name, layout in named.items()}
    get_whole = make_tensor_getter(path, named, whole, layers)
    # The widest dtypes come first, so that each tensor is aligned in the file.
    widest_first = dict(sorted({**specs, **whole}.items(), key=lambda item: -item[1].dtype.itemsize))
    return widest_first, lambda name: (get_whole if name in named else get_adapter)(name)


def _list_trained_modules(
    path: Path,
    trained: Collection[str],
    layouts: Mapping[str, TensorLayout],
    adapted: Adapted,
    config: ModelConfig,
) -> list[str]:
    """Return the modules with parameters that were trained as a whole. layouts: of the tensors of the model.

    Raises:
        InputError: PEFT has no module for a parameter, or the module also has an adapter.
    """
    found: dict[str, None] = {}
    for name, layout in layouts.items():
        module = name.rpartition(".")[0]
        for piece in layout.pieces:
            if piece.path not in trained:
                continue
            if config.moe.experts and peft.MLP in piece.path:
                raise InputError(
                    f"{path}: {piece.path} was trained: PEFT has no modules for experts, nor for the MLPs of a model "
                    "with experts; use `convert merge`, which writes the whole model"
                )
            if module in adapted:
                raise InputError(
                    f"{path}: {piece.path} was trained, and {module} has an adapter: PEFT has one or the other; use "
                    "`convert merge`, which writes the whole model"
                )
            found[module] = None
    return list(found)


def _name_whole_tensors(
    saved: Collection[str], resized: bool, layouts: Mapping[str, TensorLayout], adapted: Adapted
) -> dict[str, TensorLayout]:
    """Return the layouts of the whole tensors to write, by their names in the folder."""
    named = {}
    for name, layout in layouts.items():
        module = name.rpartition(".")[0]
        if module in saved:
            named[f"{peft.PREFIX}{name}"] = layout
        elif resized and peft.is_table(layout):
            named[f"{peft.PREFIX}{module}.{peft.BASE}" if module in adapted else f"{peft.PREFIX}{name}"] = layout
    return named


def _describe_targets(
    counts: dict[str, int], modules: Mapping[str, PeftModule], rank: int, alpha: float, rslora: bool
) -> PeftConfig:
    """Return the PEFT configuration of the adapted modules.

    counts: number of pieces of each module that have an adapter. Their ranks add up in PEFT's module.
    """
    patterns = {
        re.escape(ending): count
        for count in sorted({*counts.values()} - {1})
        for ending in find_endings([name for name in counts if counts[name] == count], modules)
    }
    return PeftConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_name_targets(find_endings(counts, modules), modules),
        rank_pattern={pattern: rank * count for pattern, count in patterns.items()},
        alpha_pattern={pattern: alpha * (math.sqrt(count) if rslora else count) for pattern, count in patterns.items()},
        use_rslora=rslora,
    )


def _name_targets(endings: list[str], modules: Mapping[str, PeftModule]) -> list[str] | str:
    """Return the target modules: endings of names or, for a part of a model, a pattern that fits no other part."""
    if not any(name.startswith(text_part.MODULES) for name in modules):
        return endings
    return rf"(?:{re.escape(text_part.MODULES)}(?:.*\.)?)?(?:{'|'.join(map(re.escape, endings))})"


def _group_by_module(path: Path, weights: Mapping[str, LoraWeight], modules: Mapping[str, PeftModule]) -> Adapted:
    """Group the adapters by module. Raise InputError for an adapter of a parameter that is in no PEFT module."""
    pieces = {name: [p for p in module.layout.pieces if p.path in weights] for name, module in modules.items()}
    adapted = {name: [(p, weights[p.path]) for p in several] for name, several in pieces.items() if several}
    if missing := weights.keys() - {piece.path for several in adapted.values() for piece, _ in several}:
        raise InputError(
            f"{path}: adapters of {min(missing)}: PEFT has no modules for experts, nor for the MLPs of a model with "
            "experts; use `convert merge`, which merges them into the model"
        )
    return adapted


def _tensor_getter(
    path: Path, adapted: Adapted, modules: Mapping[str, PeftModule], specs: Mapping[str, TensorSpec]
) -> Callable[[str], np.ndarray]:
    """Return a function that builds a tensor of the folder by its name."""

    def join(name: str, kind: str) -> np.ndarray:
        pieces = adapted[name]
        if kind == peft.MAGNITUDE:
            magnitude = np.zeros(modules[name].outputs, np.float32)
            for piece, weight in pieces:
                magnitude[piece.output_index] = _fetch_factor(weight.magnitude, piece, outputs=True)[:, 0]
            return magnitude
        if kind in (peft.LINEAR_FACTORS[0], peft.EMBEDDING_FACTORS[0]):
            a = np.concatenate([_fetch_factor(weight.lora_a, piece, outputs=False) for piece, weight in pieces], axis=1)
            return a if kind == peft.EMBEDDING_FACTORS[0] else a.T
        rank = pieces[0][1].lora_a.shape[-1]
        b = np.zeros((modules[name].outputs, rank * len(pieces)), np.float32)
        for block, (piece, weight) in enumerate(pieces):
            columns = slice(block * rank, (block + 1) * rank)
            b[piece.output_index, columns] = _fetch_factor(weight.lora_b, piece, outputs=True)
        return b.T if kind == peft.EMBEDDING_FACTORS[1] else b

    def get_tensor(tensor: str) -> np.ndarray:
        kind = next(kind for kind in peft.KINDS if tensor.endswith(f".{kind}"))
        joined = join(tensor.removeprefix(peft.PREFIX).removesuffix(f".{kind}"), kind)
        return safetensors.round_finite(joined, specs[tensor].dtype, f"{path}: tensor {tensor!r}")

    return get_tensor


def _fetch_factor(factor: jax.Array, piece: TensorPiece, outputs: bool) -> np.ndarray:
    """Fetch one layer of a factor, [in, rank] or [out, rank], or of a magnitude, [out, 1], without padding."""
    spec = piece.spec
    sizes = [size for dim, size in enumerate(spec.shape) if (dim in spec.contracting) != outputs]
    return fetch_layer(factor, piece.layer, tuple(sizes)).reshape(math.prod(sizes), -1)
