"""A float64 NumPy decoder with a hand-written backward: the ground truth of the trainer's tests.

Every operation returns its value and a `backward`: from the gradient of the value to those of its array arguments,
in order. Nothing here is shared with the trainer, so that a mistake in one is not repeated in the other.

Shapes: B batch, S query position, T key position, D width, H heads, G kv heads, R = H // G, K head_dim, F mlp width,
V vocabulary, VP >= V rows of the padded tables.
"""

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


def tree_map(function: Callable[[Array], Array], tree: Tree) -> Tree:
    return {k: tree_map(function, v) if isinstance(v, dict) else function(v) for k, v in tree.items()}


def contract(spec: str, a: Array, b: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    """An einsum of two arrays, each index of which is in two of the three terms (or in all)."""
    a_axes, b_axes, out_axes = spec.replace("->", ",").split(",")

    def backward(d_out: Array) -> tuple[Array, Array]:
        d_a = np.einsum(f"{out_axes},{b_axes}->{a_axes}", d_out, b, optimize=True)
        d_b = np.einsum(f"{a_axes},{out_axes}->{b_axes}", a, d_out, optimize=True)
        return d_a, d_b

    return np.einsum(spec, a, b, optimize=True), backward


def rms_norm(x: Array, scale: Array, epsilon: float) -> tuple[Array, Callable[[Array], tuple[Array, Array]]]:
    inverse = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)  # [B, S, 1]
    normed = x * inverse  # [B, S, D]

    def backward(d_out: Array) -> tuple[Array, Array]:
        d_normed = d_out * scale
        d_x = inverse * (d_normed - normed * np.mean(d_normed * normed, axis=-1, keepdims=True))
        return d_x, np.sum(d_out * normed, axis=(0, 1))

    return normed * scale, backward


def rotate(x: Array, angles: Array) -> Array:
    """Rotary embedding of x [B, S, heads, K] by angles [B, S, K/2]; its backward is the rotation by -angles."""
    cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]  # [B, S, 1, K/2]
    x1, x2 = np.split(x, 2, axis=-1)
    return np.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def attend(q: Array, k: Array, v: Array, visible: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]:
    """Softmax attention of q [B, S, H, K] over k, v [B, T, G, K] where visible [B, S, T]; query head h reads h // R."""
    batch, length, heads, head_dim = q.shape
    grouped = (batch, length, k.shape[2], heads // k.shape[2], head_dim)  # B, S, G, R, K
    scores, scores_backward = contract("bsgrk,btgk->bgrst", q.reshape(grouped), k)
    scores = np.where(visible[:, None, None], scores / np.sqrt(head_dim), -np.inf)  # [B, G, R, S, T]
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))  # the maximum is finite: a token sees itself
    weights /= weights.sum(axis=-1, keepdims=True)
    out, out_backward = contract("bgrst,btgk->bsgrk", weights, v)

    def backward(d_out: Array) -> tuple[Array, Array, Array]:
        d_weights, d_v = out_backward(d_out.reshape(grouped))
        d_scores = weights * (d_weights - np.sum(d_weights * weights, axis=-1, keepdims=True))
        d_q, d_k = scores_backward(d_scores / np.sqrt(head_dim))
        return d_q.reshape(q.shape), d_k, d_v

    return out.reshape(q.shape), backward


def attention(x: Array, weights: Tree, angles: Array, visible: Array) -> tuple[Array, Callable]:
    q, q_backward = contract("bsd,dhk->bshk", x, weights["query"])  # [B, S, H, K]
    k, k_backward = contract("bsd,dgk->bsgk", x, weights["key"])  # [B, S, G, K]
    v, v_backward = contract("bsd,dgk->bsgk", x, weights["value"])  # [B, S, G, K]
    heads, attend_backward = attend(rotate(q, angles), rotate(k, angles), v, visible)  # [B, S, H, K]
    out, out_backward = contract("bshk,hkd->bsd", heads, weights["output"])  # [B, S, D]

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_heads, d_output = out_backward(d_out)
        d_q, d_k, d_v = attend_backward(d_heads)
        dx_q, d_query = q_backward(rotate(d_q, -angles))
        dx_k, d_key = k_backward(rotate(d_k, -angles))
        dx_v, d_value = v_backward(d_v)
        return dx_q + dx_k + dx_v, {"query": d_query, "key": d_key, "value": d_value, "output": d_output}

    return out, backward


def mlp(x: Array, weights: Tree) -> tuple[Array, Callable[[Array], tuple[Array, Tree]]]:
    gate, gate_backward = contract("bsd,df->bsf", x, weights["gate"])  # [B, S, F]
    up, up_backward = contract("bsd,df->bsf", x, weights["up"])  # [B, S, F]
    sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    out, out_backward = contract("bsf,fd->bsd", silu * up, weights["down"])  # [B, S, D]

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_hidden, d_down = out_backward(d_out)
        dx_gate, d_gate = gate_backward(d_hidden * up * (sigmoid + silu * (1 - sigmoid)))
        dx_up, d_up = up_backward(d_hidden * silu)
        return dx_gate + dx_up, {"gate": d_gate, "up": d_up, "down": d_down}

    return out, backward


