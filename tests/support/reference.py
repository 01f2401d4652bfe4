"""Float64 NumPy decoder with a hand-written backward: the ground truth of the trainer's tests.

Every operation returns its value and a `backward`, which maps the gradient of the value to the gradients of the array
arguments, in order. This module shares no code with the trainer, so that a mistake in one is not repeated in the other.

Shapes: B batch, S query position, T key position, D width, H heads, G kv heads, R = H // G, K head_dim, F mlp width,
V vocabulary, VP >= V rows of the padded tables.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Tree = dict[str, Any]  # nested dictionaries of arrays


@dataclass(frozen=True)
class ReferenceConfig:
    vocabulary_size: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    rope_theta: float
    norm_epsilon: float
    layout: tuple[tuple[tuple[str, ...], int], ...]  # segments of (kinds of the period's blocks, repeats)
    positions: str = "rotary"
    kv_rank: int = 0
    query_rank: int = 0
    rotary_head_dim: int = 0
    rope_sliding_theta: float = 0.0
    rope_size: int = 0
    rope_rotated_pairs: int = 0
    rope_interleaved: bool = False
    rope_query_growth: float = 0.0
    rope_growth_layers: str = "rotary"
    rope_growth_length: int = 0
    rope_scaling: str = "llama3"
    rope_mscale: float = 1.0
    rope_mscale_all_dim: float = 0.0
    rope_factor: float = 1.0
    rope_low_frequency_factor: float = 1.0
    rope_high_frequency_factor: float = 4.0
    rope_original_length: int = 8192
    rope_attention_factor: float = 0.0
    rope_truncate: bool = True
    rope_short_factors: tuple[float, ...] = ()
    rope_long_factors: tuple[float, ...] = ()
    norm: str = "rms"
    norm_placement: str = "pre"
    norm_zero_centered: bool = False
    qk_norm: str = "none"
    value_norm: bool = False
    biases: str = "none"
    mlp: str = "swiglu"
    parallel_block: bool = False
    attention_gate: str = "none"
    attention_scale: float = 0.0
    attention_sinks: bool = False
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    layer_scales: bool = False
    own_norms: bool = False
    expert_scales: bool = False
    global_head_dim: int = 0
    global_kv_heads: int = 0
    values_from_keys: bool = False
    layer_input_size: int = 0
    experts: int = 0
    experts_per_token: int = 2
    router: str = "softmax"
    router_weighs: str = "outputs"
    router_renormalises: bool = True
    router_scale: float = 1.0
    balance_loss: float = 0.01
    router_z_loss: float = 0.0
    router_groups: int = 1
    router_groups_per_token: int = 1
    capacity_factor: float = 0.0
    mtp_layers: int = 0
    mtp_kinds: tuple[str, ...] = ()  # of the block of each MTP module
    mtp_weight: float = 0.0


@dataclass
class Passed:
    """An array that passes beside the residual stream to the layers that read it, and the sum of their gradients."""

    value: Array
    gradient: Array | float = 0.0


def tree_map(function: Callable[[Array], Array], tree: Tree) -> Tree:
    return {k: tree_map(function, v) if isinstance(v, dict) else function(v) for k, v in tree.items()}


def contract(spec: str, a: Array, b: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """Compute an einsum of two arrays. Each index must be in two or all three of the terms."""
    a_axes, b_axes, out_axes = spec.replace("->", ",").split(",")

    def backward(d_out: Array) -> tuple[Array, Array]:
        d_a = np.einsum(f"{out_axes},{b_axes}->{a_axes}", d_out, b, optimize=True)
        d_b = np.einsum(f"{a_axes},{out_axes}->{b_axes}", a, d_out, optimize=True)
        return d_a, d_b

    return np.einsum(spec, a, b, optimize=True), backward


def project(spec: str, x: Array, weights: Tree, name: str, biased: bool) -> tuple[Array, Callable]:
    out, contract_backward = contract(spec, x, weights[name])

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_x, d_weight = contract_backward(d_out)
        return d_x, {name: d_weight} | ({f"{name}_bias": d_out.sum(axis=(0, 1))} if biased else {})

    return out + (weights[f"{name}_bias"] if biased else 0), backward


def norm(x: Array, weights: Tree, config: ReferenceConfig) -> tuple[Array, Callable[[Array], tuple[Array, Tree]]]:
    """Normalise x [B, S, ...] over its last dimensions, as many as the scale has."""
    axes = tuple(range(x.ndim - weights["scale"].ndim, x.ndim))
    others = tuple(range(axes[0]))

    def mean(x: Array) -> Array:
        return np.mean(x, axis=axes, keepdims=True)

    centred = x if config.norm == "rms" else x - mean(x)
    inverse = 1 / np.sqrt(mean(centred**2) + config.norm_epsilon)
    normed = centred * inverse
    scale = weights["scale"] + (1 if config.norm_zero_centered else 0)

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_normed = d_out * scale
        d_x = inverse * (d_normed - normed * mean(d_normed * normed))
        d_weights = {"scale": np.sum(d_out * normed, axis=others)}
        if config.norm == "layer":
            d_weights["bias"] = np.sum(d_out, axis=others)
        return d_x if config.norm == "rms" else d_x - mean(d_x), d_weights

    return normed * scale + (weights["bias"] if config.norm == "layer" else 0), backward


def norm_if(present: bool, name: str, x: Array, weights: Tree, config: ReferenceConfig) -> tuple[Array, Callable]:
    """Return the norm with this name, or x unchanged. The backward returns the gradient under this name."""
    if not present:
        return x, lambda d_out: (d_out, {})
    out, norm_backward = norm(x, weights[name], config)

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_x, d_weights = norm_backward(d_out)
        return d_x, {name: d_weights}

    return out, backward


def softcap(x: Array, cap: float) -> tuple[Array, Callable[[Array], Array]]:
    """Apply a soft cap; 0 means no cap."""
    if not cap:
        return x, lambda d_out: d_out
    tanh = np.tanh(x / cap)
    return cap * tanh, lambda d_out: d_out * (1 - tanh**2)


def rotary_angles(config: ReferenceConfig, segment_ids: Array, positions: Array) -> Array:
    """Return the angles of each token's pairs, [B, S, K/2], with the frequencies that its document has alone."""
    rows = []
    for row_ids, row_positions in zip(segment_ids, positions, strict=True):
        for segment, position in zip(row_ids, row_positions, strict=True):
            length = row_positions[row_ids == segment].max() + 1
            rows.append(position * rotary_frequencies(config, length))
    return np.array(rows).reshape(*positions.shape, -1)


def rotary_magnitude(config: ReferenceConfig) -> float:
    """Return the factor of rotated queries and keys."""
    if config.rope_scaling not in ("yarn", "longrope"):
        return 1.0
    if config.rope_attention_factor:
        return config.rope_attention_factor
    if config.rope_scaling == "longrope":
        return np.sqrt(1 + np.log(config.rope_factor) / np.log(config.rope_original_length))
    above, below = (1 + m * np.log(config.rope_factor) / 10 for m in (config.rope_mscale, config.rope_mscale_all_dim))
    return above / below


