"""Codecs for DeepSeek-V2 and V3: MLA, shared experts and expert groups. See codecs.py."""

from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import Codec, Settings, Unsupported, read_value
from jaxopt_llm.config import ModelConfig


def _read_latents(settings: Settings) -> dict[str, Any]:
    heads = read_value(settings, "num_attention_heads", int)
    kv_heads = read_value(settings, "num_key_value_heads", int, heads)
    if kv_heads != heads:
        raise Unsupported(f"num_key_value_heads={kv_heads}: only num_attention_heads={heads} is supported")
    plain_dim, rotary_dim = (read_value(settings, f"qk_{part}_head_dim", int) for part in ("nope", "rope"))
    rank = read_value(settings, "kv_lora_rank", int)
    if rank < 1:
        raise Unsupported(f"kv_lora_rank={rank}: must be at least 1")
    return {
        "kv_heads": heads,
        "head_dim": plain_dim + rotary_dim,
        "latent_rank": rank,
        "query_rank": read_value(settings, "q_lora_rank", int, 0),
        "rotary_head_dim": rotary_dim,
        "value_head_dim": read_value(settings, "v_head_dim", int),
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


def _read_shared_experts(settings: Settings) -> dict[str, Any]:
    count, width = (read_value(settings, name, int) for name in ("n_shared_experts", "moe_intermediate_size"))
    if count < 1:
        raise Unsupported(f"n_shared_experts={count}: must be at least 1")
    return {"expert_width": width, "shared_expert_width": count * width}


def _write_shared_experts(config: ModelConfig) -> Settings:
    count, rest = divmod(config.shared_expert_width, max(config.expert_width, 1))
    if rest or not count:
        raise Unsupported(
            f"model.shared_expert_width={config.shared_expert_width}: must be a multiple of "
            f"model.expert_width={config.expert_width}"
        )
    return {"n_shared_experts": count, "moe_intermediate_size": config.expert_width}


GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"


def _read_expert_groups(settings: Settings) -> dict[str, Any]:
    method = settings.get("topk_method") or GREEDY
    if method not in (GREEDY, GROUP_LIMITED):
        raise Unsupported(f"topk_method={method!r}: only {GREEDY!r} and {GROUP_LIMITED!r} are supported")
    if method == GREEDY:
        return {"router_groups": 1, "router_groups_per_token": 1}
    groups, chosen = (read_value(settings, name, int) for name in ("n_group", "topk_group"))
    return {"router_groups": groups, "router_groups_per_token": chosen}


def _write_expert_groups(config: ModelConfig) -> Settings:
    groups, chosen = config.router_groups, config.router_groups_per_token
    return {"topk_method": GROUP_LIMITED if groups > 1 else GREEDY, "n_group": groups, "topk_group": chosen}


LATENTS = Codec(_read_latents, _write_latents)
SHARED_EXPERT_SIZES = Codec(_read_shared_experts, _write_shared_experts)
EXPERT_GROUPS = Codec(_read_expert_groups, _write_expert_groups)