def block(x: Array, weights: Tree, epsilon: float, angles: Array, visible: Array) -> tuple[Array, Callable]:
    normed, attention_norm_backward = rms_norm(x, weights["attention_norm"]["scale"], epsilon)
    attended, attention_backward = attention(normed, weights["attention"], angles, visible)
    x = x + attended
    normed, mlp_norm_backward = rms_norm(x, weights["mlp_norm"]["scale"], epsilon)
    transformed, mlp_backward = mlp(normed, weights["mlp"])

    def backward(d_out: Array) -> tuple[Array, Tree]:
        d_normed, d_mlp = mlp_backward(d_out)
        d_x, d_mlp_scale = mlp_norm_backward(d_normed)
        d_middle = d_out + d_x
        d_normed, d_attention = attention_backward(d_middle)
        d_x, d_attention_scale = attention_norm_backward(d_normed)
        return d_middle + d_x, {
            "attention_norm": {"scale": d_attention_scale},
            "attention": d_attention,
            "mlp_norm": {"scale": d_mlp_scale},
            "mlp": d_mlp,
        }

    return x + transformed, backward


def visibility(kind: str, window: int, segment_ids: Array, positions: Array) -> Array:
    """Which tokens [B, S] see which [B, T]."""
    distance = positions[:, :, None] - positions[:, None, :]  # [B, S, T]
    visible = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (distance >= 0)
    return {"global": visible, "sliding": visible & (distance < window)}[kind]


def decoder(
    params: Tree, config: ReferenceConfig, tokens: Array, segment_ids: Array, positions: Array
) -> tuple[Array, Callable[[Array], Tree]]:
    """Logits [B, S, V], and the backward from their gradient to that of the parameters."""
    params = tree_map(lambda leaf: np.asarray(leaf, np.float64), params)
    tokens, segment_ids, positions = (np.asarray(array, np.int64) for array in (tokens, segment_ids, positions))
    outer = params["outer"]
    head_name = "head" if "head" in outer else "embedding"
    # Dropping the padding rows of the head excludes them from the softmax.
    head = outer[head_name]["table"][: config.vocabulary_size]  # [V, D]
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)  # [K/2]
    angles = positions[:, :, None] * frequencies  # [B, S, K/2]

    x = outer["embedding"]["table"][tokens]  # [B, S, D]
    tape = []
    for i, (kinds, repeats) in enumerate(config.layout):
        for repeat in range(repeats):
            for j, kind in enumerate(kinds):
                stack = params[f"segment_{i}"][f"block_{j}"]
                weights = {group: {name: leaf[repeat] for name, leaf in stack[group].items()} for group in stack}
                visible = visibility(kind, config.window, segment_ids, positions)
                x, block_backward = block(x, weights, config.norm_epsilon, angles, visible)
                tape.append((i, repeat, j, block_backward))
    normed, norm_backward = rms_norm(x, outer["final_norm"]["scale"], config.norm_epsilon)
    out, out_backward = contract("bsd,vd->bsv", normed, head)  # [B, S, V]

    def backward(d_out: Array) -> Tree:
        gradients = tree_map(np.zeros_like, params)
        d_normed, d_head = out_backward(d_out)
        d_x, gradients["outer"]["final_norm"]["scale"] = norm_backward(d_normed)
        for i, repeat, j, block_backward in reversed(tape):
            d_x, d_weights = block_backward(d_x)
            for group, leaves in d_weights.items():
                for name, leaf in leaves.items():
                    gradients[f"segment_{i}"][f"block_{j}"][group][name][repeat] = leaf
        gradients["outer"][head_name]["table"][: config.vocabulary_size] += d_head
        # `+=` with an index array would keep only one of the occurrences of a token.
        np.add.at(gradients["outer"]["embedding"]["table"], tokens, d_x)
        return gradients

    return out, backward


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
    """The cross-entropy summed (not averaged) over the tokens in loss_mask, and its gradient in the shape of params."""
    out, backward = decoder(params, config, tokens, segment_ids, positions)  # [B, S, V]
    shifted = out - out.max(axis=-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))  # [B, S, V]
    # A target outside the mask may be any number, even one outside the vocabulary.
    rows = (*np.nonzero(loss_mask), np.asarray(targets)[np.nonzero(loss_mask)])
    one_hot = np.zeros_like(out)
    one_hot[rows] = 1
    d_out = (np.exp(log_probabilities) - one_hot) * np.asarray(loss_mask)[:, :, None]
    return -float(log_probabilities[rows].sum()), backward(d_out)