def rotary_frequencies(config: ReferenceConfig, length: int) -> Array:
    """Return radians per token of each pair, [K/2]. length: tokens of the document."""
    frequencies = np.array(scaled_frequencies(config, length))
    if config.rope_rotated_pairs:
        frequencies[config.rope_rotated_pairs :] = 0
    return frequencies


def scaled_frequencies(config: ReferenceConfig, length: int) -> Array:
    """Return radians per token of each pair, [K/2], scaled case by case as in transformers, if all pairs rotate."""
    size = config.rotary_head_dim if config.kv_rank else config.rope_size or config.head_dim
    frequencies = config.rope_theta ** (-np.arange(0, size, 2) / size)
    if config.rope_scaling == "linear":
        return frequencies / config.rope_factor
    if config.rope_scaling == "dynamic":
        ratio = max(length, config.rope_original_length) / config.rope_original_length
        theta = config.rope_theta * (config.rope_factor * ratio - config.rope_factor + 1) ** (size / (size - 2))
        return theta ** (-np.arange(0, size, 2) / size)
    if config.rope_scaling == "longrope":
        is_long = length > config.rope_original_length
        factors = config.rope_long_factors if is_long else config.rope_short_factors
        return frequencies / (factors or np.ones(size // 2))
    scaled = []
    if config.rope_scaling == "yarn":

        def pair(turns: float) -> float:
            """Return the fractional index of the pair that makes this many turns."""
            wavelength = config.rope_original_length / turns
            return size / 2 * np.log(wavelength / (2 * np.pi)) / np.log(config.rope_theta)

        first, last = pair(config.rope_high_frequency_factor), pair(config.rope_low_frequency_factor)
        if config.rope_truncate:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        for number, frequency in enumerate(frequencies):
            slowed = min(max((number - first) / (last - first), 0), 1)
            scaled.append(slowed * frequency / config.rope_factor + (1 - slowed) * frequency)
        return np.array(scaled)
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        low = config.rope_original_length / config.rope_low_frequency_factor
        high = config.rope_original_length / config.rope_high_frequency_factor
        if wavelength < high:
            scaled.append(frequency)
        elif wavelength > low:
            scaled.append(frequency / config.rope_factor)
        else:
            smooth = (config.rope_original_length / wavelength - config.rope_low_frequency_factor) / (
                config.rope_high_frequency_factor - config.rope_low_frequency_factor
            )
            scaled.append((1 - smooth) * frequency / config.rope_factor + smooth * frequency)
    return np.array(scaled)


def rotate(x: Array, angles: Array) -> Array:
    """Apply RoPE to x [B, S, heads, K] with angles [B, S, K/2]. The backward is the rotation by -angles."""
    cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]  # [B, S, 1, K/2]
    x1, x2 = np.split(x, 2, axis=-1)
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def rotate_part(x: Array, angles: Array, growth: float, adjacent: bool) -> Array:
    """Apply RoPE to the first part of each head, which has two features for each angle, and scale this part."""
    size = 2 * angles.shape[-1]
    rotated = (rotate_adjacent if adjacent else rotate)(x[..., :size], angles)
    return np.concatenate([growth * rotated, x[..., size:]], axis=-1)


def rotate_adjacent(x: Array, angles: Array) -> Array:
    """Apply RoPE to adjacent elements, as complex numbers."""
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, :, None]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def attend(
    q: Array, k: Array, v: Array, visible: Array, scale: float = 0.0, cap: float = 0.0, sinks: Array | None = None
) -> tuple[Array, Callable[[Array], tuple[Array, ...]]]:
    """Compute softmax attention of q [B, S, H, K] over k [B, T, G, K], v [B, T, G, U] where visible [B, S, T].

    Query head h reads kv head h // R. With sinks [H], each query head has one more score, of a key without a value, and
    the backward also returns its gradient.
    """
    scale = scale or 1 / np.sqrt(q.shape[-1])
    batch, length, heads, head_dim = q.shape
    grouped = (batch, length, k.shape[2], heads // k.shape[2], head_dim)  # B, S, G, R, K
    scores, scores_backward = contract("bsgrk,btgk->bgrst", q.reshape(grouped), k)
    scores, cap_backward = softcap(scores * scale, cap)
    scores = np.where(visible[:, None, None], scores, -np.inf)  # [B, G, R, S, T]
    if sinks is not None:
        column = sinks.reshape(1, *grouped[2:4], 1, 1)
        scores = np.concatenate([scores, np.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))  # the maximum is finite: a token sees itself
    weights /= weights.sum(axis=-1, keepdims=True)
    out, out_backward = contract("bgrst,btgu->bsgru", weights[..., : k.shape[1]], v)

    def backward(d_out: Array) -> tuple[Array, Array, Array]:
        d_weights, d_v = out_backward(d_out.reshape(out.shape))
        d_weights = np.pad(d_weights, [(0, 0)] * 4 + [(0, weights.shape[-1] - k.shape[1])])
        d_scores = weights * (d_weights - np.sum(d_weights * weights, axis=-1, keepdims=True))
        d_q, d_k = scores_backward(cap_backward(d_scores[..., : k.shape[1]]) * scale)
        d_sinks = () if sinks is None else (d_scores[..., -1].sum(axis=(0, 3)).reshape(-1),)
        return d_q.reshape(q.shape), d_k, d_v, *d_sinks

    return out.reshape(batch, length, heads, v.shape[-1]), backward


def latent_attention(
    x: Array, weights: Tree, config: ReferenceConfig, angles: Array, visible: Array
) -> tuple[Array, Callable]:
    """Compute the multi-head latent attention (MLA) of DeepSeek-V2.

    Keys and values come from a latent; one part of each key is shared by all heads. weights: of the whole block.
    """
    projections, tape = weights["attention"], {}
    of_latents = dataclasses.replace(config, norm_epsilon=1e-6)

    def by(name: str, spec: str, x: Array) -> Array:
        out, tape[name] = project(spec, x, projections, name, biased=False)
        return out

    def normed(name: str, x: Array) -> Array:
        out, tape[name] = norm_if(True, name, x, weights, of_latents)
        return out

    growth, of_scores = rotary_magnitude(config), 1.0
    if config.rope_scaling == "yarn":
        of_scores = 1 + config.rope_mscale_all_dim * np.log(config.rope_factor) / 10

    if config.query_rank:
        q = by("query_up", "bsq,qhk->bshk", normed("query_latent_norm", by("query_down", "bsd,dq->bsq", x)))
    else:
        q = by("query", "bsd,dhk->bshk", x)
    latent = normed("latent_norm", by("latent", "bsd,dr->bsr", x))
    own, v = by("key", "bsr,rhn->bshn", latent), by("value", "bsr,rhu->bshu", latent)
    shared = growth * rotate_adjacent(by("rotary_key", "bsd,dp->bsp", x)[:, :, None], angles)  # [B, S, 1, P]
    k = np.concatenate([own, np.repeat(shared, config.heads, axis=2)], axis=-1)
    at = own.shape[-1]
    turned = np.concatenate([q[..., :at], growth * rotate_adjacent(q[..., at:], angles)], axis=-1)
    scale = (config.attention_scale or config.head_dim**-0.5) * of_scores**2
    heads, attend_backward = attend(turned, k, v, visible, scale, config.attention_softcap)
    out = by("output", "bshu,hud->bsd", heads)

    def backward(d_out: Array) -> tuple[Array, Tree]:
        gradients: Tree = {}

        def back(name: str, d: Array) -> Array:
            d_x, found = tape[name](d)
            gradients.update(found)
            return d_x

        d_q, d_k, d_v = attend_backward(back("output", d_out))
        d_shared = growth * rotate_adjacent(d_k[..., at:].sum(axis=2, keepdims=True), -angles)[:, :, 0]
        d_q = np.concatenate([d_q[..., :at], growth * rotate_adjacent(d_q[..., at:], -angles)], axis=-1)
        d_latent = back("latent_norm", back("key", d_k[..., :at]) + back("value", d_v))
        d_x = back("latent", d_latent) + back("rotary_key", d_shared)
        if config.query_rank:
            d_x += back("query_down", back("query_latent_norm", back("query_up", d_q)))
        else:
            d_x += back("query", d_q)
        norms = {name: gradients.pop(name) for name in list(gradients) if name.endswith("_norm")}
        return d_x, {"attention": gradients} | norms

    return out, backward


def attention(
    x: Array, weights: Tree, config: ReferenceConfig, angles: Array, visible: Array, factors: Array, kept: list[Passed]
) -> tuple[Array, Callable]:
    """Compute attention. weights: of the whole block; norms of queries and keys are next to the projections.

    factors: of the queries, [B, S]. kept: keys and values of an earlier layer, which a layer with its own replaces.
    """
    if config.kv_rank:
        return latent_attention(x, weights, config, angles, visible)
    projections = weights["attention"]
    biased, all_biased = config.biases in ("qkv", "attention", "all"), config.biases in ("attention", "all")
    turn = functools.partial(rotate_part, adjacent=config.rope_interleaved)
    q, q_backward = project("bsd,dhk->bshk", x, projections, "query", biased)  # [B, S, H, K]
    growth = rotary_magnitude(config) if angles.any() else 1.0  # 0: a layer without rotation
    grown = factors[..., None, None]
    before, is_unit = config.qk_norm in ("head", "projection"), config.qk_norm == "rotated_unit" and angles.any()
    after = config.qk_norm == "rotated_head" or is_unit
    ones = {"scale": np.full(config.head_dim, 1 - config.norm_zero_centered)}
    scales = weights | ({"query_norm": ones, "key_norm": ones} if is_unit else {})
    q, query_norm_backward = norm_if(before, "query_norm", q, weights, config)
    q, rotated_query_backward = norm_if(after, "query_norm", turn(q, angles, growth), scales, config)
    own_keys, own_values = "key" in projections, "value" in projections
    if own_keys:
        k, k_backward = project("bsd,dgk->bsgk", x, projections, "key", biased)  # [B, S, G, K]
        v, v_backward = (k, None) if not own_values else project("bsd,dgk->bsgk", x, projections, "value", biased)
        if config.value_norm:
            unit = {"scale": np.ones(v.shape[-1])}
            v, value_norm_backward = norm(v, unit, dataclasses.replace(config, norm_zero_centered=False))
        k, key_norm_backward = norm_if(before, "key_norm", k, weights, config)
        k, rotated_key_backward = norm_if(after, "key_norm", turn(k, angles, growth), scales, config)
        kept[:] = Passed(k), Passed(v)
    keys, values = kept
    k, v = keys.value, values.value
    heads, attend_backward = attend(
        *(grown * q, k, v, visible, config.attention_scale, config.attention_softcap),
        projections["sinks"] if config.attention_sinks else None,
    )  # [B, S, H, K]
    gate = np.ones(1)
    if config.attention_gate == "element":
        opened, gate_backward = project("bsd,dhk->bshk", x, projections, "gate", False)
        gate = 1 / (1 + np.exp(-opened))  # [B, S, H, K]
    out, out_backward = project("bshk,hkd->bsd", heads * gate, projections, "output", all_biased)  # [B, S, D]

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_gated, d_output = out_backward(d_out)
        d_heads, d_opened = d_gated * gate, d_gated * heads * gate * (1 - gate)
        dx_gate, d_gate = gate_backward(d_opened) if config.attention_gate != "none" else (0, {})
        d_q, d_k, d_v, *d_sinks = attend_backward(d_heads)
        d_q, d_rotated_query_norm = rotated_query_backward(grown * d_q)
        d_q, d_query_norm = query_norm_backward(turn(d_q, -angles, growth))
        dx_q, d_query = q_backward(d_q)
        d_projections = d_query | d_output | d_gate | dict(zip(["sinks"], d_sinks, strict=False))
        d_norms = d_query_norm | ({} if is_unit else d_rotated_query_norm)
        keys.gradient, values.gradient = keys.gradient + d_k, values.gradient + d_v
        if not own_keys:
            return dx_q + dx_gate, {"attention": d_projections} | d_norms
        d_k, d_rotated_key_norm = rotated_key_backward(keys.gradient)
        d_k, d_key_norm = key_norm_backward(turn(d_k, -angles, growth))
        d_v = value_norm_backward(values.gradient)[0] if config.value_norm else values.gradient
        dx_k, d_key = k_backward(d_k if own_values else d_k + d_v)
        dx_v, d_value = v_backward(d_v) if own_values else (0, {})
        d_norms |= d_key_norm | ({} if is_unit else d_rotated_key_norm)
        return dx_q + dx_k + dx_v + dx_gate, {"attention": d_projections | d_key | d_value} | d_norms

    return out, backward


def silu(x: Array) -> tuple[Array, Array]:
    """Return the value and the derivative."""
    sigmoid = 1 / (1 + np.exp(-x))
    return x * sigmoid, sigmoid + x * sigmoid * (1 - sigmoid)


def gelu(x: Array) -> tuple[Array, Array]:
    """Return the value and the derivative of the tanh form."""
    root = np.sqrt(2 / np.pi)
    tanh = np.tanh(root * (x + 0.044715 * x**3))
    return x * (1 + tanh) / 2, (1 + tanh) / 2 + x * (1 - tanh**2) / 2 * root * (1 + 3 * 0.044715 * x**2)


def clamped(x: Array, low: float, high: float) -> tuple[Array, Array]:
    """Return the value and the derivative."""
    return np.minimum(np.maximum(x, low), high), ((x > low) & (x < high)).astype(float)


def clamped_gate(x: Array) -> tuple[Array, Array]:
    """Return the value and the derivative."""
    cut, slope = clamped(x, -np.inf, 7)
    sigmoid = 1 / (1 + np.exp(-1.702 * cut))
    return cut * sigmoid, slope * (sigmoid + 1.702 * cut * sigmoid * (1 - sigmoid))


def clamped_up(x: Array) -> tuple[Array, Array]:
    """Return the value and the derivative."""
    cut, slope = clamped(x, -7, 7)
    return cut + 1, slope


def relu2(x: Array) -> tuple[Array, Array]:
    """Return the value and the derivative."""
    return np.maximum(x, 0) ** 2, 2 * np.maximum(x, 0)


GATED = {"swiglu": silu, "geglu": gelu, "clamped_swiglu": clamped_gate}
UNGATED = {"gelu": gelu, "relu2": relu2}
OF_UP = {"clamped_swiglu": clamped_up}  # what multiplies the gate, if it is not `up` itself


def xielu(x: Array, weights: Tree) -> tuple[Array, Array, Tree]:
    """Return the value, the derivative by x, and the derivatives by the two learned values."""
    p, n = (np.log1p(np.exp(weights[name])) for name in ("alpha_p", "alpha_n"))  # softplus
    slope_p, slope_n = (1 / (1 + np.exp(-weights[name])) for name in ("alpha_p", "alpha_n"))
    negative = np.minimum(x, 0)
    below = np.exp(negative) - 1 - negative
    value = np.where(x > 0, p * x**2, (0.5 + n) * below) + 0.5 * x
    derivative = np.where(x > 0, 2 * p * x, (0.5 + n) * (np.exp(negative) - 1)) + 0.5
    return value, derivative, {"alpha_p": slope_p * np.maximum(x, 0) ** 2, "alpha_n": slope_n * below}


def mlp(x: Array, weights: Tree, config: ReferenceConfig) -> tuple[Array, Callable[[Array], tuple[Array, Tree]]]:
    biased = config.biases in ("mlp", "all")
    up, up_backward = project("bsd,df->bsf", x, weights, "up", biased)  # [B, S, F]
    learned: Tree = {}  # derivatives by learned values of the activation
    if config.mlp == "xielu":
        hidden, slope, learned = xielu(up, weights)
    elif config.mlp in UNGATED:
        hidden, slope = UNGATED[config.mlp](up)
    else:
        gate, gate_backward = project("bsd,df->bsf", x, weights, "gate", biased)  # [B, S, F]
        activated, slope = GATED[config.mlp](gate)
        factor, up_slope = OF_UP[config.mlp](up) if config.mlp in OF_UP else (up, 1.0)
        hidden = activated * factor
    out, out_backward = project("bsf,fd->bsd", hidden, weights, "down", biased)  # [B, S, D]

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_hidden, d_down = out_backward(d_out)
        if config.mlp not in GATED:
            d_x, d_up = up_backward(d_hidden * slope)
            return d_x, d_up | d_down | {name: np.sum(d_hidden * each)[None] for name, each in learned.items()}
        dx_gate, d_gate = gate_backward(d_hidden * factor * slope)
        dx_up, d_up = up_backward(d_hidden * activated * up_slope)
        return dx_gate + dx_up, d_gate | d_up | d_down

    return out, backward


def best_experts(merits: Array, config: ReferenceConfig) -> list[int]:
    """Return the best experts of one token [E]; ties go to the first."""
    groups = [list(group) for group in np.split(np.arange(len(merits)), config.router_groups)]
    counted = 2 if config.router == "sigmoid" and len(groups) > 1 else 1
    groups.sort(key=lambda group: -sum(sorted(merits[group])[-counted:]))
    experts = sorted(expert for group in groups[: config.router_groups_per_token] for expert in group)
    return sorted(experts, key=lambda expert: -merits[expert])[: config.experts_per_token]


def choose(merits: Array, config: ReferenceConfig) -> Array:
    """Return which experts process which token, bool [B, S, E]."""
    batch, length, experts = merits.shape
    best = np.array([[best_experts(token, config) for token in row] for row in merits])  # [B, S, k]
    chosen = np.zeros(merits.shape, bool)
    room = config.capacity_factor * length * config.experts_per_token / experts
    for row in range(batch):
        taken = np.zeros(experts)
        for rank in range(config.experts_per_token):
            for token in range(length):
                expert = best[row, token, rank]
                chosen[row, token, expert] = not room or taken[expert] < np.ceil(room)
                taken[expert] += 1
    return chosen


def route(
    x: Array, weights: Tree, config: ReferenceConfig, counts: Array
) -> tuple[Array, float, Callable[[Array], tuple[Array, Tree]]]:
    """Return the weights [B, S, E] of the experts, 0 if not chosen, and the auxiliary loss.

    counts: bool [B, S]. In place of a gradient the bias gets the load of each expert above the mean, times E.
    """
    logits, logits_backward = contract("bsd,de->bse", x, weights["router"])
    logits = logits + weights.get("logit_bias", 0)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares = exponentials / exponentials.sum(axis=-1, keepdims=True)
    scores = shares if config.router == "softmax" else 1 / (1 + np.exp(-logits))
    merits = scores + weights.get("router_bias", 0)
    unlimited = choose(merits, dataclasses.replace(config, capacity_factor=0.0))
    chosen = choose(merits, config)
    total = np.sum(scores * unlimited, axis=-1, keepdims=True) if config.router_renormalises else np.ones(1)
    unscaled = config.router_scale * scores * chosen / total
    scale = weights["expert_scale"] if config.expert_scales else np.ones(config.experts)

    tokens, k, experts = counts.sum(axis=1), config.experts_per_token, config.experts
    load = np.einsum("bse,bs->be", unlimited.astype(float), counts)
    even = experts / np.maximum(tokens * k, 1)[:, None]
    sums = scores.sum(axis=-1, keepdims=True)
    log_z = np.log(exponentials.sum(axis=-1)) + logits.max(axis=-1)
    balance = np.einsum("be,bse,bs->", even * load, scores / sums, counts)
    extra = config.balance_loss * balance + config.router_z_loss * np.sum(counts * log_z**2)

    def backward(d_mixing: Array) -> tuple[Array, Tree]:
        gradients: Tree = {"expert_scale": np.sum(d_mixing * unscaled, axis=(0, 1))} if config.expert_scales else {}
        d_mixing = d_mixing * scale
        d_scores = config.router_scale * d_mixing * chosen / total
        if config.router_renormalises:
            d_scores -= np.sum(d_mixing * unscaled, axis=-1, keepdims=True) / total * unlimited
        d_normed = config.balance_loss * (even * load)[:, None] * counts[..., None]
        d_scores += (d_normed - np.sum(d_normed * scores / sums, axis=-1, keepdims=True)) / sums
        if config.router == "softmax":
            d_logits = scores * (d_scores - np.sum(d_scores * scores, axis=-1, keepdims=True))
        else:
            d_logits = d_scores * scores * (1 - scores)
        d_logits += config.router_z_loss * 2 * (counts * log_z)[..., None] * shares
        d_x, d_router = logits_backward(d_logits)
        above = experts * (load.sum(axis=0) - load.sum() / experts)
        biases = {"router_bias": above, "logit_bias": d_logits.sum(axis=(0, 1))}
        return d_x, {"router": d_router} | {name: each for name, each in biases.items() if name in weights} | gradients

    return unscaled * scale, float(extra), backward


def run_experts(x: Array, mixing: Array, weights: Tree, config: ReferenceConfig) -> tuple[Array, Callable]:
    """Run every expert on every token. The backward returns the gradients of x, of mixing, and of the weights."""
    projections, count = [name for name in ("gate", "up", "down") if name in weights], config.experts
    inner = projections + [f"{name}_bias" for name in projections if f"{name}_bias" in weights]
    ones = np.ones_like(mixing)
    inward, outward = (mixing, ones) if config.router_weighs == "inputs" else (ones, mixing)
    results = [mlp(inward[..., e, None] * x, {name: weights[name][e] for name in inner}, config) for e in range(count)]

    def backward(d_out: Array) -> tuple[Array, Array, Tree]:
        gradients: Tree = {name: np.zeros_like(weights[name]) for name in inner}
        d_x, d_mixing = np.zeros_like(x), np.zeros_like(mixing)
        for expert, (result, expert_backward) in enumerate(results):
            d_own, d_weights = expert_backward(outward[..., expert, None] * d_out)
            d_x = d_x + inward[..., expert, None] * d_own
            weighed, d_weighed = (x, d_own) if config.router_weighs == "inputs" else (result, d_out)
            d_mixing[..., expert] = np.sum(weighed * d_weighed, axis=-1)
            for name in inner:
                gradients[name][expert] = d_weights[name]
        return d_x, d_mixing, gradients

    return sum(outward[..., expert, None] * result for expert, (result, _) in enumerate(results)), backward


def run_shared(x: Array, weights: Tree, config: ReferenceConfig) -> tuple[Array, Callable]:
    """Run the shared expert; 0 without one."""
    shared = {name.removeprefix("shared_"): leaf for name, leaf in weights.items() if name.startswith("shared_")}
    if not shared:
        return np.zeros_like(x), lambda d_out: (np.zeros_like(x), {})
    ungated, mlp_backward = mlp(x, shared, config)
    opened, gate_backward = np.ones(1), None
    if "router_of_shared" in weights:
        closed, gate_backward = contract("bsd,de->bse", x, weights["router_of_shared"])
        opened = 1 / (1 + np.exp(-closed))

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_x, d_weights = mlp_backward(opened * d_out)
        gradients = {f"shared_{name}": leaf for name, leaf in d_weights.items()}
        if gate_backward:
            d_opened = np.sum(d_out * ungated, axis=-1, keepdims=True)
            d_own, gradients["router_of_shared"] = gate_backward(d_opened * opened * (1 - opened))
            d_x = d_x + d_own
        return d_x, gradients

    return opened * ungated, backward


def mixture(x: Array, weights: Tree, config: ReferenceConfig, counts: Array) -> tuple[Array, float, Callable]:
    """Compute the MoE layer."""
    mixing, extra, route_backward = route(x, weights, config, counts)
    out, experts_backward = run_experts(x, mixing, weights, config)
    beside, shared_backward = run_shared(x, weights, config)

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_x, d_mixing, d_experts = experts_backward(d_out)
        d_routed, d_router = route_backward(d_mixing)
        d_shared, d_beside = shared_backward(d_out)
        return d_x + d_routed + d_shared, d_experts | d_router | d_beside

    return out + beside, extra, backward


def normed_mixture(x: Array, block: Tree, config: ReferenceConfig, counts: Array) -> tuple[Array, float, Callable]:
    """Compute the MoE layer of Gemma 4, whose parts have norms of their own. block: the weights of the block.

    The backward returns the gradient of x, those of the layer, and those of the norms.
    """
    weights, root = block["mlp"], np.sqrt(x.shape[-1])
    read, router_norm_backward = norm(x, block["router_norm"], config)
    fed, experts_norm_backward = norm(x, block["experts_norm"], config)
    taken, shared_norm_backward = norm(x, block["mlp_norm"], config)
    mixing, extra, route_backward = route(read / root, weights, config, counts)
    out, experts_backward = run_experts(fed, mixing, weights, config)
    beside, shared_backward = run_shared(taken, weights, config)
    out, experts_post_backward = norm(out, block["experts_post_norm"], config)
    beside, shared_post_backward = norm(beside, block["shared_post_norm"], config)

    def backward(d_out: Array) -> tuple[Array, Tree, Tree]:
        norms: Tree = {}
        d_routed, norms["experts_post_norm"] = experts_post_backward(d_out)
        d_fed, d_mixing, d_experts = experts_backward(d_routed)
        d_read, d_router = route_backward(d_mixing)
        d_beside, norms["shared_post_norm"] = shared_post_backward(d_out)
        d_taken, d_shared = shared_backward(d_beside)
        d_from_router, norms["router_norm"] = router_norm_backward(d_read / root)
        d_from_experts, norms["experts_norm"] = experts_norm_backward(d_fed)
        d_from_shared, norms["mlp_norm"] = shared_norm_backward(d_taken)
        return d_from_router + d_from_experts + d_from_shared, d_experts | d_router | d_shared, norms

    return out + beside, extra, backward


def add_input(x: Array, weights: Tree, config: ReferenceConfig, given: Passed | None) -> tuple[Array, Callable]:
    """Add to x the small MLP whose gate a layer's input [B, S, P] multiplies; without an input, nothing."""
    if given is None:
        return x, lambda d_out: (d_out, {})
    gate, gate_backward = contract("bsd,dp->bsp", x, weights["input_mlp"]["gate"])
    activated, slope = GATED[config.mlp](gate)
    out, out_backward = contract("bsp,pd->bsd", activated * given.value, weights["input_mlp"]["down"])
    normed, norm_backward = norm(out, weights["input_mlp_post_norm"], config)

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_normed, d_norm = norm_backward(config.residual_scale * d_out)
        d_hidden, d_down = out_backward(d_normed)
        given.gradient = given.gradient + d_hidden * activated
        d_x, d_gate = gate_backward(d_hidden * given.value * slope)
        return d_out + d_x, {"input_mlp": {"gate": d_gate, "down": d_down}, "input_mlp_post_norm": d_norm}

    return x + config.residual_scale * normed, backward


def make_inputs(
    x: Array, non_layer: Tree, config: ReferenceConfig, tokens: Array
) -> tuple[list[Passed | None], Callable[[], tuple[Array | float, Tree]]]:
    """Return the input [B, S, P] of each layer, given the embeddings x, and the backward, which returns that of x."""
    size, root = config.layer_input_size, np.sqrt(x.shape[-1])
    layers = sum(len(kinds) * repeats for kinds, repeats in config.layout)
    if not size:
        return [None] * layers, lambda: (0.0, {})
    weights = non_layer["layer_inputs"]
    projected, projected_backward = contract("bsd,dlp->bslp", x, weights["projection"])
    normed, norm_backward = norm(projected / root, non_layer["layer_inputs_norm"], config)
    of_tokens = weights["table"][tokens].reshape(normed.shape) * np.sqrt(size)
    inputs = [Passed((normed + of_tokens)[:, :, layer] / np.sqrt(2)) for layer in range(layers)]

    def backward() -> tuple[Array, Tree]:
        d_inputs = np.stack([each.gradient for each in inputs], axis=2) / np.sqrt(2)
        d_projected, d_norm = norm_backward(d_inputs)
        d_x, d_projection = projected_backward(d_projected / root)
        d_table = np.zeros_like(weights["table"])
        np.add.at(d_table, tokens, d_inputs.reshape(*tokens.shape, -1) * np.sqrt(size))
        return d_x, {"layer_inputs": {"table": d_table, "projection": d_projection}, "layer_inputs_norm": d_norm}

    return [*inputs], backward


def silu(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    gate = 1 / (1 + np.exp(-x))
    return x * gate, lambda d_out: d_out * gate * (1 + x * (1 - gate))


def convolve(x: Array, kernel: Array, visible: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """Convolve each value of x [B, S, ...] with its own kernel [..., W], whose last tap is the token's own."""
    taps, lagged = kernel.shape[-1], []
    for tap in range(taps):
        shifted = np.zeros_like(x)
        for row, token in np.ndindex(*x.shape[:2]):
            before = token - (taps - 1 - tap)
            if before >= 0 and visible[row, token, before]:
                shifted[row, token] = x[row, before]
        lagged.append(shifted)
    out, silu_backward = silu(sum(each * kernel[..., tap] for tap, each in enumerate(lagged)))

    def backward(d_out: Array) -> tuple[Array, Array]:
        d_sum = silu_backward(d_out)
        d_x = np.zeros_like(x)
        for tap in range(taps):
            for row, token in np.ndindex(*x.shape[:2]):
                before = token - (taps - 1 - tap)
                if before >= 0 and visible[row, token, before]:
                    d_x[row, before] += d_sum[row, token] * kernel[..., tap]
        return d_x, np.stack([np.sum(d_sum * each, axis=(0, 1)) for each in lagged], axis=-1)

    return out, backward


def unit(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    inverse = 1 / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)
    out = x * inverse
    return out, lambda d_out: inverse * (d_out - out * np.sum(out * d_out, axis=-1, keepdims=True))


def remember(q: Array, k: Array, v: Array, share: Array, left: Array, begins: Array) -> tuple[Array, Callable]:
    """Run one head token by token: q and k [S, K], v [S, V]; share, left and begins [S], the latter of documents."""
    states, outs = [np.zeros((k.shape[1], v.shape[1]))], []
    for t in range(len(q)):
        before = states[-1] * (0 if begins[t] else left[t])
        states.append(before + np.outer(k[t], share[t] * (v[t] - k[t] @ before)))
        outs.append(q[t] @ states[-1])

    def backward(d_out: Array) -> tuple[Array, ...]:
        d_q, d_k, d_v, d_share, d_left = (np.zeros_like(each) for each in (q, k, v, share, left))
        d_state = np.zeros_like(states[0])
        for t in reversed(range(len(q))):
            factor = 0 if begins[t] else left[t]
            before = states[t] * factor
            wrong = v[t] - k[t] @ before
            d_state = d_state + np.outer(q[t], d_out[t])
            d_q[t] = states[t + 1] @ d_out[t]
            d_added = k[t] @ d_state
            d_share[t], d_v[t] = d_added @ wrong, share[t] * d_added
            d_k[t] = d_state @ (share[t] * wrong) - before @ d_v[t]
            d_before = d_state - np.outer(k[t], d_v[t])
            d_left[t] = 0 if begins[t] else np.sum(d_before * states[t])
            d_state = factor * d_before
        return d_q, d_k, d_v, d_share, d_left

    return np.array(outs), backward


def gated_delta(x: Array, weights: Tree, config: ReferenceConfig, visible: Array) -> tuple[Array, Callable]:
    """Compute a Gated DeltaNet token by token. visible: bool [B, S, T], the earlier tokens of each token's document."""
    leaves, of_norm = weights["delta"], dataclasses.replace(config, norm="rms", norm_zero_centered=False)
    begins = ~np.any(np.tril(visible, -1), axis=2)  # [B, S]
    axes = {"query": "gk", "key": "gk", "value": "grv", "beta": "gr", "decay": "gr", "gate": "grv"}
    taken = {name: contract(f"bsd,d{axes[name]}->bs{axes[name]}", x, leaves[name]) for name in axes}
    convolved = {n: convolve(taken[n][0], leaves[f"{n}_kernel"], visible) for n in ("query", "key", "value")}
    units = {name: unit(convolved[name][0]) for name in ("query", "key")}
    scale = x.dtype.type(leaves["query"].shape[-1] ** -0.5)
    share = 1 / (1 + np.exp(-taken["beta"][0]))  # [B, S, G, R]
    offset, rate = (leaves[name].reshape(share.shape[2:]) for name in ("decay_offset", "decay_rate"))
    moved = taken["decay"][0] + offset
    decay = -np.exp(rate) * np.logaddexp(0, moved)
    left, value = np.exp(decay), convolved["value"][0]
    heads, tape = np.zeros_like(value), {}
    for b, g, r in np.ndindex(len(x), *share.shape[2:]):
        of_head = units["query"][0][b, :, g] * scale, units["key"][0][b, :, g], value[b, :, g, r]
        heads[b, :, g, r], tape[b, g, r] = remember(*of_head, share[b, :, g, r], left[b, :, g, r], begins[b])
    normed, norm_backward = norm(heads, weights["delta_norm"], of_norm)
    gate, gate_backward = silu(taken["gate"][0])
    out, out_backward = contract("bsgrv,grvd->bsd", normed * gate, leaves["output"])

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_gated, d_output = out_backward(d_out)
        d_heads, d_norm = norm_backward(d_gated * gate)
        d = {"gate": gate_backward(d_gated * normed)}
        d |= {name: np.zeros_like(each[0]) for name, each in taken.items() if name != "gate"}
        for (b, g, r), head_backward in tape.items():
            d_q, d_k, d_v, d_share, d_left = head_backward(d_heads[b, :, g, r])
            d["query"][b, :, g] += d_q * scale
            d["key"][b, :, g] += d_k
            d["value"][b, :, g, r], d["beta"][b, :, g, r], d["decay"][b, :, g, r] = d_v, d_share, d_left
        d["beta"] = d["beta"] * share * (1 - share)
        d_decay = d["decay"] * left
        d["decay"] = d_decay * -np.exp(rate) / (1 + np.exp(-moved))
        gradients: Tree = {"output": d_output}
        gradients["decay_rate"] = np.sum(d_decay * decay, axis=(0, 1)).reshape(-1)
        gradients["decay_offset"] = np.sum(d["decay"], axis=(0, 1)).reshape(-1)
        for name, (_, unit_backward) in units.items():
            d[name] = unit_backward(d[name])
        for name, (_, convolve_backward) in convolved.items():
            d[name], gradients[f"{name}_kernel"] = convolve_backward(d[name])
        d_x = np.zeros_like(x)
        for name, (_, project_backward) in taken.items():
            added, gradients[name] = project_backward(d[name])
            d_x += added
        return d_x, {"delta": gradients, "delta_norm": d_norm}

    return out, backward


def block(
    x: Array,
    weights: Tree,
    config: ReferenceConfig,
    angles: Array,
    visible: Array,
    factors: Array,
    counts: Array,
    kept: list[Passed],
    given: Passed | None,
) -> tuple[Array, float, Callable]:
    pre, post = config.norm_placement in ("pre", "both"), config.norm_placement in ("post", "both")
    normed, attention_norm_backward = norm_if(pre, "attention_norm", x, weights, config)
    if "delta" in weights:
        attended, attention_backward = gated_delta(normed, weights, config, visible)
    else:
        attended, attention_backward = attention(normed, weights, config, angles, visible, factors, kept)
    attended, attention_post_backward = norm_if(post, "attention_post_norm", attended, weights, config)
    middle = x + config.residual_scale * attended
    own_norms = config.own_norms and "router" in weights["mlp"]
    if not config.parallel_block and not own_norms:
        normed, mlp_norm_backward = norm_if(pre, "mlp_norm", middle, weights, config)
    if own_norms:
        transformed, extra, mixture_backward = normed_mixture(middle, weights, config, counts)
    elif "router" in weights["mlp"]:
        transformed, extra, mlp_backward = mixture(normed, weights["mlp"], config, counts)
    else:
        (transformed, mlp_backward), extra = mlp(normed, weights["mlp"], config), 0.0
    transformed, mlp_post_backward = norm_if(post, "mlp_post_norm", transformed, weights, config)

    x_out, input_backward = add_input(middle + config.residual_scale * transformed, weights, config, given)
    scale = weights["layer"]["scale"] if config.layer_scales else 1

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_scale = {"layer": {"scale": np.sum(d_out * x_out, keepdims=True)[0, 0]}} if config.layer_scales else {}
        d_out, d_input = input_backward(d_out * scale)
        d_transformed, d_mlp_post = mlp_post_backward(config.residual_scale * d_out)
        d_middle, d_mlp_norm = d_out, {}
        if own_norms:
            d_x, d_mlp, d_mlp_norm = mixture_backward(d_transformed)
            d_middle, d_read = d_out + d_x, np.zeros_like(d_out)
        else:
            d_read, d_mlp = mlp_backward(d_transformed)
        if not config.parallel_block and not own_norms:
            d_x, d_mlp_norm = mlp_norm_backward(d_read)
            d_middle, d_read = d_out + d_x, np.zeros_like(d_out)
        d_attended, d_attention_post = attention_post_backward(config.residual_scale * d_middle)
        d_normed, d_attention = attention_backward(d_attended)
        d_x, d_attention_norm = attention_norm_backward(d_normed + d_read)
        d_norms = d_attention_norm | d_attention_post | d_mlp_norm | d_mlp_post
        return d_middle + d_x, {"mlp": d_mlp} | d_attention | d_norms | d_scale | d_input

    return scale * x_out, extra, backward


def visibility(kind: str, window: int, segment_ids: Array, positions: Array) -> Array:
    """Return which tokens [B, S] see which tokens [B, T], as bool [B, S, T]."""
    distance = positions[:, :, None] - positions[:, None, :]  # [B, S, T]
    visible = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (distance >= 0)
    chunks = positions // window
    same_chunk = chunks[:, :, None] == chunks[:, None, :]
    limits = {"sliding": distance < window, "chunked": same_chunk}
    return visible & limits.get(kind, True)


def look_ahead(targets: Array, loss_mask: Array, segment_ids: Array, depth: int) -> tuple[Array, Array, Array]:
    """Return the tokens, the targets and the mask of the MTP module `depth`, each [B, S]: the token that it reads at
    each position, the one that it predicts there, and whether that prediction counts."""
    tokens, ahead, mask = np.zeros_like(targets), np.zeros_like(targets), np.zeros_like(loss_mask)
    rows, length = targets.shape
    for row in range(rows):
        for position in range(length):
            if position + depth - 1 < length:
                tokens[row, position] = targets[row, position + depth - 1]
            if position + depth < length:
                ahead[row, position] = targets[row, position + depth]
                inside = segment_ids[row, position] == segment_ids[row, position + depth]
                mask[row, position] = inside and loss_mask[row, position + depth]
    return tokens, ahead, mask


def join_tokens(x: Array, embedded: Array, weights: Tree, config: ReferenceConfig) -> tuple[Array, Callable]:
    """Return M [RMSNorm(embedded); RMSNorm(x)], the input of an MTP module's block."""
    left, left_backward = norm(embedded, weights["mtp_embedding_norm"], config)
    right, right_backward = norm(x, weights["mtp_hidden_norm"], config)
    both = np.concatenate([left, right], axis=-1)
    out, out_backward = contract("bse,ed->bsd", both, weights["mtp"]["projection"])

    def backward(d_out: Array) -> tuple[Array, Array, Tree]:
        d_both, d_projection = out_backward(d_out)
        d_left, d_right = np.split(d_both, 2, axis=-1)
        (d_embedded, d_left_norm), (d_x, d_right_norm) = left_backward(d_left), right_backward(d_right)
        norms = {"mtp_embedding_norm": d_left_norm, "mtp_hidden_norm": d_right_norm}
        return d_x, d_embedded, {"mtp": {"projection": d_projection}} | norms

    return out, backward


def decoder(
    params: Tree,
    config: ReferenceConfig,
    tokens: Array,
    segment_ids: Array,
    positions: Array,
    counts: Array | None = None,
    further: list[tuple[Array, Array]] | None = None,
) -> tuple[list[Array], float, Callable[[list[Array]], Tree]]:
    """Return logits [B, S, V], the auxiliary loss, and the backward from the gradient of the logits to the parameters.

    The logits are those of the main model and of each MTP module.

    counts: the tokens that count for the auxiliary loss of routers, bool [B, S]; by default all.
    further: for each MTP module the tokens that it reads, and those that count for the auxiliary loss.
    """
    counts = np.ones(np.shape(tokens), bool) if counts is None else np.asarray(counts)
    params = tree_map(lambda leaf: np.asarray(leaf, np.float64), params)
    tokens, segment_ids, positions = (np.asarray(array, np.int64) for array in (tokens, segment_ids, positions))
    non_layer = params["non_layer"]
    head_name = "head" if "head" in non_layer else "embedding"
    # Dropping the padding rows of the head excludes them from the softmax.
    head = non_layer[head_name]["table"][: config.vocabulary_size]  # [V, D]
    sliding = config
    if theta := config.rope_sliding_theta:
        sliding = dataclasses.replace(
            config, rope_theta=theta, rope_scaling="linear", rope_factor=1.0, rope_rotated_pairs=0
        )
    config = dataclasses.replace(config, head_dim=config.global_head_dim or config.head_dim)
    angles, sliding_angles = (rotary_angles(each, segment_ids, positions) for each in (config, sliding))
    learned = config.positions == "learned"
    in_nope = config.rope_growth_layers == "nope"
    steps = (positions + in_nope) // (config.rope_growth_length or config.rope_original_length)
    growth = 1 + config.rope_query_growth * np.log(1 + steps)

    x = non_layer["embedding"]["table"][tokens] * config.embedding_scale  # [B, S, D]
    if learned:
        x = x + non_layer["positions"]["table"][positions]
    inputs, inputs_backward = make_inputs(x, non_layer, config, tokens)
    tape, extra = [], 0.0
    latest: dict[str, list[Passed]] = {}  # keys and values, by the kind of layers

    def run(kind: str, weights: Tree, x: Array, counts: Array, given: Passed | None) -> tuple[Array, float, Callable]:
        visible = visibility(kind, config.window, segment_ids, positions)
        of_kind, turned = (sliding, sliding_angles) if kind == "sliding" else (config, angles)
        turned = np.zeros_like(angles) if learned or kind == "global_nope" else turned
        factors = growth if in_nope == (kind == "global_nope") else np.ones_like(growth)
        if "key" in weights.get("attention", {}):
            latest[kind] = []
        return block(x, weights, of_kind, turned, visible, factors, counts, latest.get(kind, []), given)

    def classify(x: Array) -> tuple[Array, Callable]:
        out, out_backward = contract("bsd,vd->bsv", x, head * config.logit_scale)  # [B, S, V]
        out, cap_backward = softcap(out, config.logit_softcap)
        return out, lambda d_out: out_backward(cap_backward(d_out))

    for i, (kinds, repeats) in enumerate(config.layout):
        for repeat in range(repeats):
            for j, kind in enumerate(kinds):
                stack = params[f"segment_{i}"][f"block_{j}"]
                weights = {group: {name: leaf[repeat] for name, leaf in stack[group].items()} for group in stack}
                x, added, block_backward = run(kind, weights, x, counts, inputs[len(tape)])
                extra += added
                tape.append((f"segment_{i}", repeat, j, block_backward))
    hidden, norm_backward = norm(x, non_layer["final_norm"], config)
    out, out_backward = classify(hidden)
    outs, modules = [out], []
    for depth, (tokens_ahead, counted) in enumerate(further or []):
        stack = params[f"mtp_{depth}"]["block_0"]
        weights = {group: {name: leaf[0] for name, leaf in stack[group].items()} for group in stack}
        embedded = non_layer["embedding"]["table"][tokens_ahead] * config.embedding_scale
        joined, join_backward = join_tokens(hidden, embedded, weights, config)
        after, added, block_backward = run(config.mtp_kinds[depth], weights, joined, counted, None)
        extra += added
        hidden, own_norm_backward = norm(after, weights["mtp_output_norm"], config)
        out, module_backward = classify(hidden)
        outs.append(out)
        modules.append((tokens_ahead, join_backward, block_backward, own_norm_backward, module_backward))

    def backward(d_outs: list[Array]) -> Tree:
        gradients = tree_map(np.zeros_like, params)
        table, d_head = gradients["non_layer"]["embedding"]["table"], 0.0

        def store(section: str, row: int, index: int, d_weights: Tree) -> None:
            for group, leaves in d_weights.items():
                for name, leaf in leaves.items():
                    gradients[section][f"block_{index}"][group][name][row] = leaf

        d_hidden = 0.0
        for depth in reversed(range(len(modules))):
            tokens_ahead, join_backward, block_backward, own_norm_backward, module_backward = modules[depth]
            d_own, d_scaled_head = module_backward(d_outs[depth + 1])
            d_head = d_head + d_scaled_head * config.logit_scale
            d_after, d_norm = own_norm_backward(d_own + d_hidden)
            d_joined, d_weights = block_backward(d_after)
            d_hidden, d_embedded, d_join = join_backward(d_joined)
            store(f"mtp_{depth}", 0, 0, d_weights | d_join | {"mtp_output_norm": d_norm})
            np.add.at(table, tokens_ahead, d_embedded * config.embedding_scale)
        d_normed, d_scaled_head = out_backward(d_outs[0])
        d_head = d_head + d_scaled_head * config.logit_scale
        d_x, d_final_norm = norm_backward(d_normed + d_hidden)
        gradients["non_layer"]["final_norm"].update(d_final_norm)
        for section, repeat, j, block_backward in reversed(tape):
            d_x, d_weights = block_backward(d_x)
            store(section, repeat, j, d_weights)
        gradients["non_layer"][head_name]["table"][: config.vocabulary_size] += d_head
        d_embedded, d_inputs = inputs_backward()
        for name, found in d_inputs.items():
            gradients["non_layer"][name].update(found)
        d_x = d_x + d_embedded
        # `+=` with an index array would keep only one of the occurrences of a token.
        np.add.at(table, tokens, d_x * config.embedding_scale)
        if learned:
            np.add.at(gradients["non_layer"]["positions"]["table"], positions, d_x)
        return gradients

    return outs, extra, backward


def logits(params: Tree, config: ReferenceConfig, tokens: Array, segment_ids: Array, positions: Array) -> Array:
    return decoder(params, config, tokens, segment_ids, positions)[0][0]  # [B, S, V]


def loss_and_gradients(
    params: Tree,
    config: ReferenceConfig,
    tokens: Array,
    targets: Array,
    loss_mask: Array,
    segment_ids: Array,
    positions: Array,
) -> tuple[float, Tree]:
    """Return the cross-entropy, summed (not averaged) over the tokens in loss_mask, and the gradients of params.

    The gradients include those of the auxiliary loss and of MTP modules; the value does not.
    """
    (value, *_), gradients = losses_and_gradients(params, config, tokens, targets, loss_mask, segment_ids, positions)
    return value, gradients


def losses_and_gradients(
    params: Tree,
    config: ReferenceConfig,
    tokens: Array,
    targets: Array,
    loss_mask: Array,
    segment_ids: Array,
    positions: Array,
) -> tuple[list[float], Tree]:
    """Return what `loss_and_gradients` does, with the cross-entropy of the main model and of each MTP module."""
    targets, loss_mask, segment_ids = map(np.asarray, (targets, loss_mask, segment_ids))
    ahead = [look_ahead(targets, loss_mask, segment_ids, depth + 1) for depth in range(config.mtp_layers)]
    further = [(tokens_ahead, mask) for tokens_ahead, _, mask in ahead]
    outs, _, backward = decoder(params, config, tokens, segment_ids, positions, loss_mask, further)
    weights = [1.0, *(config.mtp_weight / config.mtp_layers for _ in ahead)]
    counted = [(targets, loss_mask), *((following, mask) for _, following, mask in ahead)]
    losses, d_outs = zip(*(cross_entropy(out, *each) for out, each in zip(outs, counted, strict=True)), strict=True)
    return [*losses], backward([weight * d_out for weight, d_out in zip(weights, d_outs, strict=True)])


def cross_entropy(out: Array, targets: Array, loss_mask: Array) -> tuple[float, Array]:
    """Return the cross-entropy of logits [B, S, V], summed over the tokens in loss_mask, and its gradient."""
    shifted = out - out.max(axis=-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))  # [B, S, V]
    # A target outside the mask may be any number, even one outside the vocabulary.
    rows = (*np.nonzero(loss_mask), targets[np.nonzero(loss_mask)])
    one_hot = np.zeros_like(out)
    one_hot[rows] = 1
    d_out = (np.exp(log_probabilities) - one_hot) * loss_mask[:, :, None]
    return -float(log_probabilities[rows].sum()), d_out
