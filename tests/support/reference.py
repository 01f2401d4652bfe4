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
    rope_interleaved: bool = False
    rope_query_growth: float = 0.0
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
    biases: str = "none"
    mlp: str = "swiglu"
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: int = 0
    experts_per_token: int = 2
    router: str = "softmax"
    router_renormalises: bool = True
    router_scale: float = 1.0
    balance_loss: float = 0.01
    router_z_loss: float = 0.0
    router_groups: int = 1
    router_groups_per_token: int = 1
    capacity_factor: float = 0.0


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

    centred = x - mean(x) if config.norm == "layer" else x
    inverse = 1 / np.sqrt(mean(centred**2) + config.norm_epsilon)
    normed = centred * inverse
    scale = weights["scale"] + (1 if config.norm_zero_centered else 0)

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_normed = d_out * scale
        d_x = inverse * (d_normed - normed * mean(d_normed * normed))
        d_weights = {"scale": np.sum(d_out * normed, axis=others)}
        if config.norm == "layer":
            return d_x - mean(d_x), d_weights | {"bias": np.sum(d_out, axis=others)}
        return d_x, d_weights

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
    """Return radians per token of each pair, [K/2], scaled case by case as in transformers.

    length: tokens of the document.
    """
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
    q: Array, k: Array, v: Array, visible: Array, scale: float = 0.0, cap: float = 0.0
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """Compute softmax attention of q [B, S, H, K] over k [B, T, G, K], v [B, T, G, U] where visible [B, S, T].

    Query head h reads kv head h // R.
    """
    scale = scale or 1 / np.sqrt(q.shape[-1])
    batch, length, heads, head_dim = q.shape
    grouped = (batch, length, k.shape[2], heads // k.shape[2], head_dim)  # B, S, G, R, K
    scores, scores_backward = contract("bsgrk,btgk->bgrst", q.reshape(grouped), k)
    scores, cap_backward = softcap(scores * scale, cap)
    scores = np.where(visible[:, None, None], scores, -np.inf)  # [B, G, R, S, T]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))  # the maximum is finite: a token sees itself
    weights /= weights.sum(axis=-1, keepdims=True)
    out, out_backward = contract("bgrst,btgu->bsgru", weights, v)

    def backward(d_out: Array) -> tuple[Array, Array, Array]:
        d_weights, d_v = out_backward(d_out.reshape(out.shape))
        d_scores = weights * (d_weights - np.sum(d_weights * weights, axis=-1, keepdims=True))
        d_q, d_k = scores_backward(cap_backward(d_scores) * scale)
        return d_q.reshape(q.shape), d_k, d_v

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
    x: Array, weights: Tree, config: ReferenceConfig, angles: Array, visible: Array, factors: Array
) -> tuple[Array, Callable]:
    """Compute attention. weights: of the whole block; norms of queries and keys are next to the projections.

    factors: of the queries, [B, S].
    """
    if config.kv_rank:
        return latent_attention(x, weights, config, angles, visible)
    projections = weights["attention"]
    biased, all_biased = config.biases in ("qkv", "attention", "all"), config.biases in ("attention", "all")
    turn = functools.partial(rotate_part, adjacent=config.rope_interleaved)
    q, q_backward = project("bsd,dhk->bshk", x, projections, "query", biased)  # [B, S, H, K]
    k, k_backward = project("bsd,dgk->bsgk", x, projections, "key", biased)  # [B, S, G, K]
    v, v_backward = project("bsd,dgk->bsgk", x, projections, "value", biased)  # [B, S, G, K]
    q, query_norm_backward = norm_if(config.qk_norm != "none", "query_norm", q, weights, config)
    k, key_norm_backward = norm_if(config.qk_norm != "none", "key_norm", k, weights, config)
    growth = rotary_magnitude(config) if angles.any() else 1.0  # 0: a layer without rotation
    grown = factors[..., None, None]
    heads, attend_backward = attend(
        *(grown * turn(q, angles, growth), turn(k, angles, growth), v),
        *(visible, config.attention_scale, config.attention_softcap),
    )  # [B, S, H, K]
    out, out_backward = project("bshk,hkd->bsd", heads, projections, "output", all_biased)  # [B, S, D]

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_heads, d_output = out_backward(d_out)
        d_q, d_k, d_v = attend_backward(d_heads)
        d_q, d_query_norm = query_norm_backward(turn(grown * d_q, -angles, growth))
        d_k, d_key_norm = key_norm_backward(turn(d_k, -angles, growth))
        dx_q, d_query = q_backward(d_q)
        dx_k, d_key = k_backward(d_k)
        dx_v, d_value = v_backward(d_v)
        d_projections = d_query | d_key | d_value | d_output
        return dx_q + dx_k + dx_v, {"attention": d_projections} | d_query_norm | d_key_norm

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


