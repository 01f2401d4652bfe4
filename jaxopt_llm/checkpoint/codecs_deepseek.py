"""Fields of DeepSeek-V2's and V3's config.json: see codecs.py."""

from typing import Any

from jaxopt_llm.checkpoint.codecs import Codec, Settings, Unsupported, rope_parameters, unknown_rope, value_of
from jaxopt_llm.model.config import ModelConfig


def _read_latents(settings: Settings) -> dict[str, Any]:
    heads = value_of(settings, "num_attention_heads", int)
    kv_heads = value_of(settings, "num_key_value_heads", int, heads)
    if kv_heads != heads:
        raise Unsupported(f"num_key_value_heads={kv_heads}: only num_attention_heads={heads} is known here")
    own, turned = (value_of(settings, f"qk_{part}_head_dim", int) for part in ("nope", "rope"))
    rank = value_of(settings, "kv_lora_rank", int)
    if rank < 1:
        raise Unsupported(f"kv_lora_rank={rank}: must be at least 1")
    return {
        "kv_heads": heads,
        "head_dim": own + turned,
        "latent_rank": rank,
        "query_rank": value_of(settings, "q_lora_rank", int, 0),
        "rotary_head_dim": turned,
        "value_head_dim": value_of(settings, "v_head_dim", int),
    }


def _write_latents(config: ModelConfig) -> Settings:
    return {
        "num_key_value_heads": config.kv_heads,
        "kv_lora_rank": config.latent_rank,
        "q_lora_rank": config.query_rank or None,
        "qk_nope_head_dim": config.key_dim,
        "qk_rope_head_dim": config.turned_dim,
        "v_head_dim": config.value_dim,
    }


def _read_rope(settings: Settings) -> dict[str, Any]:
    kind, scaling = rope_parameters(settings)
    fields: dict[str, Any] = {"rope_theta": value_of(scaling, "rope_theta", float)}
    if kind == "default":
        return fields
    if kind != "yarn":
        raise unknown_rope(kind, "default", "yarn")
    for name, known in (("attention_factor", None), ("truncate", True)):
        if scaling.get(name) not in (None, known):
            raise Unsupported(f"{name}={scaling[name]!r}: only {known} is known here")
    mscale, of_scores = (value_of(scaling, name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    if of_scores and not mscale:
        raise Unsupported(f"mscale_all_dim={of_scores}: without mscale it is not known here")
    return fields | {
        "rope_scaling": "yarn",
        "rope_factor": value_of(scaling, "factor", float),
        "rope_low_frequency_factor": value_of(scaling, "beta_slow", float, 1.0),
        "rope_high_frequency_factor": value_of(scaling, "beta_fast", float, 32.0),
        "rope_original_length": value_of(scaling, "original_max_position_embeddings", int),
        # Theirs is read beside mscale_all_dim alone.
        **({"rope_mscale": mscale, "rope_mscale_all_dim": of_scores} if of_scores else {}),
    }


def _write_rope(config: ModelConfig) -> Settings:
    """In the older form, which every version reads."""
    theta = {"rope_theta": config.rope_theta}
    if config.rope_factor == 1:
        return theta | {"rope_scaling": None}
    mscale, of_scores = config.rope_mscale, config.rope_mscale_all_dim
    if of_scores and not mscale:
        raise Unsupported(f"model.rope_mscale={mscale} beside model.rope_mscale_all_dim={of_scores}")
    scaling = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": config.rope_factor,
        "beta_slow": config.rope_low_frequency_factor,
        "beta_fast": config.rope_high_frequency_factor,
        "original_max_position_embeddings": config.rope_original_length,
        **({"mscale": mscale, "mscale_all_dim": of_scores} if of_scores else {}),
    }
    return theta | {"rope_scaling": scaling}


def _read_shared(settings: Settings) -> dict[str, Any]:
    count, width = (value_of(settings, name, int) for name in ("n_shared_experts", "moe_intermediate_size"))
    if count < 1:
        raise Unsupported(f"n_shared_experts={count}: must be at least 1")
    return {"expert_width": width, "shared_expert_width": count * width}


def _write_shared(config: ModelConfig) -> Settings:
    count, rest = divmod(config.shared_expert_width, max(config.expert_width, 1))
    if rest or not count:
        raise Unsupported(
            f"model.shared_expert_width={config.shared_expert_width}: no multiple of "
            f"model.expert_width={config.expert_width}"
        )
    return {"n_shared_experts": count, "moe_intermediate_size": config.expert_width}


GREEDY, BY_GROUP = "greedy", "group_limited_greedy"


def _read_groups(settings: Settings) -> dict[str, Any]:
    method = settings.get("topk_method") or GREEDY
    if method not in (GREEDY, BY_GROUP):
        raise Unsupported(f"topk_method={method!r}: only {GREEDY!r} and {BY_GROUP!r} are known here")
    if method == GREEDY:
        return {"router_groups": 1, "router_groups_per_token": 1}
    groups, chosen = (value_of(settings, name, int) for name in ("n_group", "topk_group"))
    return {"router_groups": groups, "router_groups_per_token": chosen}


def _write_groups(config: ModelConfig) -> Settings:
    groups, chosen = config.router_groups, config.router_groups_per_token
    return {"topk_method": BY_GROUP if groups > 1 else GREEDY, "n_group": groups, "topk_group": chosen}


LATENTS = Codec(_read_latents, _write_latents)
YARN = Codec(_read_rope, _write_rope)
SHARED = Codec(_read_shared, _write_shared)
GROUPS = Codec(_read_groups, _write_groups)
