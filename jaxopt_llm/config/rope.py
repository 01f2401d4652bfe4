"""Settings of rotary position embeddings (RoPE)."""

from dataclasses import dataclass
from typing import Literal

from jaxopt_llm.config.metadata import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, find_out_of_range, setting


@dataclass(frozen=True)
class RopeConfig:
    theta: float = setting(10_000.0, bounds=POSITIVE)
    """Base of the RoPE frequencies."""
    scaling: Literal["llama3", "yarn"] = "llama3"
    """Interpolation with which rope.factor lowers the RoPE frequencies between the two bounds below. llama3: by the
    number of turns (Llama 3.1); yarn: by the index of the frequency (YaRN, DeepSeek; published bounds 1 and 32)."""
    factor: float = setting(1.0, bounds=AT_LEAST_ONE)
    """Factor by which low RoPE frequencies are lowered, for sequences this many times longer. 1 = no scaling."""
    low_frequency_factor: float = setting(1.0, bounds=POSITIVE)
    """A frequency with at most this many turns in original_length tokens is lowered by the full factor
    (low_freq_factor; YaRN: beta_slow)."""
    high_frequency_factor: float = 4.0
    """A frequency with at least this many turns in original_length tokens stays unchanged; between the two bounds
    the factor is interpolated (high_freq_factor; YaRN: beta_fast)."""
    original_length: int = setting(8192, bounds=AT_LEAST_ONE)
    """Sequence length before RoPE scaling, in tokens (original_max_position_embeddings)."""
    mscale: float = setting(1.0, bounds=NON_NEGATIVE)
    """With scaling=yarn: rotated queries and keys are multiplied by (1 + 0.1 × mscale × log(factor)) /
    (1 + 0.1 × mscale_all_dim × log(factor)) (DeepSeek: mscale)."""
    mscale_all_dim: float = setting(0.0, bounds=NON_NEGATIVE)
    """With scaling=yarn: attention scores are multiplied by the square of 1 + 0.1 × mscale_all_dim ×
    log(factor) (DeepSeek: mscale_all_dim)."""

    def problems(self) -> list[str]:
        found = find_out_of_range("model.rope", self)
        if self.scaling == "yarn" and not self.theta > 1:
            found.append(f"model.rope.theta={self.theta}: must be above 1 with model.rope.scaling=yarn")
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if high <= low:
            found.append(f"model.rope.high_frequency_factor={high}: must exceed model.rope.low_frequency_factor={low}")
        return found