GATED = {"swiglu": silu, "geglu": gelu}
UNGATED = {"gelu": gelu}


def mlp(x: Array, weights: Tree, config: ReferenceConfig) -> tuple[Array, Callable[[Array], tuple[Array, Tree]]]:
    biased = config.biases in ("mlp", "all")
    up, up_backward = project("bsd,df->bsf", x, weights, "up", biased)  # [B, S, F]
    if config.mlp in UNGATED:
        hidden, slope = UNGATED[config.mlp](up)
    else:
        gate, gate_backward = project("bsd,df->bsf", x, weights, "gate", biased)  # [B, S, F]
        activated, slope = GATED[config.mlp](gate)
        hidden = activated * up
    out, out_backward = project("bsf,fd->bsd", hidden, weights, "down", biased)  # [B, S, D]

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_hidden, d_down = out_backward(d_out)
        if config.mlp in UNGATED:
            d_x, d_up = up_backward(d_hidden * slope)
            return d_x, d_up | d_down
        dx_gate, d_gate = gate_backward(d_hidden * up * slope)
        dx_up, d_up = up_backward(d_hidden * activated)
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
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares = exponentials / exponentials.sum(axis=-1, keepdims=True)
    scores = shares if config.router == "softmax" else 1 / (1 + np.exp(-logits))
    merits = scores + weights.get("router_bias", 0)
    unlimited = choose(merits, dataclasses.replace(config, capacity_factor=0.0))
    chosen = choose(merits, config)
    total = np.sum(scores * unlimited, axis=-1, keepdims=True) if config.router_renormalises else np.ones(1)
    mixing = config.router_scale * scores * chosen / total

    tokens, k, experts = counts.sum(axis=1), config.experts_per_token, config.experts
    load = np.einsum("bse,bs->be", unlimited.astype(float), counts)
    even = experts / np.maximum(tokens * k, 1)[:, None]
    sums = scores.sum(axis=-1, keepdims=True)
    log_z = np.log(exponentials.sum(axis=-1)) + logits.max(axis=-1)
    balance = np.einsum("be,bse,bs->", even * load, scores / sums, counts)
    extra = config.balance_loss * balance + config.router_z_loss * np.sum(counts * log_z**2)

    def backward(d_mixing: Array) -> tuple[Array, Tree]:
        d_scores = config.router_scale * d_mixing * chosen / total
        if config.router_renormalises:
            d_scores -= np.sum(d_mixing * mixing, axis=-1, keepdims=True) / total * unlimited
        d_normed = config.balance_loss * (even * load)[:, None] * counts[..., None]
        d_scores += (d_normed - np.sum(d_normed * scores / sums, axis=-1, keepdims=True)) / sums
        if config.router == "softmax":
            d_logits = scores * (d_scores - np.sum(d_scores * scores, axis=-1, keepdims=True))
        else:
            d_logits = d_scores * scores * (1 - scores)
        d_logits += config.router_z_loss * 2 * (counts * log_z)[..., None] * shares
        d_x, d_router = logits_backward(d_logits)
        above = experts * (load.sum(axis=0) - load.sum() / experts)
        return d_x, {"router": d_router} | ({"router_bias": above} if "router_bias" in weights else {})

    return mixing, float(extra), backward


