"""Writing of PEFT folders of LoRA adapters: see adapter_folder.py for how PEFT's modules hold our parameters.

Adapters of experts are written for the classes of transformers 5, which hold experts as parameters.
"""

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
    make_tensor_getter,
    write_nothing,
)
from jaxopt_llm.checkpoint.huggingface.safetensors import NewFolder, TensorSpec
from jaxopt_llm.checkpoint.huggingface.tensor_layout import TensorLayout, TensorPiece, list_tensor_layouts
from jaxopt_llm.checkpoint.peft.adapter_config import (
    BASE,
    EMBEDDING_FACTORS,
    HEAD,
    KINDS,
    LINEAR_FACTORS,
    MAGNITUDE,
    MLP,
    PREFIX,
    PeftConfig,
    PeftModule,
    find_endings,
    find_modules,
    find_table,
    name_stems,
    write_peft_config,
)
from jaxopt_llm.checkpoint.peft.adapter_folder import WEIGHTS, is_table, list_enclosing
from jaxopt_llm.config import LoraConfig, ModelConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.model.linear import leaves
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
    stems = name_stems({name: module for name, module in modules.items() if name in adapted})
    specs = _list_adapter_specs(path, adapted, modules, stems, dtype)
    counts = {name: len(pieces) for name, pieces in adapted.items()}
    layouts = list_tensor_layouts(family, config)
    if config.table_is_head:
        layouts[f"{HEAD}.weight"] = layouts[f"{find_table(family)}.weight"]
    enclosing = {module for name in layouts for module in list_enclosing(name)}
    saved = _list_trained_modules(path, whole.trained, layouts, adapted, config) if whole else []
    peft_config = dataclasses.replace(
        _describe_targets(counts, modules, layouts, rank, lora),
        use_dora=dora,
        ensure_weight_tying=config.table_is_head and bool({*adapted, *saved} & {HEAD}),
        modules_to_save=find_endings(saved, enclosing, whole_words=False) or None,
    )
    get_tensor = _tensor_getter(path, adapted, modules, stems, specs)
    if whole:
        named = _name_whole_tensors(saved, whole.resized, layouts, adapted)
        specs, get_tensor = _add_whole_tensors(path, specs, get_tensor, named, whole.layers, dtype)
    with NewFolder(path) as folder:
        safetensors.write_file(folder / WEIGHTS, _put_widest_first(specs), get_tensor)
        # PEFT reads the layout of a parameter from its class.
        input_first = any(modules[name].layout.input_first for name in adapted if not modules[name].is_parameter)
        write_peft_config(folder, peft_config, input_first, origin.base, config.scores > 0)
        origin.write_files(folder)


def _list_adapter_specs(
    path: Path, adapted: Adapted, modules: Mapping[str, PeftModule], stems: Mapping[str, str], dtype: Any
) -> dict[str, TensorSpec]:
    """Return the tensors of the adapters by name. stems: starts of these names, by module."""
    specs: dict[str, TensorSpec] = {}
    for name, pieces in adapted.items():
        module, first = modules[name], pieces[0][1]
        rank, dora = first.lora_a.shape[-1], first.magnitude is not None
        if dora and module.is_parameter:
            raise InputError(
                f"{path}: DoRA of {pieces[0][0].path}: PEFT has none for parameters, as which it adapts the MLPs of a "
                "model with experts; use `convert merge` instead"
            )
        if dora and len(pieces) < len(module.layout.pieces):
            with_adapter = [piece for piece, _ in pieces]
            without = next(piece.path for piece in module.layout.pieces if piece not in with_adapter)
            raise InputError(
                f"{path}: DoRA of {with_adapter[0].path} without {without}: both are in PEFT's module {name}; use "
                "`convert merge` instead"
            )
        tensor_dtype = jnp.dtype(dtype or first.lora_a.dtype)
        shapes = module.shapes(rank * len(pieces), dora)
        specs |= {f"{PREFIX}{stems[name]}.{kind}": TensorSpec(tensor_dtype, shape) for kind, shape in shapes.items()}
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
    return {**specs, **whole}, lambda name: (get_whole if name in named else get_adapter)(name)


