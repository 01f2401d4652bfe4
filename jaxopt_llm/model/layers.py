"""The small layers of a decoder. Letters: B batch, S sequence, D width, H heads, K head size, F MLP width."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxopt_llm.model import weights
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.intermediates import Intermediate, tag
from jaxopt_llm.model.param import ParamSpec, normal, ones, zeros
from jaxopt_llm.model.weights import Weight

# The backward computes what is elementwise again from its operands, whatever the rematerialisation policy: what it
# would keep, several arrays of the operands' size, costs more to write and read. A product inside is not computed
# again: its own backward wants its operands alone, which is why what feeds a product is recomputed together with it.
# A weight that is kept is not gathered again.
recomputed = functools.partial(
    jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.save_only_these_names(weights.KEPT)
)

Function = Callable[[jax.Array], jax.Array]


# --- norms


def norm_specs(
    kind: Literal["rms", "layer"], zero_centered: bool, shape: tuple[int, ...], axes: tuple[str, ...]
) -> dict[str, ParamSpec]:
    scale = {"scale": ParamSpec(shape, axes, (), zeros if zero_centered else ones)}
    return scale if kind == "rms" else scale | {"bias": ParamSpec(shape, axes, (), zeros)}


def norm(
    params: dict[str, Weight], x: jax.Array, *, kind: Literal["rms", "layer"], epsilon: float, zero_centered: bool
) -> jax.Array:
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) or LayerNorm (Ba et al. 2016, arXiv:1607.06450), in float32.

    x: [B, S, ...], normed over as many of its last dimensions as the scale has.
    zero_centered: the scale is kept as its distance from 1: near it 16 bits then round less.
    """

    @recomputed
    def run(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
        wide, params = x.astype(jnp.float32), {name: each.astype(jnp.float32) for name, each in params.items()}
        dims = tuple(range(-params["scale"].ndim, 0))
        if kind == "layer":
            wide = wide - jnp.mean(wide, dims, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, dims, keepdims=True) + epsilon)
        wide = wide * (1 + params["scale"] if zero_centered else params["scale"])
        return (wide + params["bias"] if kind == "layer" else wide).astype(x.dtype)

    return run(x, {name: weights.materialise(each) for name, each in params.items()})


# --- rotary positions


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

    frequencies: radians per token of each pair, float32 [K/2]; magnitude: multiplies what is turned.
    adjacent: whether neighbours are paired, as in DeepSeek's checkpoints, in place of halves, as in Llama's. What is
        turned has its halves paired in any case: of queries and keys alike, their products are the same.
    """

    frequencies: np.ndarray
    magnitude: float = 1.0
    adjacent: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> "Rotary":
        yarn = config.rope_scaling == "yarn"
        magnitude = yarn_growth(config, config.rope_mscale) / yarn_growth(config, config.rope_mscale_all_dim)
        return cls(rotary_frequencies(config), magnitude if yarn else 1.0, adjacent=config.latent_rank > 0)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """x: [B, S, H, K]; positions: int [B, S]."""
        angles = positions[..., None].astype(jnp.float32) * self.frequencies  # [B, S, K/2]
        cos, sin = (self.magnitude * each(angles)[:, :, None] for each in (jnp.cos, jnp.sin))
        wide = x.astype(jnp.float32)
        if self.adjacent:
            x1, x2 = (jax.lax.slice_in_dim(wide, first, None, stride=2, axis=-1) for first in (0, 1))
        else:
            x1, x2 = jnp.split(wide, 2, axis=-1)
        return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per token of each pair, float32 [K/2], scaled as Llama 3.1 does (Grattafiori et al. 2024,
    arXiv:2407.21783) or as YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2)."""
    half = config.turned_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half) / half)
    low, high = config.rope_low_frequency_factor, config.rope_high_frequency_factor
    if config.rope_scaling == "yarn":
        # The pairs that turn so often in the original length, in whole numbers as all implementations have them.
        first, last = (
            half * math.log(config.rope_original_length / (turns * 2 * math.pi)) / math.log(config.rope_theta)
            for turns in (high, low)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * half - 1)
        unscaled = 1 - np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0, 1)
    else:
        turns = config.rope_original_length * frequencies / (2 * math.pi)
        unscaled = np.clip((turns - low) / (high - low), 0, 1)  # share of the frequency that stays as it is
    return (frequencies * (unscaled + (1 - unscaled) / config.rope_factor)).astype(np.float32)


