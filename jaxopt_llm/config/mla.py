"""Settings of multi-head latent attention (MLA)."""

from dataclasses import dataclass

from jaxopt_llm.config.metadata import AT_LEAST_ONE, NON_NEGATIVE, find_out_of_range, setting


@dataclass(frozen=True)
class MLAConfig:
    kv_rank: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """Size of the latent vector from which keys and values are projected (multi-head latent attention, MLA, of
    DeepSeek-V2: kv_lora_rank). Generation caches only this vector and rotary_head_dim values per token. 0 = keys and
    values are projected from the residual stream."""
    query_rank: int = setting(0, resume="never", bounds=NON_NEGATIVE)
    """With kv_rank: size of the latent vector from which queries are projected (q_lora_rank). 0 = queries are projected
    from the residual stream."""
    rotary_head_dim: int = setting(16, resume="never", bounds=AT_LEAST_ONE)
    """With kv_rank: size of the last part of each query and key head, the only one that RoPE rotates. All heads share
    one key for it (qk_rope_head_dim)."""
    value_head_dim: int = setting(32, resume="never", bounds=AT_LEAST_ONE)
    """With kv_rank: size of each value head (v_head_dim)."""

    def problems(self, head_dim: int) -> list[str]:
        """List the errors in this section. head_dim: size of each query and key head."""
        found = find_out_of_range("model.mla", self)
        size = self.rotary_head_dim
        if self.kv_rank and (size >= head_dim or size % 2):
            found.append(f"model.mla.rotary_head_dim={size}: must be even and below model.head_dim={head_dim}")
        return found
