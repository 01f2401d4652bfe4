"""Codecs for RoPE and its scaling: see codecs.py."""

import functools
from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import Codec, Settings, Unsupported, check_value, read_value
from jaxopt_llm.config import ModelConfig


def _read(settings: Settings, *, kinds: tuple[str, ...], scales_scores: bool) -> dict[str, Any]:
    kind, scaling = _read_scaling(settings)
    fields = {"rope.theta": read_value(scaling, "rope_theta", float)}
    if kind == "default":
        return fields
    if kind not in kinds:
        supported = " and ".join(map(repr, ("default", *kinds)))
        raise Unsupported(f"rope_type={kind!r}: only {supported} are supported")
    fields["rope.factor"] = read_value(scaling, "factor", float)
    fields["rope.original_length"] = read_value(scaling, "original_max_position_embeddings", int)
    return fields | (_read_llama3(scaling) if kind == "llama3" else _read_yarn(scaling, scales_scores))


def _read_scaling(settings: Settings) -> tuple[Any, Settings]:
    """Return the kind of scaling and its parameters, with rope_theta.

    The older form has rope_scaling and, next to it, rope_theta. The newer form has rope_parameters with both.
    """
    # transformers also prefers rope_scaling.
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise Unsupported(f"rope_parameters={scaling!r}: only one set of parameters for all layers is supported")
    for each in (settings, scaling):
        if each.get("partial_rotary_factor", 1) != 1:
            raise Unsupported(f"partial_rotary_factor={each['partial_rotary_factor']!r}: only 1 is supported")
    outer = settings.get("original_max_position_embeddings")  # takes precedence over the one inside rope_scaling
    if outer is not None:
        scaling = scaling | {"original_max_position_embeddings": outer}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return kind, {"rope_theta": settings.get("rope_theta"), **scaling}


def _read_llama3(scaling: Settings) -> dict[str, Any]:
    return {
        "rope.low_frequency_factor": read_value(scaling, "low_freq_factor", float),
        "rope.high_frequency_factor": read_value(scaling, "high_freq_factor", float),
    }


def _read_yarn(scaling: Settings, scales_scores: bool) -> dict[str, Any]:
    check_value(scaling, "attention_factor")
    check_value(scaling, "truncate", True)
    mscale, mscale_all_dim = (read_value(scaling, name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    if mscale_all_dim and not (scales_scores and mscale):
        where = "without mscale" if scales_scores else "in this family"
        raise Unsupported(f"mscale_all_dim={mscale_all_dim}: not supported {where}")
    return {
        "rope.scaling": "yarn",
        "rope.low_frequency_factor": read_value(scaling, "beta_slow", float, 1.0),
        "rope.high_frequency_factor": read_value(scaling, "beta_fast", float, 32.0),
        # transformers reads mscale only together with mscale_all_dim.
        **({"rope.mscale": mscale, "rope.mscale_all_dim": mscale_all_dim} if mscale_all_dim else {}),
    }


def _write(config: ModelConfig, *, scales_scores: bool) -> Settings:
    """Write the older form, which all versions of transformers read."""
    theta = {"rope_theta": config.rope.theta}
    if config.rope.factor == 1:
        return theta | {"rope_scaling": None}
    low, high = config.rope.low_frequency_factor, config.rope.high_frequency_factor
    kind = config.rope.scaling
    if kind == "llama3":
        parameters: Settings = {"low_freq_factor": low, "high_freq_factor": high}
    else:
        parameters = {"beta_slow": low, "beta_fast": high}
        if scales_scores and config.rope.mscale_all_dim:
            parameters |= {"mscale": config.rope.mscale, "mscale_all_dim": config.rope.mscale_all_dim}
    return theta | {
        "rope_scaling": {
            "type": kind,
            "rope_type": kind,
            "factor": config.rope.factor,
            "original_max_position_embeddings": config.rope.original_length,
            **parameters,
        }
    }


def _rope_codec(*kinds: str, scales_scores: bool) -> Codec:
    """Return a codec that supports some kinds of scaling.

    scales_scores: whether the family's class also multiplies the attention scores by a factor from mscale_all_dim.
    """
    return Codec(
        functools.partial(_read, kinds=kinds, scales_scores=scales_scores),
        functools.partial(_write, scales_scores=scales_scores),
    )


ROPE = _rope_codec("llama3", "yarn", scales_scores=False)
YARN = _rope_codec("yarn", scales_scores=True)
