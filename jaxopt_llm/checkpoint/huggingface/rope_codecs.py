"""Codecs of RoPE and its scaling, by the rules of modeling_rope_utils.py in transformers."""

import functools
from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import (
    CORRECT,
    FIELD_TYPES,
    GLOBAL_LAYERS,
    SLIDING_LAYERS,
    Codec,
    Settings,
    Unsupported,
    read_heads,
    read_value,
    set_fields,
    shorten,
    unsupported,
)
from jaxopt_llm.config import ModelConfig, RopeConfig
from jaxopt_llm.config.model import READ_BY_SCALING

ORIGINAL, CONTEXT = "original_max_position_embeddings", "max_position_embeddings"
Kinds = dict[str, str]  # rope_type -> model.rope.scaling
ALL_KINDS = {kind: kind for kind in READ_BY_SCALING}
# The names of our fields in rope_scaling, and those that only one kind of scaling has.
PARAMETERS = {
    **{"factor": "factor", "original_length": ORIGINAL, "attention_factor": "attention_factor", "truncate": "truncate"},
    **{"short_factors": "short_factor", "long_factors": "long_factor"},
}
OWN_PARAMETERS = {
    "llama3": {"low_frequency_factor": "low_freq_factor", "high_frequency_factor": "high_freq_factor"},
    "yarn": {"low_frequency_factor": "beta_slow", "high_frequency_factor": "beta_fast"},
    "dynamic": {"original_length": CONTEXT},
}


def _name_parameters(kind: str) -> dict[str, str]:
    """Return {our field: name in rope_scaling} of a kind of scaling, without mscale, which `_read_rope` weighs."""
    names = PARAMETERS | OWN_PARAMETERS.get(kind, {})
    return {ours: names[ours] for ours in ("factor", *READ_BY_SCALING[kind]) if ours in names}


def _read_rope(settings: Settings, *, kinds: Kinds, scales_scores: bool, partial: bool) -> dict[str, Any]:
    given, scaling = _read_scaling(settings)
    theta = {"rope.theta": read_value(scaling, "rope_theta", float)} | _read_share(settings, scaling, partial)
    if given == "default":
        return theta
    kind = kinds.get(given) if isinstance(given, str) else None
    if kind is None:
        supported = ", ".join(map(repr, ("default", *kinds)))
        need = f"the model would need other frequencies of RoPE; those of {supported} are read in this family"
        raise unsupported(f"rope_type={given!r}", need)
    fields = theta | {"rope.scaling": kind} | _read_parameters(kind, scaling)
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
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "mrope":  # positions of images; those of text are the usual ones
        kind = "default"
    # The original length outside rope_scaling takes precedence over the one inside.
    original = settings.get(ORIGINAL) or scaling.get(ORIGINAL) or settings.get(CONTEXT)
    lengths = {CONTEXT: settings.get(CONTEXT), ORIGINAL: original}
    return kind, {"rope_theta": settings.get("rope_theta"), **scaling, **lengths}


SHARE = "partial_rotary_factor"


def _read_share(settings: Settings, scaling: Settings, partial: bool) -> dict[str, Any]:
    """Read the size of the part of a head that is rotated. partial: whether the family's class reads it."""
    share = read_value({SHARE: settings.get(SHARE)} | scaling, SHARE, float, 1.0)
    if share == 1:
        return {}
    if not partial or not 0 < share < 1:
        raise unsupported(f"{SHARE}={share!r}", "the model would need RoPE on a part of each head")
    return {"rope.size": int(read_heads(settings)["head_dim"] * share)}


def _read_parameters(kind: str, scaling: Settings) -> dict[str, Any]:
    """Read the fields of a kind of scaling, with the values that transformers takes for missing ones."""
    if kind in ("yarn", "longrope"):
        original = read_value(scaling, ORIGINAL, int, minimum=1)
        factor = scaling.get("factor") or read_value(scaling, CONTEXT, int) / original
        given = {name: scaling[name] for name in ("attention_factor", "beta_slow", "beta_fast") if scaling.get(name)}
        missing = {"attention_factor": 0.0, "beta_slow": 1.0, "beta_fast": 32.0}
        scaling = scaling | missing | given | {"factor": factor, "truncate": bool(scaling.get("truncate", True))}
    fields = {}
    for ours, theirs in _name_parameters(kind).items():
        name = f"rope.{ours}"
        read = _read_factors if FIELD_TYPES[name] == tuple[float, ...] else read_value
        fields[name] = read(scaling, theirs, FIELD_TYPES[name])
    if kind == "longrope":  # below 1 its attention factor is 1, too
        fields["rope.factor"] = max(fields["rope.factor"], 1.0)
    return fields


