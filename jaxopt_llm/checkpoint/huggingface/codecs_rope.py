"""Codecs for RoPE and its scaling: see codecs.py. The rules are those of modeling_rope_utils.py in transformers."""

import functools
from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import CORRECT, Codec, Settings, read_value, shorten, unsupported
from jaxopt_llm.config import ModelConfig, RopeConfig

ORIGINAL, CONTEXT = "original_max_position_embeddings", "max_position_embeddings"
Kinds = dict[str, str]  # rope_type -> model.rope.scaling
ALL_KINDS = {kind: kind for kind in ("llama3", "yarn", "linear", "dynamic", "longrope")}


def _read(settings: Settings, *, kinds: Kinds, scales_scores: bool) -> dict[str, Any]:
    given, scaling = _read_scaling(settings)
    theta = {"rope.theta": read_value(scaling, "rope_theta", float)}
    if given == "default":
        return theta
    kind = kinds.get(given) if isinstance(given, str) else None
    if kind is None:
        supported = ", ".join(map(repr, ("default", *kinds)))
        need = f"the model would need other frequencies of RoPE; those of {supported} are read in this family"
        raise unsupported(f"rope_type={given!r}", need)
    fields = theta | {"rope.scaling": kind} | _READERS[kind](scaling)
    mscale, mscale_all_dim = (read_value(scaling, name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    if kind != "yarn":
        if scales_scores and mscale_all_dim:  # the class would scale the scores of any kind
            raise unsupported(f"mscale_all_dim={mscale_all_dim}", f"rope_type={given!r} would need scaled scores")
        return fields
    if scales_scores and mscale_all_dim:
        fields["rope.mscale_all_dim"] = mscale_all_dim
        if mscale:
            return fields | {"rope.mscale": mscale}
    elif not (mscale and mscale_all_dim):  # transformers reads mscale only together with mscale_all_dim
        return fields
    given_factor = fields["rope.attention_factor"]
    # The classes of most families do not also scale the scores, as our mscale_all_dim does.
    return fields | {"rope.attention_factor": given_factor or _derive(fields["rope.factor"], mscale, mscale_all_dim)}


def _derive(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """Return the attention factor that transformers derives from the parameters of yarn."""
    above, below = (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1.0, 0.0)
    return RopeConfig(scaling="yarn", factor=max(factor, 1.0), mscale=above, mscale_all_dim=below).magnitude


def _read_scaling(settings: Settings) -> tuple[Any, Settings]:
    """Return the kind of scaling and its parameters, with rope_theta and the lengths of the model.

    The older form has rope_scaling and, next to it, rope_theta. The newer form has rope_parameters with both.
    """
    # transformers also prefers rope_scaling.
    scaling = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
        raise unsupported(
            f"rope_parameters={shorten(scaling)}", "the model would need other frequencies in some of its layers"
        )
    for each in (settings, scaling):
        if each.get("partial_rotary_factor") not in (None, 1):
            share = each["partial_rotary_factor"]
            raise unsupported(f"partial_rotary_factor={share!r}", "the model would need RoPE on a part of each head")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    # The original length outside rope_scaling takes precedence over the one inside.
    original = settings.get(ORIGINAL) or scaling.get(ORIGINAL) or settings.get(CONTEXT)
    lengths = {CONTEXT: settings.get(CONTEXT), ORIGINAL: original}
    return kind, {"rope_theta": settings.get("rope_theta"), **scaling, **lengths}


def _read_llama3(scaling: Settings) -> dict[str, Any]:
    return {
        "rope.factor": read_value(scaling, "factor", float),
        "rope.original_length": read_value(scaling, ORIGINAL, int),
        "rope.low_frequency_factor": read_value(scaling, "low_freq_factor", float),
        "rope.high_frequency_factor": read_value(scaling, "high_freq_factor", float),
    }


def _read_linear(scaling: Settings) -> dict[str, Any]:
    return {"rope.factor": read_value(scaling, "factor", float)}


def _read_dynamic(scaling: Settings) -> dict[str, Any]:
    length = read_value(scaling, CONTEXT, int)
    return {"rope.factor": read_value(scaling, "factor", float), "rope.original_length": length}


def _read_extension(scaling: Settings) -> dict[str, Any]:
    """Read the fields that yarn and longrope share. A missing factor is the ratio of the two lengths."""
    original = read_value(scaling, ORIGINAL, int, minimum=1)
    factor = scaling.get("factor") and read_value(scaling, "factor", float)
    return {
        "rope.factor": factor or read_value(scaling, CONTEXT, int) / original,
        "rope.original_length": original,
        "rope.attention_factor": read_value(scaling, "attention_factor", float, 0.0),
    }


def _read_yarn(scaling: Settings) -> dict[str, Any]:
    low, high = (scaling.get(name) and read_value(scaling, name, float) for name in ("beta_slow", "beta_fast"))
    return _read_extension(scaling) | {
        "rope.low_frequency_factor": low or 1.0,
        "rope.high_frequency_factor": high or 32.0,
        "rope.truncate": bool(scaling.get("truncate", True)),
    }


def _read_longrope(scaling: Settings) -> dict[str, Any]:
    fields = _read_extension(scaling)
    return fields | {
        "rope.factor": max(fields["rope.factor"], 1.0),  # below 1 its attention factor is 1, too
        "rope.short_factors": _read_factors(scaling, "short_factor"),
        "rope.long_factors": _read_factors(scaling, "long_factor"),
    }


def _read_factors(scaling: Settings, name: str) -> tuple[float, ...]:
    values = scaling.get(name)
    if not isinstance(values, list):
        raise unsupported(f"{name}={shorten(values)}", "must be a list of numbers", CORRECT)
    return tuple(read_value({name: value}, name, float) for value in values)


_READERS = {
    "llama3": _read_llama3,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
}


def _write(config: ModelConfig, *, scales_scores: bool) -> Settings:
    """Write the older form, which all versions of transformers read."""
    rope, theta = config.rope, {"rope_theta": config.rope.theta}
    if not rope.is_scaled:
        return theta | {"rope_scaling": None}
    parameters: Settings = {"type": rope.scaling, "rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "dynamic":
        return theta | {"rope_scaling": parameters, CONTEXT: rope.original_length}
    if rope.scaling != "linear":
        parameters[ORIGINAL] = rope.original_length
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": low, "high_freq_factor": high}
    if rope.scaling == "yarn":
        parameters |= {"beta_slow": low, "beta_fast": high, "truncate": rope.truncate}
        weights = (rope.mscale, rope.mscale_all_dim) if scales_scores and rope.mscale_all_dim else (1.0, 0.0)
        if weights[1]:
            parameters |= dict(zip(("mscale", "mscale_all_dim"), weights, strict=True))
        if rope.attention_factor or rope.magnitude != _derive(rope.factor, *weights):
            parameters["attention_factor"] = rope.magnitude
    elif rope.attention_factor:
        parameters["attention_factor"] = rope.attention_factor
    if rope.scaling == "longrope":
        factors = {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
        # Also outside, where the class of Phi-3 and other programs look for it.
        return theta | {"rope_scaling": parameters | factors, ORIGINAL: rope.original_length}
    return theta | {"rope_scaling": parameters}


def _rope_codec(kinds: Kinds, scales_scores: bool = False) -> Codec:
    """Return a codec that supports some kinds of scaling.

    scales_scores: whether the family's class also multiplies the attention scores by a factor from mscale_all_dim.
    """
    return Codec(
        functools.partial(_read, kinds=kinds, scales_scores=scales_scores),
        functools.partial(_write, scales_scores=scales_scores),
    )


ROPE = _rope_codec(ALL_KINDS)
SCORED_ROPE = _rope_codec(ALL_KINDS, scales_scores=True)
PHI3_ROPE = _rope_codec({"longrope": "longrope", "su": "longrope", "yarn": "longrope"})  # the class renames the others
