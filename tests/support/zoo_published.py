"""Models of published kinds, small, in NNX or Linen as their authors' code usually is, and their losses.

Each has a part that language models and classifiers lack: draws inside the loss, lengths and masks, state that the loss
updates, recurrence, complex numbers, determinants, or labels that are missing.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from plain_training import ROWS, Batch, Case
from zoo_functions import linear
from zoo_images import CLASSES, CLIPPED, LAMB, MASKED, MOMENTUM, RULES, WIDTH, classify, images, named

Random = np.random.RandomState


def normal(random: Random, *shape: int) -> np.ndarray:
    return random.randn(ROWS, *shape).astype(np.float32)


def pooled(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the mean over the positions of a mask. x: [rows, time, width], mask: [rows, time]."""
    return jnp.sum(x * mask[..., None], axis=1) / jnp.sum(mask, axis=1, keepdims=True)


# --- Diffusion (Ho et al. 2020) with classes, guidance without a classifier (Ho and Salimans 2022) and v-prediction

SIGNAL = np.cumprod(1 - np.linspace(0.02, 0.4, 8)).astype(np.float32)  # share of the image's variance by time


class Residual(nn.Module):
    """Two convolutions after group norms; the embedding scales and shifts the second norm."""

    @nn.compact
    def __call__(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        y = nn.Conv(WIDTH, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))
        scale, shift = jnp.split(nn.Dense(2 * WIDTH)(nn.silu(embedding))[:, None, None], 2, axis=-1)
        y = nn.Conv(WIDTH, (3, 3))(nn.silu(nn.GroupNorm(4)(y) * (1 + scale) + shift))
        return y + (x if x.shape[-1] == WIDTH else nn.Conv(WIDTH, (1, 1))(x))


class Denoiser(nn.Module):
    """A U-Net of two levels, with attention on the lower one. x: [rows, 4, 4, 1]."""

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array, label: jax.Array) -> jax.Array:
        angles = time[:, None] * 2.0 ** -jnp.arange(4.0)
        embedding = nn.Dense(WIDTH)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        embedding = embedding + nn.Embed(CLASSES + 1, WIDTH)(label)
        skip = Residual()(nn.Conv(WIDTH, (3, 3))(x), embedding)
        x = Residual()(nn.Conv(WIDTH, (3, 3), strides=(2, 2))(skip), embedding)
        tokens = nn.GroupNorm(4)(x).reshape(x.shape[0], 4, WIDTH)
        x = x + nn.MultiHeadDotProductAttention(2)(tokens).reshape(x.shape)
        x = jax.image.resize(x, skip.shape, "nearest")
        x = Residual()(jnp.concatenate([skip, x], -1), embedding)
        return nn.Conv(1, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))


def diffuse(model: Any, batch: Any) -> Any:
    x, rows = batch["image"], batch["image"].shape[0]
    time = jax.random.randint(model.make_rng("time"), (rows,), 0, len(SIGNAL))
    noise = jax.random.normal(model.make_rng("noise"), x.shape)
    label = jnp.where(jax.random.bernoulli(model.make_rng("drop"), 0.25, (rows,)), CLASSES, batch["label"])
    signal = jnp.asarray(SIGNAL)[time][:, None, None, None]
    velocity = jnp.sqrt(signal) * noise - jnp.sqrt(1 - signal) * x
    found = model(jnp.sqrt(signal) * x + jnp.sqrt(1 - signal) * noise, time, label)
    weights = jnp.minimum(signal / (1 - signal), 5.0)[:, 0, 0, 0]
    return jnp.mean(weights * jnp.mean((found - velocity) ** 2, axis=(1, 2, 3))), {"signal": jnp.mean(signal)}


# --- Speech: frames to characters by CTC (Graves et al. 2006), with a recurrent and a convolutional block

FRAMES, BANDS, LETTERS = 12, 6, 7