def _read_factors(scaling: Settings, name: str, kind: Any) -> tuple[float, ...]:
    values = scaling.get(name)
    if not isinstance(values, list):
        raise unsupported(f"{name}={shorten(values)}", "must be a list of numbers", CORRECT)
    return tuple(read_value({name: value}, name, float) for value in values)


def _write_rope(config: ModelConfig, *, scales_scores: bool, partial: bool) -> Settings:
    """Write the older form, which all versions of transformers read."""
    rope, outside = config.rope, {"rope_theta": config.rope.theta}
    if partial:
        outside[SHARE] = config.rotary_dim / config.head_dim
    if not rope.is_scaled:
        return outside | {"rope_scaling": None}
    values = {theirs: getattr(rope, ours) for ours, theirs in _name_parameters(rope.scaling).items()}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    if rope.scaling == "dynamic":
        outside[CONTEXT] = values.pop(CONTEXT)
    if rope.scaling == "longrope":  # also outside, where the class of Phi-3 and other programs look for it
        outside[ORIGINAL] = rope.original_length
    if rope.scaling == "yarn":
        weights = (rope.mscale, rope.mscale_all_dim) if scales_scores and rope.mscale_all_dim else (1.0, 0.0)
        if weights[1]:
            values |= dict(zip(("mscale", "mscale_all_dim"), weights, strict=True))
        if rope.magnitude != _derive(rope.factor, *weights):
            values["attention_factor"] = rope.magnitude
    if not values.get("attention_factor"):
        values.pop("attention_factor", None)
    return outside | {"rope_scaling": {"type": rope.scaling, "rope_type": rope.scaling, **values}}


def _rope_codec(kinds: Kinds, scales_scores: bool = False, partial: bool = False) -> Codec:
    """Return a codec that supports some kinds of scaling.

    scales_scores: whether the family's class also multiplies the attention scores by a factor from mscale_all_dim.
    partial: whether the family's class rotates only a part of each head, by partial_rotary_factor.
    """
    return Codec(
        functools.partial(_read_rope, kinds=kinds, scales_scores=scales_scores, partial=partial),
        functools.partial(_write_rope, scales_scores=scales_scores, partial=partial),
    )


BETA = "llama_4_scaling_beta"


def _read_growing_rope(settings: Settings) -> dict[str, Any]:
    """Read Ministral 3's RoPE, with queries that grow with their positions."""
    given = settings.get("rope_scaling") or settings.get("rope_parameters")
    if not given:  # the class then takes the scaling of a published model
        raise Unsupported(f"rope_parameters is missing; {CORRECT}")
    beta = read_value(given, BETA, float, 0.0) if isinstance(given, dict) else 0.0
    fields = ROPE.read(settings)
    if beta and "rope.original_length" not in fields:
        fields["rope.original_length"] = read_value(given, ORIGINAL, int)
    return fields | {"rope.query_growth": beta}


def _write_growing_rope(config: ModelConfig) -> Settings:
    older = ROPE.write(config)
    growth = {BETA: config.rope.query_growth, ORIGINAL: config.rope.original_length}
    given = (older["rope_scaling"] or {"rope_type": "default"}) | growth
    return older | {"rope_scaling": given | {"rope_theta": config.rope.theta}}


def _read_temperature(settings: Settings) -> dict[str, Any]:
    """Read Llama 4's growth of queries in layers without RoPE."""
    used = settings.get("attn_temperature_tuning")
    if type(used) not in (bool, int):
        raise unsupported(f"attn_temperature_tuning={used!r}", "must be true or false", CORRECT)
    return {
        "rope.query_growth": read_value(settings, "attn_scale", float) if used else 0.0,
        "rope.growth_layers": "nope",
        "rope.growth_length": read_value(settings, "floor_scale", int, minimum=1),
    }


def _write_temperature(config: ModelConfig) -> Settings:
    rope = config.rope
    return {
        "attn_temperature_tuning": rope.query_growth > 0,
        "attn_scale": rope.query_growth,
        "floor_scale": rope.growth_length or rope.original_length,
    }


def _read_minimax_rope(settings: Settings) -> dict[str, Any]:
    """Read partial RoPE, whose size published folders give instead of its share."""
    if settings.get("rotary_dim") is None:
        return PARTIAL_ROPE.read(settings)
    share = read_value(settings, "rotary_dim", int) / max(read_heads(settings)["head_dim"], 1)
    return PARTIAL_ROPE.read(settings | {SHARE: share})


