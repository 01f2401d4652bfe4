"""Norms, projections and MLPs of a decoder.

Letters: B batch, S sequence, D width, F MLP width.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxopt_llm.model.context import Context
from jaxopt_llm.model.linear import projections, weights
from jaxopt_llm.model.linear.weights import Weight
from jaxopt_llm.model.param import ParamSpec, constant, normal, ones, zeros
from jaxopt_llm.parallel.activations import all_gather_sequence, multiply_tokens, reduce_scatter_sequence
from jaxopt_llm.parallel.placement import Placement, constrain, mark

_KEPT = jax.checkpoint_policies.save_only_these_names(weights.GATHERED_NAME, projections.LOW_RANK_NAME)
F = TypeVar("F", bound=Callable[..., Any])


def recomputed(function: F) -> F:
    """Let the backward recompute the elementwise operations of a function from their operands, under any remat policy.

    Otherwise it would keep several arrays of the operands' size, and writing and reading them costs more than
    computing. A matmul inside is not recomputed: its own backward needs only its operands. This is why the operations
    that feed a matmul are recomputed together with it. A gathered weight that is kept is not gathered again.
    """
    return jax.checkpoint(function, prevent_cse=False, policy=_KEPT)  # type: ignore[return-value]


def recomputed_apart(function: F) -> F:
    """Let the backward recompute an elementwise function where XLA would read what the forward made of it.

    XLA computes something once if the forward and the backward of a layer are in one program without loops. The
    backward here multiplies the operands with a 1 behind a barrier, which makes another computation of the same values.
    A barrier around the operands would copy them out of the stacks of a loop.
    """

    @jax.custom_vjp
    def call(*arguments: jax.Array) -> jax.Array:
        return function(*arguments)

    def backward(arguments: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
        one = jax.lax.optimization_barrier(jnp.ones((), dy.dtype))
        return jax.vjp(function, *(one * each for each in arguments))[1](dy)

    call.defvjp(lambda *arguments: (function(*arguments), arguments), backward)
    return functools.wraps(function)(call)  # type: ignore[return-value]


Function = Callable[[jax.Array], jax.Array]


# --- norms


def norm_specs(kind: str, zero_centered: bool, shape: tuple[int, ...], axes: tuple[str, ...]) -> dict[str, ParamSpec]:
    scale = {"scale": ParamSpec(shape, axes, (), zeros if zero_centered else ones)}
    return scale | {"bias": ParamSpec(shape, axes, (), zeros)} if kind == "layer" else scale


def norm(params: dict[str, Weight], x: jax.Array, *, kind: str, epsilon: float, zero_centered: bool) -> jax.Array:
    """Apply RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) or LayerNorm (Ba et al. 2016, arXiv:1607.06450).

    It computes in float32.

    x: [B, S, ...], normalised over its last dimensions, which are those of the scale; without a scale, over the last.
    kind: see ModelConfig.norm.
    zero_centered: the parameter is scale - 1, which 16 bits round less near a scale of 1.
    """

    @recomputed
    def run(x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
        wide, params = x.astype(jnp.float32), {name: param.astype(jnp.float32) for name, param in params.items()}
        dims = tuple(range(-params["scale"].ndim, 0)) if params else (-1,)
        if kind != "rms":
            wide = wide - jnp.mean(wide, dims, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, dims, keepdims=True) + epsilon)
        if params:
            wide = wide * (1 + params["scale"] if zero_centered else params["scale"])
        return (wide + params["bias"] if "bias" in params else wide).astype(x.dtype)

    return run(x, {name: weights.materialise(param) for name, param in params.items()})


# --- projections


def with_biases(specs: dict[str, ParamSpec], *names: str) -> dict[str, ParamSpec]:
    """Return the specs with a bias for each named projection, which has the dimensions and axes of the output."""

    def bias(spec: ParamSpec) -> ParamSpec:
        dims = [dim for dim in range(len(spec.shape)) if dim not in spec.contracting]
        return ParamSpec(tuple(spec.shape[dim] for dim in dims), tuple(spec.axes[dim] for dim in dims), (), zeros)

    return specs | {f"{name}_bias": bias(specs[name]) for name in names}


def project(subscripts: str, x: jax.Array, params: dict[str, Weight], name: str, placement: Placement) -> jax.Array:
    """Multiply x [B, S, ...] with a projection, and add its bias if it has one."""
    return project_all(x, params, {name: subscripts}, placement)[0]


def project_all(
    x: jax.Array, params: dict[str, Weight], products: dict[str, str], placement: Placement
) -> list[jax.Array]:
    """Apply several projections to x [B, S, ...]. Adapters share products with x.

    products: subscripts by the name of the projection, in the order of the results.
    """

    def multiply(x: jax.Array) -> list[jax.Array]:
        ys = projections.einsum_all([*products.values()], x, [params[name] for name in products])
        return [_add_bias(y, params, name) for name, y in zip(products, ys, strict=True)]

    return multiply_tokens(multiply, x, placement)


def _add_bias(y: jax.Array, params: dict[str, Weight], name: str) -> jax.Array:
    if f"{name}_bias" not in params:
        return y
    # In float32 for the backward: the bias's gradient sums over thousands of positions.
    return (y.astype(jnp.float32) + weights.materialise(params[f"{name}_bias"]).astype(jnp.float32)).astype(y.dtype)


# --- MLP


def gelu(x: jax.Array) -> jax.Array:
    """Apply the tanh approximation of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415) in float32.

    In float16, x² would overflow from x = 256 on, and a gradient of 0 would become NaN.
    """
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def xielu(x: jax.Array, alpha_p: jax.Array, alpha_n: jax.Array) -> jax.Array:
    """Apply xIELU (Huang & Schlag 2024, arXiv:2411.13010) in float32: a quadratic above 0, and an exponential below.

    alpha_p, alpha_n: [1], learned; softplus keeps the curve monotone. The classes of transformers use the exponential
    up to XIELU_EPSILON in place of 0, which changes values by at most 1e-6 × the factor, and the slope in between.
    """
    wide, alpha_p, alpha_n = (array.astype(jnp.float32) for array in (x, alpha_p, alpha_n))
    above, below = jnp.maximum(wide, 0), jnp.minimum(wide, 0)  # without a choice, which would multiply inf by 0
    quadratic = jax.nn.softplus(alpha_p) * above * above
    exponential = (XIELU_BETA + jax.nn.softplus(alpha_n)) * (jnp.expm1(below) - below)
    return (quadratic + exponential + XIELU_BETA * wide).astype(x.dtype)


XIELU_BETA, XIELU_EPSILON = 0.5, -1e-6  # as published; BETA is the slope at 0


def clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Apply the gated activation of gpt-oss (OpenAI 2025, arXiv:2508.10925), in float32."""
    wide = jnp.minimum(gate.astype(jnp.float32), SWIGLU_LIMIT)
    shifted = jnp.clip(up.astype(jnp.float32), -SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    return (wide * jax.nn.sigmoid(SWIGLU_ALPHA * wide) * shifted).astype(up.dtype)


SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702  # both published models have these
INPUT_PROJECTIONS = ("gate", "up")
# Initial values of what an activation learns, which it takes after the projections: softplus gives 0.8, 0.8 - beta.
ACTIVATION_PARAMETERS = {
    "xielu": {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.8 - XIELU_BETA))}
}
# Functions of the input projections of norm(x), gate before up; `down` multiplies the result (Shazeer 2020,
# arXiv:2002.05202).
ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "clamped_swiglu": clamped_swiglu,
    "gelu": gelu,
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
    "xielu": xielu,
}


