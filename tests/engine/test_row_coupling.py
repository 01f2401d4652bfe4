"""Losses that are no means over rows are found at `initialize`, if there are microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from plain_training import train_plainly
from test_equality import CASES, Setting, make_engine

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.row_coupling import describe_coupling

ROWS, WIDTH, CLASSES = 8, 5, 6
SOFTMAX = "it normalises by a sum of exponentials over rows"
PAIRS, MOMENTS = "it compares all rows with each other", "it is a nonlinear function of a product that sums over rows"
BATCH = {
    "x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    "y": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    "label": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    "sequence": jax.ShapeDtypeStruct((ROWS, 4, WIDTH), jnp.float32),
}
Batch = dict[str, jax.Array]
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def encode(w: jax.Array, x: jax.Array) -> jax.Array:
    code = x @ w
    return code / jnp.linalg.norm(code, axis=-1, keepdims=True)


# --- coupled losses


def contrast(w: jax.Array, batch: Batch) -> jax.Array:
    """CLIP's (Radford et al. 2021, arXiv:2103.00020)."""
    return cross_entropy(encode(w, batch["x"]) @ encode(w, batch["y"]).T, jnp.arange(ROWS)).mean()


def contrast_views(w: jax.Array, batch: Batch) -> jax.Array:
    """SimCLR's, with both views in one array (Chen et al. 2020, arXiv:2002.05709)."""
    codes = jnp.stack([encode(w, batch["x"]), encode(w, batch["y"])]).reshape(2 * ROWS, CLASSES)
    similar = codes @ codes.T - 1e9 * jnp.eye(2 * ROWS)
    return cross_entropy(similar, jnp.roll(jnp.arange(2 * ROWS), ROWS)).mean()


def triplets(w: jax.Array, batch: Batch) -> jax.Array:
    """Of the hardest triplets in a batch (Hermans et al. 2017, arXiv:1703.07737)."""
    codes = encode(w, batch["x"])
    distances = ((codes[:, None] - codes[None]) ** 2).sum(-1)
    same = batch["label"][:, None] == batch["label"][None]
    hardest = jnp.where(same, distances, 0).max(1) - jnp.where(same, 1e9, distances).min(1)
    return jax.nn.relu(hardest + 1).mean()


def contrast_by_vmap(w: jax.Array, batch: Batch) -> jax.Array:
    codes, others = encode(w, batch["x"]), encode(w, batch["y"])
    return jax.vmap(lambda code, row: cross_entropy(others @ code, row))(codes, jnp.arange(ROWS)).mean()


def contrast_by_map(w: jax.Array, batch: Batch) -> jax.Array:
    codes, others = encode(w, batch["x"]), encode(w, batch["y"])
    return jax.lax.map(lambda each: cross_entropy(others @ each[0], each[1]), (codes, jnp.arange(ROWS))).mean()


def contrast_within_calls(w: jax.Array, batch: Batch) -> jax.Array:
    return jax.jit(jax.checkpoint(contrast))(w, batch)


def contrast_after_layers(w: jax.Array, batch: Batch) -> jax.Array:
    x = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w @ w.T), None), batch["x"], None, length=3)[0]
    return cross_entropy(x @ batch["y"].T, jnp.arange(ROWS)).mean()