def _read_hunyuan_rope(settings: Settings) -> dict[str, Any]:
    """Read RoPE whose type "dynamic" with an `alpha` is a larger theta, whatever the length of a document is."""
    kind, given = _read_scaling(settings)
    alpha, size = read_value(given, "alpha", float, 0.0, minimum=0), read_heads(settings)["head_dim"]
    if kind != "dynamic" or not alpha or size <= 2:
        return ROPE.read(settings)
    theta = read_value(given, "rope_theta", float) * alpha ** (size / (size - 2))
    return ROPE.read(settings | {"rope_theta": theta, "rope_scaling": None, "rope_parameters": None})


def _write_explicit_rope(config: ModelConfig) -> Settings:
    """Write what no rope_scaling means in a family whose class then scales as the published model does."""
    older = ROPE.write(config)
    unscaled = {"rope_type": "default", "rope_theta": config.rope.theta}
    return older if older["rope_scaling"] else older | {"rope_scaling": unscaled}


# What the class of gpt-oss takes for a missing or empty rope_scaling.
GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def _read_gpt_oss_rope(settings: Settings) -> dict[str, Any]:
    given = settings.get("rope_scaling") or settings.get("rope_parameters")
    return ROPE.read(settings if given else settings | {"rope_scaling": {**GPT_OSS_YARN, ORIGINAL: 4096}})


def _write_gpt_oss_rope(config: ModelConfig) -> Settings:
    written = ROPE.write(config)
    return written | {"rope_scaling": written["rope_scaling"] or {"rope_type": "default"}}


LOCAL_THETA = "rope_local_base_freq"


def _read_layered_rope(settings: Settings) -> dict[str, Any]:
    """Read RoPE whose scaling is that of the global layers only, and whose theta may differ in sliding layers.

    The newer form has rope_parameters for each kind of layer. The older form has rope_theta and rope_scaling of the
    global layers, and rope_local_base_freq of the sliding layers.
    """
    kinds = settings.get("rope_parameters") or {}
    layers = (GLOBAL_LAYERS, SLIDING_LAYERS)
    if not isinstance(kinds, dict) or not all(name in layers and isinstance(kinds[name], dict) for name in kinds):
        problem = f"must have the parameters of {GLOBAL_LAYERS} and of {SLIDING_LAYERS}"
        raise unsupported(f"rope_parameters={shorten(kinds)}", problem, CORRECT)
    of_global, of_sliding = (kinds.get(name, {}) for name in layers)
    if of_sliding.get("rope_type", "default") != "default":
        raise unsupported(
            f"rope_parameters.{SLIDING_LAYERS}.rope_type={of_sliding['rope_type']!r}",
            "only 'default' is read; the model would need scaled frequencies in sliding layers",
        )
    of_global = of_global | (settings.get("rope_scaling") or {})
    fields = ROPE.read(settings | {"rope_parameters": of_global, "rope_scaling": None})
    theta = read_value({"rope_theta": settings.get(LOCAL_THETA)} | of_sliding, "rope_theta", float)
    return fields | {"rope.sliding_theta": theta}


def _write_layered_rope(config: ModelConfig) -> Settings:
    """Write both forms, because versions of transformers before 5 read the older one."""
    older = ROPE.write(config)
    of_sliding = {"rope_type": "default", "rope_theta": config.rope.sliding_theta or config.rope.theta}
    scaling = older["rope_scaling"] or {"rope_type": "default"}
    of_global = {"rope_theta": config.rope.theta, **scaling}
    newer = {"rope_parameters": {GLOBAL_LAYERS: of_global, SLIDING_LAYERS: of_sliding}}
    return older | newer | {LOCAL_THETA: of_sliding["rope_theta"]}


ROPE = _rope_codec(ALL_KINDS)
PARTIAL_ROPE = _rope_codec(ALL_KINDS, partial=True)
GROWING_ROPE = Codec(_read_growing_rope, _write_growing_rope)
MINIMAX_ROPE = Codec(_read_minimax_rope, lambda config: PARTIAL_ROPE.write(config) | {"rotary_dim": config.rotary_dim})
HUNYUAN_ROPE = Codec(_read_hunyuan_rope, ROPE.write)
EXPLICIT_ROPE = Codec(ROPE.read, _write_explicit_rope)
GPT_OSS_ROPE = Codec(_read_gpt_oss_rope, _write_gpt_oss_rope)
LAYERED_ROPE = Codec(_read_layered_rope, _write_layered_rope)
TEMPERATURE = Codec(_read_temperature, _write_temperature)
INTERLEAVED = set_fields({"rope.interleaved": True})
SCORED_ROPE = _rope_codec(ALL_KINDS, scales_scores=True)
# The class renames the other kinds.
PHI3_ROPE = _rope_codec({"longrope": "longrope", "su": "longrope", "yarn": "longrope"}, partial=True)