def _put_widest_first(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the specs of tensors in an order in which each is aligned in the file."""
    return dict(sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize))


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
            if config.moe.experts and MLP in piece.path:
                raise InputError(
                    f"{path}: {piece.path} was trained: PEFT has no modules for experts, nor for the MLPs of a model "
                    "with experts; use `convert merge`, which writes the whole model"
                )
            if not name.endswith((".weight", ".bias")):  # a bare parameter of a module that holds others
                raise InputError(
                    f"{path}: {piece.path} was trained: PEFT has no module for the tensor {name!r}; use "
                    "`convert merge`, which writes the whole model"
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
            named[f"{PREFIX}{name}"] = layout
        elif resized and is_table(layout):
            named[f"{PREFIX}{module}.{BASE}" if module in adapted else f"{PREFIX}{name}"] = layout
    return named


def _describe_targets(
    counts: dict[str, int], modules: Mapping[str, PeftModule], tensors: Collection[str], rank: int, lora: LoraConfig
) -> PeftConfig:
    """Return the PEFT configuration of the adapted modules.

    counts: number of pieces of each module that have an adapter. Their ranks add up in PEFT's module.
    tensors: the names of all tensors of the model.
    """
    patterns = {
        re.escape(ending): count
        for count in sorted({*counts.values()} - {1})
        for ending in find_endings([name for name in counts if counts[name] == count], modules)
    }
    targeted = [name for name in counts if modules[name].is_parameter]
    others = [name for name in counts if not modules[name].is_parameter]
    parameters = {*tensors, *(name for name, module in modules.items() if module.is_parameter)}
    names = [name for name, module in modules.items() if not module.is_parameter]
    alpha = lora.alpha
    return PeftConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_name_targets(find_endings(others, names), modules) if others else [],
        target_parameters=find_endings(targeted, parameters) or None,
        rank_pattern={pattern: rank * count for pattern, count in patterns.items()},
        alpha_pattern={
            pattern: alpha * (math.sqrt(count) if lora.rslora else count) for pattern, count in patterns.items()
        },
        use_rslora=lora.rslora,
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
            f"{path}: adapters of {min(missing)}: PEFT has no adapters of this parameter; use `convert merge`, which "
            "merges them into the model"
        )
    return adapted


def _tensor_getter(
    path: Path,
    adapted: Adapted,
    modules: Mapping[str, PeftModule],
    stems: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
) -> Callable[[str], np.ndarray]:
    """Return a function that builds a tensor of the folder by its name."""
    owners = {stems[name]: name for name in adapted}

    def join(name: str, kind: str) -> np.ndarray:
        module, pieces = modules[name], adapted[name]
        if kind == MAGNITUDE:
            magnitude = np.zeros(module.outputs, np.float32)
            for piece, weight in pieces:
                magnitude[piece.output_index] = _fetch_factor(weight.magnitude, piece, outputs=True)[0, :, 0]
            return magnitude
        is_first = kind in (LINEAR_FACTORS[0], EMBEDDING_FACTORS[0])
        factor = join_inputs(pieces) if is_first != module.is_swapped else join_outputs(module, pieces)
        if kind in EMBEDDING_FACTORS:
            return factor[0] if is_first else factor[0].T
        if is_first:
            return factor.transpose(0, 2, 1).reshape(-1, factor.shape[1])  # [E * rank, in]
        return factor.transpose(1, 2, 0).reshape(factor.shape[1], -1)  # [out, rank * E]

    def join_inputs(pieces: list[tuple[TensorPiece, LoraWeight]]) -> np.ndarray:  # [E, in, rank]
        return np.concatenate([_fetch_factor(weight.lora_a, piece, outputs=False) for piece, weight in pieces], axis=2)

    def join_outputs(module: PeftModule, pieces: list[tuple[TensorPiece, LoraWeight]]) -> np.ndarray:  # [E, out, rank]
        rank = pieces[0][1].lora_a.shape[-1]
        b = np.zeros((max(1, module.experts), module.outputs, rank * len(pieces)), np.float32)
        for block, (piece, weight) in enumerate(pieces):
            columns = slice(block * rank, (block + 1) * rank)
            b[:, piece.output_index, columns] = _fetch_factor(weight.lora_b, piece, outputs=True)
        return b

    def get_tensor(tensor: str) -> np.ndarray:
        kind = next(kind for kind in KINDS if tensor.endswith(f".{kind}"))
        joined = join(owners[tensor.removeprefix(PREFIX).removesuffix(f".{kind}")], kind)
        return safetensors.round_finite(joined, specs[tensor].dtype, f"{path}: tensor {tensor!r}")

    return get_tensor


def _fetch_factor(factor: jax.Array, piece: TensorPiece, outputs: bool) -> np.ndarray:
    """Fetch one layer of a factor without padding, for each expert: [E, in or out, rank], or [1, out, 1].

    Without experts, E is 1.
    """
    spec = piece.spec
    is_side = [dim not in spec.expert_dims and (dim in spec.contracting) != outputs for dim in range(len(spec.shape))]
    sizes = [size for size, is_one in zip(spec.shape, is_side, strict=True) if is_one]
    experts = (factor.shape[1],) if piece.expert is not None or spec.expert_dims else ()
    fetched = leaves.fetch_layer(factor, piece.layer, (*experts, *sizes))
    return fetched.reshape(*(experts or (1,)), math.prod(sizes), -1)
