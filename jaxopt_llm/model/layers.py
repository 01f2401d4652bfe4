"""The small layers of a decoder. Letters: B batch, S sequence, D width, H heads, K head size, F MLP width."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxopt_llm.model import weights
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.model.weights import Weight

# The backward computes what is elementwise again from its operands, whatever the rematerialisation policy: what it
# would keep, several arrays of the operands' size, costs more to write and read. A product inside is not computed
# again: its own backward wants its operands alone, which is why what feeds a product is recomputed together with it.
# A weight that is kept is not gathered again.
recomputed = functools.partial(
    jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.save_only_these_names(weights.KEPT)
)


def rms_norm(x: jax.Array, scale: Weight, epsilon: float) -> jax.Array:
    """Zhang & Sennrich 2019 (arXiv:1910.07467), in float32. x: [B, S, D], scale: [D]."""

    @recomputed
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
        return (wide * scale.astype(jnp.float32)).astype(x.dtype)

    return norm(x, weights.materialise(scale))


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves paired as in Llama's checkpoints.

    x: [B, S, H, K]; positions: int [B, S].
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[..., None].astype(jnp.float32) * frequencies  # [B, S, K/2]
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def swiglu_specs(width: int, mlp_width: int, residual_scale: float) -> dict[str, ParamSpec]:
    return {
        "gate": ParamSpec((width, mlp_width), ("embed", "mlp"), (0,), normal()),
        "up": ParamSpec((width, mlp_width), ("embed", "mlp"), (0,), normal()),
        "down": ParamSpec((mlp_width, width), ("mlp", "embed"), (0,), normal(residual_scale)),
    }


def swiglu(params: dict[str, Weight], norm: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Shazeer 2020 (arXiv:2002.05202), of norm(x). x: [B, S, D]."""

    @recomputed
    def project(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = norm(x)
        return weights.einsum("BSD,DF->BSF", x, params["gate"]), weights.einsum("BSD,DF->BSF", x, params["up"])

    @recomputed
    def down(gate: jax.Array, up: jax.Array, weight: Weight) -> jax.Array:
        return weights.einsum("BSF,FD->BSD", jax.nn.silu(gate) * up, weight)

    return down(*project(x), params["down"])
