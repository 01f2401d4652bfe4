"""Codecs for DeepSeek-V2 and V3: MLA, shared experts and expert groups. See codecs.py."""

from typing import Any

from jaxopt_llm.checkpoint.huggingface.codecs import NEEDS, Codec, Settings, Unsupported, read_value, unsupported
from jaxopt_llm.config import ModelConfig


def _read_latents(settings: Settings) -> dict[str, Any]:
    heads = read_value(settings, "num_attention_heads", int)
    kv_heads = read_value(settings, "num_key_value_heads", int, heads)
    if kv_heads != heads:
        problem = f"only num_attention_heads={heads} is read; the model would need latents that heads share in groups"
        raise unsupported(f"num_key_value_heads={kv_heads}", problem)
    plain_dim, rotary_dim = (read_value(settings, f"qk_{part}_head_dim", int) for part in ("nope", "rope"))
    return {
        "kv_heads": heads,
        "head_dim": plain_dim + rotary_dim,
        "mla.kv_rank": read_value(settings, "kv_lora_rank", int, minimum=1),
        "mla.query_rank": read_value(settings, "q_lora_rank", int, 0),
        "mla.rotary_head_dim": rotary_dim,
        "mla.value_head_dim": read_value(settings, "v_head_dim", int),
    }


def _write_latents(config: ModelConfig) -> Settings:
    return {
        "num_key_value_heads": config.kv_heads,
        "kv_lora_rank": config.mla.kv_rank,
        "q_lora_rank": config.mla.query_rank or None,
        "qk_nope_head_dim": config.key_dim,
        "qk_rope_head_dim": config.rotary_dim,
        "v_head_dim": config.value_dim,
    }


def _read_shared_experts(settings: Settings) -> dict[str, Any]:
    count = read_value(settings, "n_shared_experts", int, minimum=1)
    width = read_value(settings, "moe_intermediate_size", int)
    return {"moe.expert_width": width, "moe.shared_expert_width": count * width}


def _write_shared_experts(config: ModelConfig) -> Settings:
    count, rest = divmod(config.moe.shared_expert_width, max(config.moe.expert_width, 1))
    if rest or not count:
        raise Unsupported(
            f"model.moe.shared_expert_width={config.moe.shared_expert_width}: must be a multiple of "
            f"model.moe.expert_width={config.moe.expert_width}"
        )
    return {"n_shared_experts": count, "moe_intermediate_size": config.moe.expert_width}


GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"


def _read_expert_groups(settings: Settings) -> dict[str, Any]:
    method = settings.get("topk_method") or GREEDY
    if method not in (GREEDY, GROUP_LIMITED):
        problem = f"only {GREEDY!r} and {GROUP_LIMITED!r} are read; the model would need {NEEDS['topk_method']}"
        raise unsupported(f"topk_method={method!r}", problem)
    if method == GREEDY:
        return {"moe.router_groups": 1, "moe.router_groups_per_token": 1}
    groups, chosen = (read_value(settings, name, int) for name in ("n_group", "topk_group"))
    return {"moe.router_groups": groups, "moe.router_groups_per_token": chosen}


def _write_expert_groups(config: ModelConfig) -> Settings:
    groups, chosen = config.moe.router_groups, config.moe.router_groups_per_token
    return {"topk_method": GROUP_LIMITED if groups > 1 else GREEDY, "n_group": groups, "topk_group": chosen}


LATENTS = Codec(_read_latents, _write_latents)
SHARED_EXPERT_SIZES = Codec(_read_shared_experts, _write_shared_experts)
EXPERT_GROUPS = Codec(_read_expert_groups, _write_expert_groups)