def kernel_distance(w: jax.Array, batch: Batch) -> jax.Array:
    """Maximum mean discrepancy (Gretton et al. 2012)."""
    codes, others = encode(w, batch["x"]), encode(w, batch["y"])

    def similarity(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.exp(-((a[:, None] - b[None]) ** 2).sum(-1)).mean()

    return similarity(codes, codes) + similarity(others, others) - 2 * similarity(codes, others)


def decorrelate(w: jax.Array, batch: Batch) -> jax.Array:
    """Barlow Twins' loss (Zbontar et al. 2021, arXiv:2103.03230)."""
    left, right = ((code - code.mean(0)) / code.std(0) for code in (batch["x"] @ w, batch["y"] @ w))
    return jnp.sum((left.T @ right / ROWS - jnp.eye(CLASSES)) ** 2)


# --- losses whose rows are not coupled, or only by means over the batch


def masked_mean(w: jax.Array, batch: Batch) -> jax.Array:
    mask = (batch["label"] > 0).astype(jnp.float32)
    return mask @ jnp.tanh(batch["x"] @ w).sum(-1) / mask.sum()


def batch_norm(w: jax.Array, batch: Batch) -> jax.Array:
    x = batch["x"] @ w
    return cross_entropy((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5), batch["label"]).mean()


def experts(w: jax.Array, batch: Batch) -> jax.Array:
    """Experts with a capacity, to which one-hot products send the tokens of all rows, and a loss of their balance."""
    x = jnp.tanh(batch["sequence"].reshape(-1, WIDTH) @ w @ w.T)
    shares = jax.nn.softmax(x @ w)
    chosen = jax.nn.one_hot(shares.argmax(-1), CLASSES)
    places = jax.nn.one_hot(((jnp.cumsum(chosen, 0) - 1) * chosen).sum(-1).astype(int), 7)
    route = (chosen * shares)[..., None] * places[:, None]
    inner = jax.nn.gelu(jnp.einsum("tec,td->ecd", route, x) @ w) @ w.T
    y = jnp.einsum("tec,ecd->td", route, inner)
    return jnp.mean((y - x) ** 2) + 0.01 * jnp.sum(chosen.mean(0) * shares.mean(0))


def attention(w: jax.Array, batch: Batch) -> jax.Array:
    def one(x: jax.Array) -> jax.Array:
        return jax.nn.softmax((x @ w) @ (x @ w).T) @ x

    return jnp.mean((jax.vmap(one)(batch["sequence"]) + jax.lax.map(one, batch["sequence"])) ** 2)


def inner_step(w: jax.Array, batch: Batch) -> jax.Array:
    """MAML's (Finn et al. 2017, arXiv:1703.03400): the gradient of a step is a sum over rows, and returns into them."""
    gradient = jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)
    return jnp.mean((batch["y"] @ (w - 0.1 * gradient)) ** 2)


def picked_labels(w: jax.Array, batch: Batch) -> jax.Array:
    scores = jax.nn.log_softmax(batch["x"] @ w)
    picked = jnp.take_along_axis(scores, batch["label"][:, None], 1)[:, 0]
    return -jnp.mean(picked + scores[jnp.arange(ROWS), batch["label"]])


def groups_of_rows(w: jax.Array, batch: Batch) -> jax.Array:
    """Rewards that are normalised within groups of rows, as in GRPO."""
    rewards = (batch["x"] @ w).sum(-1).reshape(2, 4)
    return jnp.mean((rewards - rewards.mean(1, keepdims=True)) / rewards.std(1, keepdims=True))


def quantised(w: jax.Array, batch: Batch) -> jax.Array:
    x = batch["x"]
    distances = (x**2).sum(1, keepdims=True) - 2 * x @ w + (w**2).sum(0)
    return jnp.mean((w.T[distances.argmin(1)] - x) ** 2)


def mixed_up(w: jax.Array, batch: Batch) -> jax.Array:
    return cross_entropy((0.3 * batch["x"] + 0.7 * batch["x"][::-1]) @ w, batch["label"]).mean()


def squares_and_penalty(w: jax.Array, batch: Batch) -> jax.Array:
    each = jnp.tanh(batch["x"] @ w).sum(-1)
    slopes = jax.grad(lambda x: jnp.tanh(x @ w).sum())(batch["x"])
    return each @ each / ROWS + jnp.sum((w.T @ w) ** 2) + jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)


