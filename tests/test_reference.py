"""The reference against finite differences, and against what the attention masks promise."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from reference import Array, ReferenceConfig, Tree, logits, loss_and_gradients, tree_map

CONFIG = ReferenceConfig(
    vocabulary_size=11,
    heads=4,
    kv_heads=2,
    head_dim=6,
    window=3,
    rope_theta=100.0,
    norm_epsilon=1e-2,  # large enough that a backward which forgets it fails
    layout=((("global",), 1), (("sliding", "global"), 2)),
)
WIDTH, MLP_WIDTH, PADDED_VOCABULARY = 8, 10, 16
SEGMENT_IDS = np.array([[1] * 5 + [2] * 4, [1] * 7 + [0] * 2])
POSITIONS = np.array([[*range(5), *range(4)], [*range(7), *range(2)]])


def parameters(tied: bool) -> Tree:
    rng = np.random.default_rng(0)

    def block(n: int) -> Tree:
        d, f, h, g, k = WIDTH, MLP_WIDTH, CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim
        query, output, key_value = (n, d, h, k), (n, h, k, d), (n, d, g, k)
        return {
            "attention_norm": {"scale": (n, d)},
            "attention": {"query": query, "key": key_value, "value": key_value, "output": output},
            "mlp_norm": {"scale": (n, d)},
            "mlp": {"gate": (n, d, f), "up": (n, d, f), "down": (n, f, d)},
        }

    table = {"table": (PADDED_VOCABULARY, WIDTH)}
    non_layer = {"embedding": table, "final_norm": {"scale": (WIDTH,)}} | ({} if tied else {"head": table})
    segments = {
        f"segment_{i}": {f"block_{j}": block(repeats) for j in range(len(kinds))}
        for i, (kinds, repeats) in enumerate(CONFIG.layout)
    }
    return tree_map(lambda shape: rng.normal(scale=0.5, size=shape), {"non_layer": non_layer} | segments)


def inputs() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(CONFIG.vocabulary_size, size=(2, *SEGMENT_IDS.shape))
    loss_mask = (SEGMENT_IDS > 0) & (rng.random(SEGMENT_IDS.shape) < 0.8)
    return tokens, np.where(loss_mask, targets, -1), loss_mask


def leaves(tree: Tree) -> Iterator[Array]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from leaves(value)
        else:
            yield value


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_match_finite_differences(tied: bool):
    assert_finite_differences(parameters(tied), CONFIG, (*inputs(), SEGMENT_IDS, POSITIONS))


def assert_finite_differences(params: Tree, config: ReferenceConfig, batch: tuple[Array, ...]) -> None:
    """Leaf by leaf; params float64. batch: (tokens, targets, loss_mask, segment_ids, positions)."""
    _, gradients = loss_and_gradients(params, config, *batch)
    rng = np.random.default_rng(2)
    step = 1e-6  # a larger step would often cross the kink of a ReLU
    for leaf, gradient in zip(leaves(params), leaves(gradients), strict=True):
        original = leaf.copy()
        # Along the gradient's own signs nothing cancels, so that the relative error is meaningful.
        direction = np.abs(rng.normal(size=leaf.shape)) * np.where(gradient < 0, -1, 1)
        losses = []
        for sign in (1, -1):
            leaf[...] = original + sign * step * direction
            losses.append(loss_and_gradients(params, config, *batch)[0])
        leaf[...] = original
        np.testing.assert_allclose((losses[0] - losses[1]) / (2 * step), np.sum(gradient * direction), rtol=1e-6)


def test_padding_rows_get_no_gradient():
    _, gradients = loss_and_gradients(parameters(tied=False), CONFIG, *inputs(), SEGMENT_IDS, POSITIONS)
    for name in ("embedding", "head"):
        assert not gradients["non_layer"][name]["table"][CONFIG.vocabulary_size :].any()


def changed_logits(config: ReferenceConfig, row: int, column: int) -> Array:
    """Where [B, S] the logits change when one token does."""
    params, (tokens, _, _) = parameters(tied=False), inputs()
    other = tokens.copy()
    other[row, column] = (tokens[row, column] + 1) % config.vocabulary_size
    before, after = (logits(params, config, t, SEGMENT_IDS, POSITIONS) for t in (tokens, other))
    return (before != after).any(axis=-1)


@pytest.mark.parametrize("row, column, end", [(0, 2, 5), (0, 6, 9), (1, 3, 7), (1, 7, 9)])
def test_a_token_changes_only_the_rest_of_its_document(row: int, column: int, end: int):
    expected = np.zeros(SEGMENT_IDS.shape, bool)
    expected[row, column:end] = True
    np.testing.assert_array_equal(changed_logits(CONFIG, row, column), expected)


def test_a_sliding_block_sees_only_its_window():
    expected = np.zeros(SEGMENT_IDS.shape, bool)
    expected[1, 1 : 1 + CONFIG.window] = True
    np.testing.assert_array_equal(changed_logits(replace(CONFIG, layout=((("sliding",), 1),)), 1, 1), expected)


def test_only_relative_positions_matter():
    params, (tokens, _, _) = parameters(tied=False), inputs()
    near, far = (logits(params, CONFIG, tokens, SEGMENT_IDS, POSITIONS + shift) for shift in (0, 100))
    np.testing.assert_allclose(near, far, rtol=1e-9, atol=1e-9)
