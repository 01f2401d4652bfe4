"""PEFT's folders of LoRA adapters, written: see peft.py for how their modules hold our parameters."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.checkpoint import huggingface, peft_config, safetensors
from jaxopt_llm.checkpoint.family import Family
from jaxopt_llm.checkpoint.peft import HEAD, KINDS, LINEAR, LOOK_UP, MAGNITUDE, PREFIX, WEIGHTS, modules
from jaxopt_llm.checkpoint.peft_config import PeftConfig, endings
from jaxopt_llm.checkpoint.safetensors import Described, NewFolder
from jaxopt_llm.checkpoint.tensors import Piece
from jaxopt_llm.errors import InputError
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params
from jaxopt_llm.model.leaves import LoraWeight


def write(
    path: Path,
    params: Params,
    family: Family,
    config: ModelConfig,
    alpha: float,
    rslora: bool = False,
    base: str = "",
    dtype: Any = None,
) -> None:
    """A new folder of the adapters among a model's parameters, which PEFT loads over the bare ones.

    alpha, rslora: as LoraConfig has them. base: where PEFT finds the model. dtype: of the tensors, in place of the
    adapters' own. Raises InputError for what PEFT has no words for, and where something is there already.
    """
    adapted = {name: leaf for name, leaf in huggingface.by_path(params).items() if isinstance(leaf, LoraWeight)}
    one = next(iter(adapted.values()))
    rank, dora = one.lora_a.shape[-1], one.magnitude is not None
    every = modules(family, config)
    chosen = {name: [p for p in module.weight.pieces if p.path in adapted] for name, module in every.items()}
    chosen = {name: pieces for name, pieces in chosen.items() if pieces}
    if homeless := adapted.keys() - {piece.path for pieces in chosen.values() for piece in pieces}:
        raise InputError(
            f"{path}: adapters of {min(homeless)}: PEFT has no modules of experts, nor of MLPs beside them; `convert "
            "merge` folds them into the model"
        )
    described: dict[str, Described] = {}
    for name, pieces in chosen.items():
        module = every[name]
        if dora and len(pieces) < len(module.weight.pieces):
            lacking = next(piece.path for piece in module.weight.pieces if piece not in pieces)
            raise InputError(
                f"{path}: DoRA of {pieces[0].path} and not of {lacking}: PEFT has {name}, which holds both, whole"
            )
        of_dtype = jnp.dtype(dtype or adapted[pieces[0].path].lora_a.dtype)
        shapes = module.shapes(rank * len(pieces), dora)
        described |= {f"{PREFIX}{name}.{kind}": Described(of_dtype, shape) for kind, shape in shapes.items()}

    def get(tensor: str) -> np.ndarray:
        kind = next(kind for kind in KINDS if tensor.endswith(f".{kind}"))
        name = tensor.removeprefix(PREFIX).removesuffix(f".{kind}")
        several = [(piece, adapted[piece.path]) for piece in chosen[name]]
        if kind == MAGNITUDE:
            joined = np.zeros(every[name].outputs, np.float32)
            for piece, leaf in several:
                joined[piece.rows] = _factor(leaf.magnitude, piece, outputs=True)[:, 0]
        elif kind in (LINEAR[0], LOOK_UP[0]):
            a = np.concatenate([_factor(leaf.lora_a, piece, outputs=False) for piece, leaf in several], axis=1)
            joined = a if kind == LOOK_UP[0] else a.T
        else:
            b = np.zeros((every[name].outputs, rank * len(several)), np.float32)
            for number, (piece, leaf) in enumerate(several):
                rows, columns = piece.rows, slice(number * rank, (number + 1) * rank)
                b[rows, columns] = _factor(leaf.lora_b, piece, outputs=True)
            joined = b.T if kind == LOOK_UP[1] else b
        with np.errstate(over="ignore"):  # told below
            joined = joined.astype(described[tensor].dtype, copy=False)
        if not np.isfinite(joined).all():
            raise InputError(f"{path}: tensor {tensor!r} has values that are not finite in {joined.dtype}")
        return joined

    by_count = {count: [n for n in chosen if len(chosen[n]) == count] for count in sorted({*map(len, chosen.values())})}
    times = {
        re.escape(ending): count for count, names in by_count.items() if count > 1 for ending in endings(names, every)
    }
    said = PeftConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=endings(chosen, every),
        rank_pattern={pattern: rank * count for pattern, count in times.items()},
        alpha_pattern={pattern: alpha * (math.sqrt(count) if rslora else count) for pattern, count in times.items()},
        use_rslora=rslora,
        use_dora=dora,
        ensure_weight_tying=config.tied_head and HEAD in chosen,
    )
    with NewFolder(path) as folder:
        safetensors.write_file(folder / WEIGHTS, described, get)
        peft_config.write(folder, said, family.input_first, base)


def _factor(leaf: jax.Array, piece: Piece, outputs: bool) -> np.ndarray:
    """One layer of a factor, [in, rank] or [out, rank], without padding; of a magnitude, [out, 1]."""
    spec = piece.spec
    sizes = [size for dim, size in enumerate(spec.shape) if (dim in spec.contracting) != outputs]
    return huggingface.one_layer(leaf, piece.layer, tuple(sizes)).reshape(math.prod(sizes), -1)
