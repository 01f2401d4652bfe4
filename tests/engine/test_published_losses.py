"""Published models that want more than one loss, or batches without common rows, against plain optax on one device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from plain_training import list_arrays
from zoo_images import CLIPPED, MOMENTUM, named

import jaxopt_llm
from jaxopt_llm.config import Config

ROWS, WIDTH, STEPS = 16, 16, 3
Batch = dict[str, np.ndarray]
Random = np.random.RandomState


def make_config(mesh: dict[str, int], accumulation: int = 1) -> Config:
    return Config(mesh=mesh, precision={"compute_dtype": "float32"}, training={"accumulation": accumulation})


def normal(random: Random, *shape: int) -> np.ndarray:
    return random.randn(ROWS, *shape).astype(np.float32)


def split_by(model: nnx.Module, name: str) -> tuple[Any, Any, Any]:
    """Return the definition, the parameters of one part of the model, and the rest."""

    def is_trained(path: Sequence[Any], value: Any) -> bool:
        return isinstance(value, nnx.Param) and path[0] == name

    graph, parameters, rest = nnx.split(model, is_trained, ...)
    return graph, parameters, rest


def train_plainly(
    model: nnx.Module, turns: Sequence[tuple[str, Batch]], losses: Mapping[str, Any], optimizers: Mapping[str, Any]
) -> tuple[list[float], nnx.Module]:
    """Train the part of each loss by its own optimizer, on one device."""
    states = {name: optimizers[name].init(split_by(model, name)[1]) for name in losses}

    @nnx.jit(static_argnames="name")
    def update(model: Any, state: Any, batch: Any, name: str) -> Any:
        graph, parameters, rest = split_by(model, name)

        def compute(parameters: Any) -> Any:
            own = nnx.merge(graph, parameters, rest, copy=True)
            output = losses[name](own, batch)
            return output, split_by(own, name)[2]

        (value, rest), gradients = jax.value_and_grad(compute, has_aux=True)(parameters)
        updates, state = optimizers[name].update(gradients, state, parameters)
        nnx.update(model, nnx.merge_state(optax.apply_updates(parameters, updates), rest))
        return value, state

    taken = []
    for name, batch in turns:
        value, states[name] = update(model, states[name], batch, name)
        taken.append(float(value))
    return taken, model


# --- A generator and its critic (Goodfellow et al. 2014), with BatchNorm, spectral norm left out, and noise in the loss


class Generator(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(4, 2 * WIDTH, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.norm = nnx.BatchNorm(2 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(2 * WIDTH, 8, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, code: jax.Array) -> jax.Array:
        return jnp.tanh(self.out(nnx.relu(self.norm(self.up(code)))))


class Critic(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(8, WIDTH, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.drop, self.out = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(nnx.leaky_relu(self.hidden(x))))[:, 0]


class Gan(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.generator, self.critic, self.rngs = Generator(rngs), Critic(rngs), rngs

    def draw(self, rows: int) -> jax.Array:
        return self.generator(jax.random.normal(self.rngs.noise(), (rows, 4)))


def fool(model: Gan, batch: Any) -> jax.Array:
    return jnp.mean(nnx.softplus(-model.critic(model.draw(batch["x"].shape[0]))))


def tell_apart(model: Gan, batch: Any) -> jax.Array:
    """With a penalty of the slope at real data (Mescheder et al. 2018)."""
    drawn = jax.lax.stop_gradient(model.draw(batch["x"].shape[0]))
    slope = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ model.critic.hidden.kernel[...])))(batch["x"])
    values = nnx.softplus(-model.critic(batch["x"])) + nnx.softplus(model.critic(drawn))
    return jnp.mean(values) + 0.1 * jnp.mean(jnp.sum(slope**2, axis=-1))


# --- An actor with its critic and a temperature (Haarnoja et al. 2018)

SENSES, ACTIONS = 5, 2


class Net(nnx.Module):
    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(inputs, 2 * WIDTH, kernel_init=named("embed", "mlp"), rngs=rngs)
        self.out = nnx.Linear(2 * WIDTH, outputs, kernel_init=named("mlp", "embed"), rngs=rngs)

    def __call__(self, *x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(jnp.concatenate(x, axis=-1))))


class Target(nnx.Variable[Any]):
    """A weight of the target network, a mean of the critic's over time."""