def yarn_growth(config: ModelConfig, mscale: float) -> float:
    """What YaRN multiplies by, that attention stays as sharp over longer sequences (its section 3.4; DeepSeek's mscale
    weighs it)."""
    return 1 + 0.1 * mscale * math.log(config.rope_factor)


def score_scale(config: ModelConfig) -> float:
    """What multiplies the attention scores."""
    scale = config.attention_scale or 1 / math.sqrt(config.head_dim)
    return scale * yarn_growth(config, config.rope_mscale_all_dim) ** 2 if config.rope_scaling == "yarn" else scale


# --- projections


def with_biases(specs: dict[str, ParamSpec], *names: str) -> dict[str, ParamSpec]:
    """The specs, and a bias for each named projection: of its output's dimensions, split as they are."""

    def bias(spec: ParamSpec) -> ParamSpec:
        dims = [dim for dim in range(len(spec.shape)) if dim not in spec.contracting]
        return ParamSpec(tuple(spec.shape[dim] for dim in dims), tuple(spec.axes[dim] for dim in dims), (), zeros)

    return specs | {f"{name}_bias": bias(specs[name]) for name in names}


def project(subscripts: str, x: jax.Array, params: dict[str, Weight], name: str) -> jax.Array:
    """The product of x and a projection, and its bias added where it has one."""
    y = weights.einsum(subscripts, x, params[name])
    if f"{name}_bias" not in params:
        return y
    # In float32 for the backward: the bias's gradient sums over thousands of positions.
    return (y.astype(jnp.float32) + weights.materialise(params[f"{name}_bias"]).astype(jnp.float32)).astype(y.dtype)


# --- MLP


def gelu(x: jax.Array) -> jax.Array:
    """The tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415), in float32: from 256 on its x² leaves float16's range,
    and a gradient of 0 would be NaN."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


INWARD: dict[str, Intermediate] = {"gate": "mlp_gate", "up": "mlp_up"}
# From the projections of norm(x), gate before up, to what `down` multiplies (Shazeer 2020, arXiv:2002.05202).
HIDDEN: dict[str, Callable[..., jax.Array]] = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "gelu": gelu,
}


def mlp_specs(
    kind: Literal["swiglu", "geglu", "gelu"], width: int, mlp_width: int, residual_scale: float, biased: bool
) -> dict[str, ParamSpec]:
    inward = ParamSpec((width, mlp_width), ("embed", "mlp"), (0,), normal())
    outward = ParamSpec((mlp_width, width), ("mlp", "embed"), (0,), normal(residual_scale))
    specs = ({} if kind == "gelu" else {"gate": inward}) | {"up": inward, "down": outward}
    return with_biases(specs, *specs) if biased else specs


def mlp(params: dict[str, Weight], x: jax.Array, context: Context, *, norm: Function, kind: str) -> jax.Array:
    """The MLP of norm(x). x: [B, S, D] -> [B, S, D]."""

    @recomputed
    def inward(x: jax.Array) -> list[jax.Array]:
        x = tag(context.placement.enter(norm(x)), "mlp_input")
        hidden = {name: project("BSD,DF->BSF", x, params, name) for name in INWARD if name in params}
        return [
            tag(context.placement.constrain(each, "batch", "sequence", "mlp"), INWARD[name])
            for name, each in hidden.items()
        ]

    @recomputed
    def outward(*projected: jax.Array) -> jax.Array:
        return context.placement.leave(project("BSF,FD->BSD", HIDDEN[kind](*projected), params, "down"))

    return tag(outward(*inward(x)), "mlp_output")
