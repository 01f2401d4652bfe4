"""Settings of rotary position embeddings (RoPE)."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxopt_llm.config.metadata import AT_LEAST_ONE, NON_NEGATIVE, POSITIVE, find_out_of_range, setting

# The settings that each kind of scaling reads, in addition to theta, scaling and factor.
READ_BY_SCALING: dict[str, tuple[str, ...]] = {
    "llama3": ("low_frequency_factor", "high_frequency_factor", "original_length"),
    "yarn": (
        *("low_frequency_factor", "high_frequency_factor", "original_length", "attention_factor", "truncate"),
        *("mscale", "mscale_all_dim"),
    ),
    "linear": (),
    "dynamic": ("original_length",),
    "longrope": ("original_length", "attention_factor", "short_factors", "long_factors"),
}


@dataclass(frozen=True)
class RopeConfig:
    theta: float = setting(10_000.0, bounds=POSITIVE)
    """Base of the RoPE frequencies."""
    scaling: Literal["llama3", "yarn", "linear", "dynamic", "longrope"] = "llama3"
    """Scaling of the RoPE frequencies for longer sequences (rope_type). llama3 and yarn interpolate between the two
    bounds below: by the number of turns (Llama 3.1), or by the index of the frequency (YaRN, DeepSeek; published bounds
    1 and 32). linear: divide all frequencies by the factor. dynamic and longrope depend on the length of each document:
    from original_length on, dynamic raises theta with the length (dynamic NTK); longrope divides by long_factors, and
    in shorter documents by short_factors (Phi-3). Each document of a packed row has the frequencies that it has
    alone."""
    factor: float = setting(1.0, bounds=AT_LEAST_ONE)
    """Factor by which low RoPE frequencies are lowered, for sequences this many times longer. longrope only derives
    attention_factor from it. 1 = no scaling, except with dynamic and longrope."""
    low_frequency_factor: float = setting(1.0, bounds=POSITIVE)
    """A frequency with at most this many turns in original_length tokens is lowered by the full factor
    (low_freq_factor; YaRN: beta_slow)."""
    high_frequency_factor: float = 4.0
    """A frequency with at least this many turns in original_length tokens stays unchanged; between the two bounds
    the factor is interpolated (high_freq_factor; YaRN: beta_fast)."""
    original_length: int = setting(8192, bounds=AT_LEAST_ONE)
    """Sequence length before RoPE scaling, in tokens (original_max_position_embeddings; dynamic:
    max_position_embeddings)."""
    attention_factor: float = setting(0.0, bounds=NON_NEGATIVE)
    """With scaling=yarn or longrope: factor of the rotated queries and keys (attention_factor). 0 = as published: yarn
    derives it from factor, mscale and mscale_all_dim; longrope uses √(1 + log(factor) / log(original_length))."""
    truncate: bool = True
    """With scaling=yarn: round the two bounds to whole indices of frequencies (truncate)."""
    short_factors: tuple[float, ...] = ()
    """With scaling=longrope: divisor of each frequency in documents of at most original_length tokens
    (short_factor)."""
    long_factors: tuple[float, ...] = ()
    """With scaling=longrope: divisor of each frequency in longer documents (long_factor)."""
    mscale: float = setting(1.0, bounds=NON_NEGATIVE)
    """With scaling=yarn: rotated queries and keys are multiplied by (1 + 0.1 × mscale × log(factor)) /
    (1 + 0.1 × mscale_all_dim × log(factor)) (DeepSeek: mscale)."""
    mscale_all_dim: float = setting(0.0, bounds=NON_NEGATIVE)
    """With scaling=yarn: attention scores are multiplied by the square of 1 + 0.1 × mscale_all_dim ×
    log(factor) (DeepSeek: mscale_all_dim)."""

    @property
    def by_length(self) -> bool:
        """Dependence of the frequencies on the length of a document."""
        return self.scaling in ("dynamic", "longrope")

    @property
    def is_scaled(self) -> bool:
        """Difference of the embedding from one without scaling."""
        attention_factor = self.attention_factor if self.scaling == "yarn" else 0.0
        return self.factor != 1 or self.by_length or attention_factor not in (0, 1)

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys, which keeps attention as sharp over longer sequences."""
        if self.scaling == "yarn":
            return self.attention_factor or self.yarn_factor(self.mscale) / self.yarn_factor(self.mscale_all_dim)
        if self.scaling == "longrope":
            derived = math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
            return self.attention_factor or derived
        return 1.0

    def yarn_factor(self, mscale: float) -> float:
        """Return YaRN's attention factor (Peng et al. 2023, section 3.4). mscale: DeepSeek's weight of it."""
        return 1 + 0.1 * mscale * math.log(self.factor)

    def same_frequencies(self, length: int, other: int) -> bool:
        """Return whether documents of two lengths have the same frequencies."""
        if self.scaling == "longrope":
            return (length > self.original_length) == (other > self.original_length)
        return self.scaling != "dynamic" or max(length, self.original_length) == max(other, self.original_length)

    def problems(self, rotary_dim: int) -> list[str]:
        """Find problems. rotary_dim: size of the part of a head that is rotated."""
        found = find_out_of_range("model.rope", self)
        if self.scaling == "yarn" and not self.theta > 1:
            found.append(f"model.rope.theta={self.theta}: must be above 1 with model.rope.scaling=yarn")
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if high <= low:
            found.append(f"model.rope.high_frequency_factor={high}: must exceed model.rope.low_frequency_factor={low}")
        if self.scaling == "dynamic" and rotary_dim <= 2:
            found.append(f"model.rope.scaling=dynamic: needs more than the {rotary_dim} rotated values of a head")
        return found + (self._longrope_problems(rotary_dim // 2) if self.scaling == "longrope" else [])

    def _longrope_problems(self, pairs: int) -> list[str]:
        found = []
        for name, factors in (("short_factors", self.short_factors), ("long_factors", self.long_factors)):
            if len(factors) != pairs:
                problem = f"{len(factors)} values; scaling=longrope needs one for each of the {pairs} frequencies"
                found.append(f"model.rope.{name}: {problem}")
            elif not all(factor > 0 for factor in factors):
                found.append(f"model.rope.{name}: {min(factors)} must be above 0")
        if self.original_length < 2:
            found.append(f"model.rope.original_length={self.original_length}: must be at least 2 with scaling=longrope")
        return found