def mixture(x: Array, weights: Tree, config: ReferenceConfig, counts: Array) -> tuple[Array, float, Callable]:
    """Compute the MoE layer by running every expert on every token."""
    mixing, extra, route_backward = route(x, weights, config, counts)
    inner = [name for name in ("gate", "up", "down") if name in weights]
    results = [mlp(x, {name: weights[name][expert] for name in inner}, config) for expert in range(config.experts)]
    out = sum(mixing[..., expert, None] * result for expert, (result, _) in enumerate(results))
    shared = {name.removeprefix("shared_"): leaf for name, leaf in weights.items() if name.startswith("shared_")}
    if shared:
        beside, shared_backward = mlp(x, shared, config)
        out = out + beside

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_mixing = np.stack([np.sum(d_out * result, axis=-1) for result, _ in results], axis=-1)
        d_x, d_router = route_backward(d_mixing)
        gradients: Tree = {name: np.zeros_like(weights[name]) for name in inner} | d_router
        for expert, (_, expert_backward) in enumerate(results):
            d_own, d_weights = expert_backward(mixing[..., expert, None] * d_out)
            d_x = d_x + d_own
            for name in inner:
                gradients[name][expert] = d_weights[name]
        if shared:
            d_own, d_weights = shared_backward(d_out)
            d_x, gradients = d_x + d_own, gradients | {f"shared_{name}": leaf for name, leaf in d_weights.items()}
        return d_x, gradients

    return out, extra, backward


def block(
    x: Array, weights: Tree, config: ReferenceConfig, angles: Array, visible: Array, factors: Array, counts: Array
) -> tuple[Array, float, Callable]:
    pre, post = config.norm_placement in ("pre", "both"), config.norm_placement in ("post", "both")
    normed, attention_norm_backward = norm_if(pre, "attention_norm", x, weights, config)
    attended, attention_backward = attention(normed, weights, config, angles, visible, factors)
    attended, attention_post_backward = norm_if(post, "attention_post_norm", attended, weights, config)
    x = x + config.residual_scale * attended
    normed, mlp_norm_backward = norm_if(pre, "mlp_norm", x, weights, config)
    if "router" in weights["mlp"]:
        transformed, extra, mlp_backward = mixture(normed, weights["mlp"], config, counts)
    else:
        (transformed, mlp_backward), extra = mlp(normed, weights["mlp"], config), 0.0
    transformed, mlp_post_backward = norm_if(post, "mlp_post_norm", transformed, weights, config)

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_transformed, d_mlp_post = mlp_post_backward(config.residual_scale * d_out)
        d_normed, d_mlp = mlp_backward(d_transformed)
        d_x, d_mlp_norm = mlp_norm_backward(d_normed)
        d_middle = d_out + d_x
        d_attended, d_attention_post = attention_post_backward(config.residual_scale * d_middle)
        d_normed, d_attention = attention_backward(d_attended)
        d_x, d_attention_norm = attention_norm_backward(d_normed)
        d_norms = d_attention_norm | d_attention_post | d_mlp_norm | d_mlp_post
        return d_middle + d_x, {"mlp": d_mlp} | d_attention | d_norms

    return x + config.residual_scale * transformed, extra, backward


def visibility(kind: str, window: int, segment_ids: Array, positions: Array) -> Array:
    """Return which tokens [B, S] see which tokens [B, T], as bool [B, S, T]."""
    distance = positions[:, :, None] - positions[:, None, :]  # [B, S, T]
    visible = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (distance >= 0)
    return {"global": visible, "sliding": visible & (distance < window), "global_nope": visible}[kind]