def mlp_specs(
    width: int, mlp_width: int, residual_scale: float, *, has_gate: bool, biased: bool
) -> dict[str, ParamSpec]:
    inward = ParamSpec((width, mlp_width), ("embed", "mlp"), (0,), normal())
    outward = ParamSpec((mlp_width, width), ("mlp", "embed"), (0,), normal(residual_scale))
    specs = ({"gate": inward} if has_gate else {}) | {"up": inward, "down": outward}
    return with_biases(specs, *specs) if biased else specs


def activation_specs(kind: str) -> dict[str, ParamSpec]:
    """Return the learned values of an activation."""
    values = ACTIVATION_PARAMETERS.get(kind, {})
    return {name: ParamSpec((1,), (None,), (), constant(value)) for name, value in values.items()}


def mlp(
    params: dict[str, Weight],
    x: jax.Array,
    context: Context,
    *,
    norm: Function,
    kind: str,
    name: str = "mlp",
    up: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Apply the MLP to norm(x). x: [B, S, D] -> [B, S, D].

    name: start of the names of its intermediates. up: [B, S, F], in place of the projection; (): there is one.
    """

    @recomputed
    def project_in(x: jax.Array) -> list[jax.Array]:
        x = all_gather_sequence(norm(x), context.placement)
        x = mark(x, f"{name}_input", "input", "batch", "sequence", "embed")
        products = {each: "BSD,DF->BSF" for each in INPUT_PROJECTIONS if each in params}
        return [
            constrain(context.placement, array, f"{name}_{each}", "product", "batch", "sequence", "mlp")
            for each, array in zip(products, project_all(x, params, products, context.placement), strict=True)
        ]

    activation = ACTIVATIONS[kind]
    if context.placement.precision.matmul == "fp8":
        # Two kernels of the forward read the result: one finds its largest magnitude, one makes its codes. XLA would
        # keep silu(gate) for both, and for the backward.
        activation = recomputed_apart(activation)

    @recomputed
    def project_out(*projected: jax.Array) -> jax.Array:
        hidden = activation(*projected)
        return reduce_scatter_sequence(
            project("BSF,FD->BSD", hidden, params, "down", context.placement), context.placement
        )

    learned = [weights.materialise(params[each]) for each in ACTIVATION_PARAMETERS.get(kind, {})]
    out = project_out(*project_in(x), *up, *learned)
    return mark(out, f"{name}_output", "product", "batch", "residual_sequence", "embed")
