"""Fields of DeepSeek-V2's and V3's config.json: see codecs.py."""

from typing import Any

from jaxopt_llm.checkpoint.codecs import Codec, Settings, Unsupported, value_of
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
SHARED = Codec(_read_shared, _write_shared)
GROUPS = Codec(_read_groups, _write_groups)
