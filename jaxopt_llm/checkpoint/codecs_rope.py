"""Rotary positions and their scaling in config.json: see codecs.py."""

import functools
from typing import Any

from jaxopt_llm.checkpoint.codecs import Codec, Settings, Unsupported, value_of
from jaxopt_llm.model.config import ModelConfig


def _read(settings: Settings, *, kinds: tuple[str, ...], of_scores: bool) -> dict[str, Any]:
    kind, scaling = _scaling(settings)
    fields = {"rope_theta": value_of(scaling, "rope_theta", float)}
    if kind == "default":
        return fields
    if kind not in kinds:
        raise Unsupported(f"rope_type={kind!r}: only {' and '.join(map(repr, ('default', *kinds)))} are known here")
    return fields | {
        "rope_factor": value_of(scaling, "factor", float),
        "rope_original_length": value_of(scaling, "original_max_position_embeddings", int),
        **(_read_llama3(scaling) if kind == "llama3" else _read_yarn(scaling, of_scores)),
    }


def _scaling(settings: Settings) -> tuple[Any, Settings]:
    """Its kind, and its parameters with rope_theta: of the older form, where that is beside rope_scaling, and of the
    newer one, rope_parameters with both."""
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}  # the former wins there, too
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise Unsupported(f"rope_parameters={scaling!r}: one set for all layers is known here")
    for where in (settings, scaling):
        if where.get("partial_rotary_factor", 1) != 1:
            raise Unsupported(f"partial_rotary_factor={where['partial_rotary_factor']!r}: only 1 is known here")
    outer = settings.get("original_max_position_embeddings")  # which wins over the one inside
    if outer is not None:
        scaling = scaling | {"original_max_position_embeddings": outer}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return kind, {"rope_theta": settings.get("rope_theta"), **scaling}


def _read_llama3(scaling: Settings) -> dict[str, Any]:
    return {
        "rope_low_frequency_factor": value_of(scaling, "low_freq_factor", float),
        "rope_high_frequency_factor": value_of(scaling, "high_freq_factor", float),
    }


def _read_yarn(scaling: Settings, of_scores: bool) -> dict[str, Any]:
    for name, known in (("attention_factor", None), ("truncate", True)):
        if scaling.get(name) not in (None, known):
            raise Unsupported(f"{name}={scaling[name]!r}: only {known} is known here")
    mscale, all_dim = (value_of(scaling, name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    if all_dim and not (of_scores and mscale):
        where = "without mscale" if of_scores else "in this family"
        raise Unsupported(f"mscale_all_dim={all_dim}: not known here {where}")
    return {
        "rope_scaling": "yarn",
        "rope_low_frequency_factor": value_of(scaling, "beta_slow", float, 1.0),
        "rope_high_frequency_factor": value_of(scaling, "beta_fast", float, 32.0),
        # Theirs is read beside mscale_all_dim alone.
        **({"rope_mscale": mscale, "rope_mscale_all_dim": all_dim} if all_dim else {}),
    }


def _write(config: ModelConfig, *, of_scores: bool) -> Settings:
    """In the older form, which every version reads."""
    theta = {"rope_theta": config.rope_theta}
    if config.rope_factor == 1:
        return theta | {"rope_scaling": None}
    low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
    mscales = {"mscale": config.rope_mscale, "mscale_all_dim": config.rope_mscale_all_dim}
    of_kind: dict[str, Settings] = {
        "llama3": {"low_freq_factor": low, "high_freq_factor": high},
        "yarn": {"beta_slow": low, "beta_fast": high, **(mscales if of_scores and config.rope_mscale_all_dim else {})},
    }
    kind = config.rope_scaling
    return theta | {
        "rope_scaling": {
            "type": kind,
            "rope_type": kind,
            "factor": config.rope_factor,
            "original_max_position_embeddings": config.rope_original_length,
            **of_kind[kind],
        }
    }


def _rope(*kinds: str, of_scores: bool) -> Codec:
    """of_scores: whether the family's class multiplies scores by mscale_all_dim, too."""
    return Codec(
        functools.partial(_read, kinds=kinds, of_scores=of_scores), functools.partial(_write, of_scores=of_scores)
    )


ROPE = _rope("llama3", "yarn", of_scores=False)
YARN = _rope("yarn", of_scores=True)