def decoder(
    params: Tree,
    config: ReferenceConfig,
    tokens: Array,
    segment_ids: Array,
    positions: Array,
    counts: Array | None = None,
) -> tuple[Array, float, Callable[[Array], Tree]]:
    """Return logits [B, S, V], the auxiliary loss, and the backward from the gradient of the logits to the parameters.

    counts: the tokens that count for the auxiliary loss of routers, bool [B, S]; by default all.
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
        sliding = dataclasses.replace(config, rope_theta=theta, rope_scaling="linear", rope_factor=1.0)
    angles, sliding_angles = (rotary_angles(each, segment_ids, positions) for each in (config, sliding))
    learned = config.positions == "learned"
    factors = 1 + config.rope_query_growth * np.log(1 + positions // config.rope_original_length)

    x = non_layer["embedding"]["table"][tokens] * config.embedding_scale  # [B, S, D]
    if learned:
        x = x + non_layer["positions"]["table"][positions]
    tape, extra = [], 0.0
    for i, (kinds, repeats) in enumerate(config.layout):
        for repeat in range(repeats):
            for j, kind in enumerate(kinds):
                stack = params[f"segment_{i}"][f"block_{j}"]
                weights = {group: {name: leaf[repeat] for name, leaf in stack[group].items()} for group in stack}
                visible = visibility(kind, config.window, segment_ids, positions)
                of_kind, turned = (sliding, sliding_angles) if kind == "sliding" else (config, angles)
                turned = np.zeros_like(angles) if learned or kind == "global_nope" else turned
                x, added, block_backward = block(x, weights, of_kind, turned, visible, factors, counts)
                extra += added
                tape.append((i, repeat, j, block_backward))
    normed, norm_backward = norm(x, non_layer["final_norm"], config)
    out, out_backward = contract("bsd,vd->bsv", normed, head * config.logit_scale)  # [B, S, V]
    out, cap_backward = softcap(out, config.logit_softcap)

    def backward(d_out: Array) -> Tree:
        gradients = tree_map(np.zeros_like, params)
        d_normed, d_scaled_head = out_backward(cap_backward(d_out))
        d_head = d_scaled_head * config.logit_scale
        d_x, d_final_norm = norm_backward(d_normed)
        gradients["non_layer"]["final_norm"].update(d_final_norm)
        for i, repeat, j, block_backward in reversed(tape):
            d_x, d_weights = block_backward(d_x)
            for group, leaves in d_weights.items():
                for name, leaf in leaves.items():
                    gradients[f"segment_{i}"][f"block_{j}"][group][name][repeat] = leaf
        gradients["non_layer"][head_name]["table"][: config.vocabulary_size] += d_head
        # `+=` with an index array would keep only one of the occurrences of a token.
        np.add.at(gradients["non_layer"]["embedding"]["table"], tokens, d_x * config.embedding_scale)
        if learned:
            np.add.at(gradients["non_layer"]["positions"]["table"], positions, d_x)
        return gradients

    return out, extra, backward


def logits(params: Tree, config: ReferenceConfig, tokens: Array, segment_ids: Array, positions: Array) -> Array:
    return decoder(params, config, tokens, segment_ids, positions)[0]  # [B, S, V]


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

    The gradients include those of the auxiliary loss; the value does not.
    """
    out, _, backward = decoder(params, config, tokens, segment_ids, positions, loss_mask)  # [B, S, V]
    shifted = out - out.max(axis=-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))  # [B, S, V]
    # A target outside the mask may be any number, even one outside the vocabulary.
    rows = (*np.nonzero(loss_mask), np.asarray(targets)[np.nonzero(loss_mask)])
    one_hot = np.zeros_like(out)
    one_hot[rows] = 1
    d_out = (np.exp(log_probabilities) - one_hot) * np.asarray(loss_mask)[:, :, None]
    return -float(log_probabilities[rows].sum()), backward(d_out)