class Listener(nn.Module):
    """Masked bands, a convolution that halves the frames, an LSTM in both directions, and a depthwise convolution."""

    @nn.compact
    def __call__(self, sound: jax.Array, mask: jax.Array) -> jax.Array:
        first = jax.random.randint(self.make_rng("mask"), (sound.shape[0], 1), 0, BANDS)
        sound = jnp.where(jnp.arange(BANDS) == first, 0.0, sound.swapaxes(0, 1)).swapaxes(0, 1)
        x = nn.relu(nn.Conv(WIDTH, (3,), strides=(2,))(sound)) * mask[..., None]
        cells = [nn.RNN(nn.LSTMCell(WIDTH // 2)) for _ in range(2)]
        x = x + nn.Bidirectional(*cells)(x, seq_lengths=jnp.sum(mask, axis=1))
        gate, y = jnp.split(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)), 2, axis=-1)
        y = nn.Conv(WIDTH, (3,), feature_group_count=WIDTH)(nn.sigmoid(gate) * y * mask[..., None])
        y = nn.BatchNorm(use_running_average=False)(y, mask=jnp.broadcast_to(mask[..., None], y.shape))
        x = x + nn.Dropout(0.1, deterministic=False)(nn.Dense(WIDTH)(nn.silu(y)))
        return nn.Dense(LETTERS)(x)


def transcribe(model: Listener, batch: Any) -> Any:
    mask = jnp.arange(FRAMES // 2) < batch["frames"][:, None] // 2
    padding = jnp.arange(batch["text"].shape[1]) >= batch["letters"][:, None]
    losses = optax.ctc_loss(model(batch["sound"], mask), 1.0 - mask, batch["text"], padding.astype(jnp.float32))
    return jnp.sum(losses), jnp.sum(batch["letters"])


def speech(random: Random) -> Batch:
    return {
        "sound": normal(random, FRAMES, BANDS),
        "frames": random.randint(8, FRAMES + 1, ROWS),
        "text": random.randint(1, LETTERS, (ROWS, 2)),
        "letters": random.randint(1, 3, ROWS),
    }


# --- Graphs of at most five nodes as dense arrays: attention along the edges (Velickovic et al. 2018)

NODES, TARGETS = 5, 3


class GraphBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.ends = nnx.Linear(WIDTH, 2, use_bias=False, rngs=rngs)
        self.edge = nnx.Linear(2, 1, use_bias=False, rngs=rngs)
        self.message = nnx.Linear(WIDTH, WIDTH, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.update = nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, nodes: jax.Array, edges: jax.Array, joined: jax.Array) -> jax.Array:
        x = self.norm(nodes)
        sender, receiver = jnp.moveaxis(self.ends(x), -1, 0)
        scores = nnx.leaky_relu(receiver[:, :, None] + sender[:, None, :] + self.edge(edges)[..., 0])
        weights = nnx.softmax(jnp.where(joined, scores, -1e9), axis=-1) * joined
        return self.update(nodes, weights @ self.message(x))[0]


class GraphNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.first = nnx.Embed(6, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([GraphBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, TARGETS, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        present = jnp.arange(NODES) < batch["nodes"][:, None]
        joined = batch["joined"] & present[:, :, None] & present[:, None, :]
        x = self.first(self.embed(batch["kind"]))
        for block in self.blocks:
            x = block(x, batch["edge"], joined)
        return self.head(pooled(x, present))


def predict_properties(model: GraphNet, batch: Any) -> Any:
    """Labels that were not measured are NaN; the microbatches have different numbers of them."""
    known = ~jnp.isnan(batch["label"])
    losses = optax.sigmoid_binary_cross_entropy(model(batch), jnp.where(known, batch["label"], 0.0))
    return jnp.sum(jnp.where(known, losses, 0.0)), jnp.sum(known)


def molecules(random: Random) -> Batch:
    label = random.randint(0, 2, (ROWS, TARGETS)).astype(np.float32)
    label[random.rand(ROWS, TARGETS) < 0.3] = np.nan
    return {
        "kind": random.randint(0, 6, (ROWS, NODES)),
        "edge": normal(random, NODES, NODES, 2),
        "joined": random.rand(ROWS, NODES, NODES) < 0.5,
        "nodes": random.randint(2, NODES + 1, ROWS),
        "label": label,
    }


# --- State spaces: a diagonal complex recurrence by an associative scan, in both directions (Smith et al. 2023)

SAMPLES, STATES = 10, 4


class StateSpace(nnx.Module):
    """The parameters are real; pairs of them are complex numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def pair(*shape: int) -> nnx.Param[jax.Array]:
            return nnx.Param(nnx.initializers.normal(0.3)(rngs.params(), (*shape, 2)))

        self.decay = nnx.Param(jnp.full(STATES, -0.7))
        self.frequency = nnx.Param(math.pi * jnp.arange(STATES))
        self.into, self.out, self.through = pair(STATES, WIDTH), pair(WIDTH, 2 * STATES), nnx.Param(jnp.ones(WIDTH))
        self.log_step = nnx.Param(jnp.linspace(-4.0, -2.0, STATES))
        self.norm, self.gate = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def combine(left: Any, right: Any) -> Any:
            return left[0] * right[0], right[0] * left[1] + right[1]

        def recur(u: jax.Array) -> jax.Array:
            inputs = u @ (into * ((factor - 1) / eigenvalue)[:, None]).T
            factors = jnp.broadcast_to(factor, inputs.shape)
            scans = [jax.lax.associative_scan(combine, (factors, inputs), reverse=each)[1] for each in (False, True)]
            return 2 * (jnp.concatenate(scans, -1) @ out.T).real

        eigenvalue = jnp.minimum(self.decay[...], -1e-3) + 1j * self.frequency[...]
        factor = jnp.exp(eigenvalue * jnp.exp(self.log_step[...]))
        into, out = (each[..., 0] + 1j * each[..., 1] for each in (self.into[...], self.out[...]))
        u = self.norm(x)
        y = nnx.gelu(jax.vmap(recur)(u) + self.through[...] * u)
        return x + y * nnx.sigmoid(self.gate(y))


class StateSpaces(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.head = nnx.Linear(2, WIDTH, rngs=rngs), nnx.Linear(WIDTH, CLASSES, rngs=rngs)
        self.blocks = nnx.List([StateSpace(rngs) for _ in range(2)])

    def __call__(self, batch: Any) -> jax.Array:
        x = self.first(batch["signal"])
        for block in self.blocks:
            x = block(x)
        return self.head(pooled(x, jnp.arange(SAMPLES) < batch["samples"][:, None]))


def classify_signals(model: StateSpaces, batch: Any) -> jax.Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(batch), batch["label"]))


def signals(random: Random) -> Batch:
    return {
        "signal": normal(random, SAMPLES, 2),
        "samples": random.randint(3, SAMPLES + 1, ROWS),
        "label": random.randint(0, CLASSES, ROWS),
    }


# --- Two views without negatives: the target is a mean of the online encoder over time (Grill et al. 2020)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.LayerNorm()(linear(2 * WIDTH, "embed", "mlp")(x.reshape(x.shape[0], -1))))
        return linear(WIDTH, "mlp", "embed")(x)


class Byol(nn.Module):
    """The target's weights are a collection of variables, which each call updates."""

    @nn.compact
    def __call__(self, left: jax.Array, right: jax.Array) -> jax.Array:
        online = Encoder()
        x = Encoder()(online(jnp.concatenate([left, right])))
        weights = nn.meta.unbox(online.variables["params"])
        target = self.variable("target", "encoder", lambda: jax.tree.map(jnp.copy, weights))
        y = Encoder().apply({"params": target.value}, jnp.concatenate([right, left]))
        if not self.is_initializing():
            target.value = jax.tree.map(lambda old, new: 0.8 * old + 0.2 * new, target.value, weights)
        return optax.cosine_similarity(x, jax.lax.stop_gradient(y), epsilon=1e-6)


def match_views(model: Byol, batch: Any) -> jax.Array:
    x = batch["image"]
    noises = [0.2 * jax.random.normal(model.make_rng("view"), x.shape) for _ in range(2)]
    return 2 - 2 * jnp.mean(model(x + noises[0], jnp.flip(x, 2) + noises[1]))


# --- A convolutional VAE with a bound by several draws (Burda et al. 2016)

DRAWS, CODE = 3, 4


class Iwae(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, ...]:
        y = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), strides=(2, 2))(x)))
        mean, log_scale = jnp.split(nn.Dense(2 * CODE)(y.reshape(y.shape[0], -1)), 2, axis=-1)
        noise = jax.random.normal(self.make_rng("code"), (DRAWS, *mean.shape))
        code = mean + jnp.exp(log_scale) * noise
        y = nn.relu(nn.Dense(2 * 2 * 8)(code)).reshape(-1, 2, 2, 8)
        logits = nn.ConvTranspose(1, (2, 2), strides=(2, 2))(y).reshape(DRAWS, *x.shape)
        return logits, code, noise, log_scale


def bound(model: Iwae, batch: Any) -> Any:
    x = nn.sigmoid(batch["image"])
    logits, code, noise, log_scale = model(x)
    likelihood = -jnp.sum(optax.sigmoid_binary_cross_entropy(logits, x[None]), axis=(2, 3, 4))
    ratio = jnp.sum(0.5 * (noise**2 - code**2) + log_scale, axis=-1)
    each = jax.nn.logsumexp(likelihood + ratio, axis=0) - math.log(DRAWS)
    return -0.1 * jnp.mean(each), {"likelihood": jnp.mean(likelihood)}


# --- Reinforcement learning: an actor with its critic (Schulman et al. 2017) and values of actions (Mnih et al. 2015)

EPISODE, SENSES, ACTIONS = 5, 4, 3


class Actor(nn.Module):
    """A recurrent policy of a normal distribution, and a value. The state is zero after the end of an episode."""

    @nn.compact
    def __call__(self, senses: jax.Array, ended: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def advance(cell: nn.GRUCell, state: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            x, end = now
            return cell(jnp.where(end[:, None], 0.0, state), x)

        x = nn.tanh(nn.Dense(WIDTH, kernel_init=nn.initializers.orthogonal(2**0.5))(senses))
        scan = nn.scan(advance, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        _, x = scan(nn.GRUCell(WIDTH), jnp.zeros((x.shape[0], WIDTH)), (x, ended))
        log_scale = self.param("log_scale", nn.initializers.constant(-0.5), (ACTIONS,))
        return nn.Dense(ACTIONS)(x), log_scale, nn.Dense(1)(x)[..., 0]


def improve_policy(model: Actor, batch: Any) -> Any:
    mean, log_scale, value = model(batch["senses"], batch["ended"])
    z = (batch["action"] - mean) * jnp.exp(-log_scale)
    likelihood = -jnp.sum(0.5 * z**2 + log_scale, axis=-1)
    ratio = jnp.exp(likelihood - batch["likelihood"])
    clipped = jnp.clip(ratio, 0.8, 1.2)
    gain = jnp.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
    change = jnp.clip(value - batch["value"], -0.2, 0.2)
    error = jnp.maximum((value - batch["return"]) ** 2, (batch["value"] + change - batch["return"]) ** 2)
    loss = -jnp.mean(gain) + 0.5 * jnp.mean(error) - 0.01 * jnp.sum(log_scale)
    return loss, {"clipped": jnp.mean(ratio != clipped), "value": jnp.mean(value)}


def episodes(random: Random) -> Batch:
    return {
        "senses": normal(random, EPISODE, SENSES),
        "ended": random.rand(ROWS, EPISODE) < 0.2,
        "action": normal(random, EPISODE, ACTIONS),
    } | {name: normal(random, EPISODE) for name in ("likelihood", "advantage", "value", "return")}


class Target(nnx.Variable[Any]):
    """A weight of the target network."""


class Values(nnx.Module):
    """The value of the state, and the advantage of each action (Wang et al. 2016)."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(SENSES, 2 * WIDTH, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.state = nnx.Linear(2 * WIDTH, 1, rngs=rngs)
        self.action = nnx.Linear(2 * WIDTH, ACTIONS, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, senses: jax.Array) -> jax.Array:
        x = nnx.relu(self.hidden(senses))
        advantages = self.action(x)
        return self.state(x) + advantages - jnp.mean(advantages, axis=-1, keepdims=True)


class Dqn(nnx.Module):
    """Values of actions, and a copy of the network that every second call renews."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.online = Values(rngs)
        weights = nnx.to_pure_dict(nnx.state(self.online))
        self.target, self.calls = nnx.data(jax.tree.map(Target, weights)), Target(jnp.uint32(0))

    def look_ahead(self, senses: jax.Array) -> jax.Array:
        """Return the values by the target network, which is then renewed."""
        graph, state = nnx.split(self.online)
        weights = nnx.to_pure_dict(state)
        frozen = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(frozen, jax.tree.map(lambda each: each[...], self.target, is_leaf=_is_target))
        values = nnx.merge(graph, frozen)(senses)
        renew = self.calls[...] % 2 == 1
        jax.tree.map(
            lambda old, new: old.set_value(jnp.where(renew, new, old[...])), self.target, weights, is_leaf=_is_target
        )
        self.calls[...] += 1
        return jax.lax.stop_gradient(values)


def _is_target(leaf: Any) -> bool:
    return isinstance(leaf, Target)


def predict_values(model: Dqn, batch: Any) -> Any:
    """The online network chooses the next action, and the target judges it (Van Hasselt et al. 2016)."""
    chosen = jnp.argmax(model.online(batch["next"]), axis=-1)
    ahead = jnp.take_along_axis(model.look_ahead(batch["next"]), chosen[:, None], axis=1)[:, 0]
    expected = batch["reward"] + jnp.where(batch["ended"], 0.0, 0.9 * ahead)
    value = jax.vmap(lambda values, action: values[action])(model.online(batch["senses"]), batch["action"])
    losses = optax.huber_loss(value, expected)
    return jnp.sum(batch["weight"] * losses), jnp.sum(batch["weight"])


def memories(random: Random) -> Batch:
    return {
        "senses": normal(random, SENSES),
        "next": normal(random, SENSES),
        "action": random.randint(0, ACTIONS, ROWS),
        "reward": normal(random),
        "ended": random.rand(ROWS) < 0.2,
        "weight": (0.5 + random.rand(ROWS)).astype(np.float32),
    }


# --- Sums as text: an LSTM to an LSTM that sometimes reads its own prediction (Bengio et al. 2015)

SYMBOLS, QUESTION, ANSWER = 12, 6, 4


class Speaker(nn.Module):
    """One step of the decoder."""

    @nn.compact
    def __call__(self, carry: Any, right: jax.Array) -> tuple[Any, jax.Array]:
        state, said = carry
        own = jax.random.bernoulli(self.make_rng("choice"), 0.25, right.shape[:1])
        state, x = nn.LSTMCell(WIDTH)(state, nn.Embed(SYMBOLS, WIDTH)(jnp.where(own, said, right)))
        logits = nn.Dense(SYMBOLS)(x)
        return (state, jax.random.categorical(self.make_rng("word"), logits)), logits


class Calculator(nn.Module):
    @nn.compact
    def __call__(self, question: jax.Array, length: jax.Array, answer: jax.Array) -> jax.Array:
        reader = nn.RNN(nn.LSTMCell(WIDTH), return_carry=True)
        state, _ = reader(nn.Embed(SYMBOLS, WIDTH)(question), seq_lengths=length)
        streams = {"params": False, "choice": True, "word": True}
        scan = nn.scan(Speaker, variable_broadcast="params", split_rngs=streams, in_axes=1, out_axes=1)
        return scan()((state, answer[:, 0]), answer[:, :-1])[1]


def calculate(model: Calculator, batch: Any) -> Any:
    logits, right = model(batch["question"], batch["symbols"], batch["answer"]), batch["answer"][:, 1:]
    mask = right > 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, right)
    right_ones = mask * (jnp.argmax(logits, -1) == right)
    return (jnp.sum(losses * mask), jnp.sum(mask)), {"accuracy": jnp.sum(right_ones) / jnp.sum(mask)}


def sums(random: Random) -> Batch:
    answer = random.randint(1, SYMBOLS, (ROWS, ANSWER + 1))
    answer[np.arange(ANSWER + 1) > random.randint(1, ANSWER + 1, (ROWS, 1))] = 0
    return {
        "question": random.randint(1, SYMBOLS, (ROWS, QUESTION)),
        "symbols": random.randint(2, QUESTION + 1, ROWS),
        "answer": answer,
    }


# --- Pixels one by one: gated convolutions that see only earlier pixels (Salimans et al. 2017)

COMPONENTS, LEVELS = 2, 16


def earlier(size: int, inputs: int, outputs: int, itself: bool) -> np.ndarray:
    """Return a mask of a kernel, 1 at the pixels before the middle one, and at the middle one if `itself`."""
    before = np.arange(size * size) < size * size // 2 + itself
    return np.broadcast_to(before.reshape(size, size, 1, 1), (size, size, inputs, outputs)).astype(np.float32)


class PixelCnn(nn.Module):
    """x: [rows, height, width, 1]. Return weights, means and scales of a mixture for each pixel."""

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        x = nn.Conv(WIDTH, (3, 3), mask=earlier(3, 1, WIDTH, itself=False))(x)
        for _ in range(2):
            y = nn.Conv(2 * WIDTH, (3, 3), mask=earlier(3, 2 * WIDTH, 2 * WIDTH, itself=True))(
                nn.elu(jnp.concatenate([x, -x], -1))
            )
            value, gate = jnp.split(nn.Dropout(0.2, deterministic=False)(y), 2, axis=-1)
            x = x + value * nn.sigmoid(gate)
        return jnp.split(nn.Dense(3 * COMPONENTS)(nn.elu(x)), 3, axis=-1)


def predict_pixels(model: PixelCnn, batch: Any) -> jax.Array:
    """The likelihood of a level is the mass of a mixture of logistic distributions between its neighbours."""
    level = jnp.round(nn.sigmoid(batch["image"]) * (LEVELS - 1))
    x = 2 * level / (LEVELS - 1) - 1
    weights, means, log_scales = model(x)
    slope = jnp.exp(-jnp.maximum(log_scales, -5.0))
    above = nn.log_sigmoid((x - means + 1 / (LEVELS - 1)) * slope)
    below = nn.log_sigmoid(-(x - means - 1 / (LEVELS - 1)) * slope)
    inside = jnp.log(-jnp.expm1(-2 * slope / (LEVELS - 1)))
    mass = jnp.where(level == 0, above, jnp.where(level == LEVELS - 1, below, above + below + inside))
    return -jnp.mean(jax.nn.logsumexp(nn.log_softmax(weights) + mass, axis=-1))


# --- Vector quantisation, its codebook a mean over time (Van den Oord et al. 2017)

CODES = 6


class Codebook(nnx.Variable[Any]):
    """An array of the codebook, which the loss updates."""


class VqVae(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Conv(1, WIDTH, (2, 2), strides=(2, 2), rngs=rngs)
        self.into, self.out = nnx.Linear(WIDTH, CODE, rngs=rngs), nnx.Linear(CODE, WIDTH, rngs=rngs)
        self.decoder = nnx.Linear(WIDTH, 4, rngs=rngs)
        sums = jax.random.normal(rngs.codes(), (CODES, CODE))
        self.sums, self.counts = Codebook(sums), Codebook(jnp.ones(CODES))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y = self.into(nnx.relu(self.encoder(x)))
        codes = self.sums[...] / self.counts[...][:, None]
        distances = jnp.sum((y[..., None, :] - codes) ** 2, axis=-1)
        chosen = nnx.one_hot(jnp.argmin(distances, axis=-1), CODES)
        code = chosen @ codes
        self.counts[...] = 0.8 * self.counts[...] + 0.2 * jnp.sum(chosen, axis=(0, 1, 2))
        update = jnp.einsum("bhwk,bhwc->kc", chosen, jax.lax.stop_gradient(y))
        self.sums[...] = 0.8 * self.sums[...] + 0.2 * update
        drawn = self.decoder(nnx.relu(self.out(y + jax.lax.stop_gradient(code - y))))
        rows, height, width, _ = x.shape
        drawn = drawn.reshape(rows, height // 2, width // 2, 2, 2).swapaxes(2, 3).reshape(x.shape)
        return drawn, jnp.mean((y - jax.lax.stop_gradient(code)) ** 2), jnp.mean(jnp.max(chosen, axis=(1, 2)))


def compress(model: VqVae, batch: Any) -> Any:
    drawn, commitment, used = model(batch["image"])
    return jnp.mean((drawn - batch["image"]) ** 2) + 0.25 * commitment, {"commitment": commitment, "used": used}


# --- Normalising flow: scales, mixtures of channels and couplings (Kingma and Dhariwal 2018)

CHANNELS = 4


class FlowStep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.log_scale, self.shift = nnx.Param(jnp.full(CHANNELS, 0.1)), nnx.Param(jnp.zeros(CHANNELS))
        self.mix = nnx.Param(nnx.initializers.orthogonal()(rngs.params(), (CHANNELS, CHANNELS)))
        self.up = nnx.Linear(CHANNELS // 2, WIDTH, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(WIDTH, CHANNELS, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = (x * jnp.exp(self.log_scale[...]) + self.shift[...]) @ self.mix[...]
        kept, changed = jnp.split(x, 2, axis=-1)
        log_scale, shift = jnp.split(self.down(nnx.tanh(self.up(kept))), 2, axis=-1)
        x = jnp.concatenate([changed * jnp.exp(nnx.tanh(log_scale)) + shift, kept], axis=-1)
        volume = jnp.sum(nnx.tanh(log_scale), axis=-1) + jnp.sum(self.log_scale[...])
        return x, volume + jnp.linalg.slogdet(self.mix[...])[1]


class Flow(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.steps = nnx.List([FlowStep(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logarithm of the density of each row."""
        volume = jnp.zeros(x.shape[0])
        for step in self.steps:
            x, change = step(x)
            volume += change
        return volume - 0.5 * jnp.sum(x**2 + math.log(2 * math.pi), axis=-1)


def fit_density(model: Flow, batch: Any) -> jax.Array:
    return -jnp.mean(model(batch["x"]))


# --- MLP-Mixer (Tolstikhin et al. 2021), its blocks as a rematerialised loop, some of them skipped


class MixerBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        keep = jax.random.bernoulli(self.make_rng("skip"), 0.8, (x.shape[0], 1, 1)) / 0.8
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        x = x + keep * nn.Dense(y.shape[-1])(nn.gelu(nn.Dense(8)(y))).swapaxes(1, 2)
        y = nn.gelu(linear(2 * WIDTH, "embed", "mlp")(nn.LayerNorm()(x)))
        return x + keep * linear(WIDTH, "mlp", "embed")(y), None


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (2, 2), strides=(2, 2))(x).reshape(x.shape[0], -1, WIDTH)
        scan = nn.scan(
            nn.remat(MixerBlock, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "skip": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return nn.Dense(CLASSES)(jnp.mean(nn.LayerNorm()(scan()(x, None)[0]), axis=1))


CASES = {
    "graph": Case(lambda: GraphNet(nnx.Rngs(0)), predict_properties, molecules, CLIPPED, RULES),
    "dqn": Case(lambda: Dqn(nnx.Rngs(0)), predict_values, memories, CLIPPED, RULES),
    "diffusion": Case(Denoiser(), diffuse, images(4), CLIPPED),
    "state_space": Case(lambda: StateSpaces(nnx.Rngs(0)), classify_signals, signals, LAMB),
    "byol": Case(Byol(), match_views, images(4), MASKED, RULES),
    "iwae": Case(Iwae(), bound, images(4), MOMENTUM),
    "flow": Case(lambda: Flow(nnx.Rngs(0)), fit_density, lambda random: {"x": normal(random, CHANNELS)}, LAMB, RULES),
    "speech": Case(Listener(), transcribe, speech, CLIPPED),
    "mixer": Case(Mixer(), classify, images(4), MASKED, RULES),
    "ppo": Case(Actor(), improve_policy, episodes, CLIPPED),
    "seq2seq": Case(Calculator(), calculate, sums, CLIPPED),
    "vqvae": Case(lambda: VqVae(nnx.Rngs(0, codes=1)), compress, images(4), MOMENTUM),
    "pixelcnn": Case(PixelCnn(), predict_pixels, images(4), MASKED),
}