def contrast_between_groups(w: jax.Array, batch: Batch) -> jax.Array:
    """The rows are pairs of two views each, one after the other."""
    codes = encode(w, batch["x"]).reshape(ROWS // 2, 2, CLASSES)
    return cross_entropy(codes[:, 0] @ codes[:, 1].T, jnp.arange(ROWS // 2)).mean()


def weights_over_rows(w: jax.Array, batch: Batch) -> jax.Array:
    return jax.nn.softmax((batch["x"] @ w).sum(-1)) @ (batch["y"] @ w).sum(-1)


def listwise(w: jax.Array, batch: Batch) -> jax.Array:
    """ListNet's, over the rows as one list (Cao et al. 2007)."""
    return -jnp.mean(jax.nn.log_softmax(jnp.tanh(batch["x"] @ w), axis=0)[:, 0])


def divergence(w: jax.Array, batch: Batch) -> jax.Array:
    """A VAE's: exponentials are summed over rows, and temperatures divide."""
    mean, log_variance = jnp.split(batch["x"] @ w, 2, axis=-1)
    drawn = mean / jnp.exp(log_variance) + jax.nn.logsumexp(log_variance, axis=1, keepdims=True)
    weights = jnp.exp(batch["label"].astype(jnp.float32))
    return jnp.sum(jnp.exp(log_variance) + mean**2 - log_variance + drawn) / jnp.sum(weights) / jnp.exp(w[0, 0])


def preferences(w: jax.Array, batch: Batch) -> jax.Array:
    """Each chosen row is followed by the rejected one, as in DPO, and attention is within such a pair."""
    scores = (batch["x"] @ w).reshape(ROWS // 2, 2, CLASSES)
    mixed = jax.nn.softmax(jnp.einsum("pkc,pqc->pkq", scores, scores)) @ scores
    return -jax.nn.log_sigmoid(mixed[:, 0].sum(-1) * scores[:, 0].sum(-1) - scores[:, 1].sum(-1)).mean()


def printed_pairs(w: jax.Array, batch: Batch) -> jax.Array:
    """The loss does not depend on what it prints."""
    scores = batch["x"] @ w
    jax.debug.print("{}", scores @ scores.T)
    return jnp.mean(scores)


COUPLED = {
    **dict.fromkeys((contrast, contrast_views, triplets, contrast_by_vmap, contrast_by_map), PAIRS),
    **dict.fromkeys((contrast_within_calls, contrast_after_layers, kernel_distance, contrast_between_groups), PAIRS),
    decorrelate: MOMENTS,
    **dict.fromkeys((weights_over_rows, listwise), SOFTMAX),
}
UNCOUPLED = (
    *(masked_mean, batch_norm, experts, attention, inner_step, picked_labels, groups_of_rows, quantised, mixed_up),
    *(squares_and_penalty, preferences, divergence, printed_pairs),
)


def describe(loss: Callable[[jax.Array, Batch], jax.Array]) -> str | None:
    closed = jax.make_jaxpr(lambda w, batch: loss(w, batch))(jnp.zeros((WIDTH, CLASSES)), BATCH)
    return describe_coupling(closed, 0, 1, [leaf.shape[:1] == (ROWS,) for leaf in jax.tree.leaves(BATCH)])


@pytest.mark.parametrize("loss", COUPLED, ids=lambda loss: loss.__name__)
def test_products_between_rows_are_found(loss: Any) -> None:
    found = describe(loss)
    assert found is not None and found.startswith(COUPLED[loss]) and "test_row_coupling.py:" in found


@pytest.mark.parametrize("loss", UNCOUPLED, ids=lambda loss: loss.__name__)
def test_other_losses_are_not_named(loss: Any) -> None:
    assert describe(loss) is None


@pytest.mark.parametrize("name", [name for name in CASES if name != "clip"])
def test_no_model_of_the_zoo_is_named(name: str) -> None:
    """`initialize` would refuse it."""
    make_engine(Setting(name, 3, {"fsdp": 8}, 3))


def make_clip(accumulation: int, loss_over: Any = None) -> jaxopt_llm.Engine:
    case = CASES["clip"]
    config = Config(mesh={"fsdp": 4}, precision={"compute_dtype": "float32"}, training={"accumulation": accumulation})
    return jaxopt_llm.initialize(case.model, case.loss, case.batches(1)[0], config, case.optimizer, loss_over=loss_over)


def test_a_contrastive_loss_is_refused_with_microbatches() -> None:
    with pytest.raises(InputError, match=r"float32\[8, 8\] of .*zoo_images.py:\d+.*accumulation=3 microbatches; set"):
        make_clip(accumulation=3)
    make_clip(accumulation=1)
    make_clip(accumulation=3, loss_over="rows")


def test_a_loss_over_the_batch_is_refused_with_microbatches() -> None:
    make_clip(accumulation=1, loss_over="batch")
    with pytest.raises(InputError, match=r'loss_over="batch": the loss of the batch .*; set training.accumulation=1'):
        make_clip(accumulation=3, loss_over="batch")
    with pytest.raises(InputError, match=r"loss_over='row': give"):
        make_clip(accumulation=1, loss_over="row")


@pytest.mark.slow
def test_the_loss_of_a_batch_is_not_the_mean_over_its_microbatches() -> None:
    """What the refusal is about: each of them is the loss of plain optax, and they differ."""
    whole, apart = (train_plainly(CASES["clip"], accumulation, steps=1).losses[0] for accumulation in (1, 3))
    batch = CASES["clip"].batches(1)[0]
    assert float(make_clip(accumulation=1).step(batch)["loss"]) == pytest.approx(whole, rel=1e-5)
    assert float(make_clip(accumulation=3, loss_over="rows").step(batch)["loss"]) == pytest.approx(apart, rel=1e-5)
    assert abs(whole - apart) > 0.1 * whole