class ActorCritic(nnx.Module):
    """Two critics as one stack, and their targets."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.actor = Net(SENSES, 2 * ACTIONS, rngs)
        self.critic = nnx.List([Net(SENSES + ACTIONS, 1, rngs) for _ in range(2)])
        self.target = nnx.data(jax.tree.map(Target, nnx.to_pure_dict(nnx.state(self.critic))))
        self.temperature, self.rngs = nnx.Dict(log=nnx.Param(jnp.float32(-1.0))), rngs

    def act(self, senses: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, log_scale = jnp.split(self.actor(senses), 2, axis=-1)
        log_scale = jnp.clip(log_scale, -5, 2)
        noise = jax.random.normal(self.rngs.action(), mean.shape)
        raw = mean + jnp.exp(log_scale) * noise
        squashed = 2 * (jnp.log(2.0) - raw - nnx.softplus(-2 * raw))
        return jnp.tanh(raw), jnp.sum(-0.5 * noise**2 - log_scale - squashed, axis=-1)

    def judge(self, *x: jax.Array) -> jax.Array:
        return jnp.concatenate([critic(*x) for critic in self.critic], axis=-1)

    def judge_by_target(self, *x: jax.Array) -> jax.Array:
        """Judge, and move the target a step towards the critics."""
        graph, state = nnx.split(self.critic)
        weights, frozen = nnx.to_pure_dict(state), jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(frozen, jax.tree.map(lambda each: each[...], self.target, is_leaf=_is_target))
        values = jnp.concatenate([critic(*x) for critic in nnx.merge(graph, frozen)], axis=-1)
        jax.tree.map(
            lambda old, new: old.set_value(0.9 * old[...] + 0.1 * new), self.target, weights, is_leaf=_is_target
        )
        return values


def _is_target(leaf: Any) -> bool:
    return isinstance(leaf, Target)


def judge_actions(model: ActorCritic, batch: Any) -> jax.Array:
    action, likelihood = model.act(batch["next"])
    ahead = jnp.min(model.judge_by_target(batch["next"], action), axis=-1)
    ahead = ahead - jnp.exp(model.temperature["log"][...]) * likelihood
    expected = jax.lax.stop_gradient(batch["reward"] + 0.9 * ahead)
    return jnp.mean((model.judge(batch["senses"], batch["action"]) - expected[:, None]) ** 2)


def improve_actor(model: ActorCritic, batch: Any) -> jax.Array:
    action, likelihood = model.act(batch["senses"])
    value = jnp.min(model.judge(batch["senses"], action), axis=-1)
    return jnp.mean(jnp.exp(jax.lax.stop_gradient(model.temperature["log"][...])) * likelihood - value)


def set_temperature(model: ActorCritic, batch: Any) -> jax.Array:
    likelihood = jax.lax.stop_gradient(model.act(batch["senses"])[1])
    return -jnp.mean(model.temperature["log"][...] * (likelihood - ACTIONS))


def memories(random: Random) -> Batch:
    return {
        "senses": normal(random, SENSES),
        "next": normal(random, SENSES),
        "action": np.tanh(normal(random, ACTIONS)),
        "reward": normal(random),
    }


MODELS: dict[str, tuple[Callable[[nnx.Rngs], nnx.Module], dict[str, Any], Callable[[Random], Batch]]] = {
    "gan": (Gan, {"critic": tell_apart, "generator": fool}, lambda random: {"x": normal(random, 8)}),
    "actor-critic": (
        ActorCritic,
        {"critic": judge_actions, "actor": improve_actor, "temperature": set_temperature},
        memories,
    ),
}


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_several_losses(name: str, mesh: dict[str, int]) -> None:
    make, losses, batch = MODELS[name]
    optimizers = dict(zip(losses, (CLIPPED, MOMENTUM, MOMENTUM), strict=False))
    # The first loss is trained twice as often.
    order = [*losses, next(iter(losses))] * 2
    turns = [(each, batch(Random(step))) for step, each in enumerate(order)]
    with nnx.use_eager_sharding(False):
        expected, model = train_plainly(make(nnx.Rngs(0, noise=1, action=2)), turns, losses, optimizers)
    engine = jaxopt_llm.initialize(
        lambda: make(nnx.Rngs(0, noise=1, action=2)),
        losses,
        batch(Random(0)),
        make_config(mesh),
        optimizers,
        rules={"mlp": "tensor", "embed": None} if "tensor" in mesh else None,
    )
    taken = [float(engine.step(each, loss=one)["loss"]) for one, each in turns]
    np.testing.assert_allclose(taken, expected, rtol=1e-5, atol=1e-5)
    arrays, theirs = list_arrays(engine.model()), list_arrays(model)
    assert arrays.keys() == theirs.keys()
    for path, array in arrays.items():
        np.testing.assert_allclose(array, theirs[path], rtol=1e-5, atol=1e-5, err_msg=path)


# --- Graphs in flat form: nodes and edges of all graphs in a row, with the index of their graph (Battaglia et al. 2018)

NODES, EDGES, GRAPHS = 24, 40, 4


class GraphNet(nn.Module):
    """Two rounds of messages with dropout. The last graph is padding."""

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        nodes, edges = nn.Dense(WIDTH)(batch["nodes"]), nn.Dense(WIDTH)(batch["edges"])
        whole = jnp.zeros((GRAPHS, WIDTH))
        for _ in range(2):
            parts = [edges, nodes[batch["senders"]], nodes[batch["receivers"]], whole[batch["graph_of_edge"]]]
            edges = edges + nn.Dropout(0.1, deterministic=False)(nn.relu(nn.Dense(WIDTH)(jnp.concatenate(parts, -1))))
            incoming = jax.ops.segment_sum(edges, batch["receivers"], NODES)
            outgoing = jax.ops.segment_sum(edges, batch["senders"], NODES)
            parts = [nodes, incoming, outgoing, whole[batch["graph_of_node"]]]
            nodes = nodes + nn.relu(nn.Dense(WIDTH)(jnp.concatenate(parts, -1)))
            parts = [jax.ops.segment_sum(nodes, batch["graph_of_node"], GRAPHS), whole]
            whole = nn.LayerNorm()(whole + nn.relu(nn.Dense(WIDTH)(jnp.concatenate(parts, -1))))
        return nn.Dense(1)(whole)[:, 0]


def predict_graphs(model: GraphNet, batch: Any) -> Any:
    known = jnp.arange(GRAPHS) < batch["graphs"]
    losses = optax.sigmoid_binary_cross_entropy(model(batch), batch["label"])
    return jnp.sum(losses * known), jnp.sum(known)


def graphs(random: Random) -> Batch:
    """Return the arrays of a batch: 24 nodes, 40 edges, 4 graphs, and a scalar, the number of graphs that count."""
    graph_of_node = np.sort(random.randint(0, GRAPHS, NODES))
    ends = random.randint(0, NODES, (2, EDGES))
    return {
        "nodes": random.randn(NODES, 6).astype(np.float32),
        "edges": random.randn(EDGES, 3).astype(np.float32),
        "senders": ends[0],
        "receivers": ends[1],
        "graph_of_node": graph_of_node,
        "graph_of_edge": graph_of_node[ends[0]],
        "label": random.randint(0, 2, GRAPHS).astype(np.float32),
        "graphs": np.int32(GRAPHS - 1),
    }


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 4}], ids=str)
def test_graphs_in_flat_form(mesh: dict[str, int]) -> None:
    batches = [graphs(Random(step)) for step in range(STEPS)]
    module = GraphNet()
    params = jax.jit(lambda: module.init(jax.random.key(0), batches[0], method=predict_graphs))()["params"]
    state, expected = CLIPPED.init(params), []

    @jax.jit
    def update(params: Any, state: Any, batch: Any, step: Any) -> Any:
        rngs = {"params": jax.random.fold_in(jax.random.key(0), step)}

        def compute(params: Any) -> jax.Array:
            total, count = module.apply({"params": params}, batch, method=predict_graphs, rngs=rngs)
            return total / count

        value, gradients = jax.value_and_grad(compute)(params)
        updates, state = CLIPPED.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    for step, batch in enumerate(batches):
        value, params, state = update(params, state, batch, step)
        expected.append(float(value))
    engine = jaxopt_llm.initialize(module, predict_graphs, batches[0], make_config(mesh), CLIPPED)
    taken = [float(engine.step(batch)["loss"]) for batch in batches]
    np.testing.assert_allclose(taken, expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), engine.model()["params"], params)
