"""Batches of several shapes, and arrays of a batch without rows: training is that of optax on one device."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_training import Case, list_arrays, train_plainly

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine import steps

FSDP, BOTH = {"fsdp": 8}, {"data": 2, "fsdp": 4}


def make_engine(model: Any, loss: Any, example: Any, accumulation: int = 1, **more: Any) -> jaxopt_llm.Engine:
    sections: dict[str, Any] = {"mesh": FSDP, "precision": {"compute_dtype": "float32"}}
    sections |= {"training": {"accumulation": accumulation}} | more.pop("sections", {})
    return jaxopt_llm.initialize(model, loss, example, Config(**sections), optax.adam(1e-2), **more)


def train(make: Callable[[], Any], loss: Any, steps: Sequence[Sequence[Any]]) -> tuple[list[float], Any]:
    """Train parameters on one device. steps: the microbatches of each step."""
    optimizer, params, losses = optax.adam(1e-2), make(), []
    state = optimizer.init(params)
    for batches in steps:
        found = [jax.value_and_grad(loss)(params, jax.tree.map(jnp.asarray, batch)) for batch in batches]
        value, gradients = jax.tree.map(lambda *each: sum(each) / len(each), *found)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return losses, params


def assert_equal(engine: jaxopt_llm.Engine, batches: Sequence[Any], losses: Sequence[float], params: Any) -> None:
    found = [float(engine.step(batch)["loss"]) for batch in batches]
    np.testing.assert_allclose(found, losses, rtol=1e-5, atol=1e-5)
    expected = list_arrays(params)
    for path, array in list_arrays(engine.model()).items():
        np.testing.assert_allclose(array, expected[path], rtol=1e-5, atol=1e-5, err_msg=path)


# --- Shapes


class Tagger(nnx.Module):
    """Layers over a sequence of any length; BatchNorm couples the rows."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.table, self.head = nnx.Embed(11, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)
        self.norm, self.mix = nnx.BatchNorm(16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.norm(jnp.tanh(self.mix(self.table(ids))))
        return self.head(x + x.mean(1, keepdims=True))


def tag(model: Tagger, batch: Any) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["ids"]), batch["tags"])
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


SIZES = [(16, 4), (16, 7), (12, 5), (16, 4)]  # rows, length


def draw(random: np.random.RandomState) -> dict[str, np.ndarray]:
    rows, length = SIZES[int(random.get_state()[1][0])]  # type: ignore[index]  # the seed, which is the step
    ids = random.randint(11, size=(rows, length))
    return {"ids": ids, "tags": ids % 3, "mask": (random.rand(rows, length) < 0.8).astype(np.float32)}


@pytest.mark.parametrize(("stage", "mesh", "accumulation"), [(3, FSDP, 1), (1, BOTH, 2)])
def test_each_shape_has_a_step_that_is_kept(
    stage: int, mesh: dict[str, int], accumulation: int, capfd: pytest.CaptureFixture[str]
) -> None:
    case = Case(Tagger, tag, draw, optax.adam(1e-2))
    expected, batches = train_plainly(case, accumulation, len(SIZES)), case.batches(len(SIZES))
    sections = {"mesh": mesh, "sharding": {"zero_stage": stage}}
    engine = make_engine(Tagger, tag, batches[0], accumulation, sections=sections)
    found = [float(engine.step(batch)["loss"]) for batch in batches]
    np.testing.assert_allclose(found, expected.losses, rtol=1e-5, atol=1e-5)
    for path, array in list_arrays(engine.model()).items():
        np.testing.assert_allclose(array, expected.arrays[path], rtol=1e-5, atol=1e-5, err_msg=path)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("compiles")]
    assert lines == [
        f"compiles another step, for batches of ids int32[{rows},{length}], mask float32[{rows},{length}], "
        f"tags int32[{rows},{length}]"
        for rows, length in SIZES[1:3]
    ]


def test_the_rows_of_a_smaller_batch_are_divided_over_the_devices() -> None:
    """Each device computes a share of 12 rows, and not all. With divided weights XLA divides the products anyway."""
    case = Case(Tagger, tag, draw, optax.adam(1e-2))
    whole = case.batches(1)[0]
    smaller = jax.tree.map(lambda leaf: leaf[:12], whole)
    engine = make_engine(Tagger, tag, whole, sections={"sharding": {"zero_stage": 0}})
    flops = [
        engine.steps.find(None, engine.place(batch)).compiled.cost_analysis()["flops"] for batch in (whole, smaller)
    ]
    assert flops[1] < 2 * flops[0]


def test_an_evaluation_takes_batches_of_any_size(capfd: pytest.CaptureFixture[str]) -> None:
    batches = Case(Tagger, tag, draw, optax.adam(1e-2)).batches(2)
    engine = make_engine(Tagger, tag, batches[0], accumulation=2)
    batches += [jax.tree.map(lambda leaf: leaf[:1], batches[1])]  # one row is no two microbatches
    found = engine.evaluate(batches)["loss"]
    model = Tagger()
    model.eval()
    parts = [tag(model, batch) for batch in batches]
    np.testing.assert_allclose(found, sum(p[0] for p in parts) / sum(p[1] for p in parts), rtol=1e-5)
    assert capfd.readouterr().err.count("compiles another evaluation") == 2


def test_fit_reads_batches_of_several_shapes(tmp_path: Path) -> None:
    case = Case(Tagger, tag, draw, optax.adam(1e-2))
    batches = case.batches(4)
    engine = jaxopt_llm.fit(make_engine(Tagger, tag, batches[0]), batches, 3, tmp_path / "run", held_out=batches[2:])
    other = make_engine(Tagger, tag, batches[0])
    for batch in batches[:3]:
        other.step(batch)
    for path, array in list_arrays(engine.model()).items():
        np.testing.assert_array_equal(array, list_arrays(other.model())[path])


def test_a_process_says_that_it_waits_with_shapes_that_only_it_has(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    batches = Case(Tagger, tag, draw, optax.adam(1e-2)).batches(2)
    engine = make_engine(Tagger, tag, batches[0])
    monkeypatch.setattr(engine.processes, "check_same", lambda *_: time.sleep(1.0))
    monkeypatch.setattr(steps, "WAIT_SECONDS", 0.1)
    engine.step(batches[1])
    assert capfd.readouterr().err.startswith("waits for the other processes: batches of ids int32[16,7], mask ")


def test_what_no_shape_can_be_is_refused() -> None:
    batch = Case(Tagger, tag, draw, optax.adam(1e-2)).batches(1)[0]
    engine = make_engine(Tagger, tag, batch, accumulation=2)
    with pytest.raises(InputError, match=r"batch: 3 rows are not divisible by training.accumulation=2"):
        engine.step(jax.tree.map(lambda leaf: leaf[:3], batch))
    with pytest.raises(InputError, match=r"tags int32\[16,2\] differs from the example, and the loss fails with it: "):
        engine.step({**batch, "tags": batch["tags"][:, :2]})
    with pytest.raises(InputError, match=r"batch: ids cannot be read as an array: .* inhomogeneous"):
        engine.step({**batch, "ids": [[1, 2], [1]]})
    with pytest.raises(InputError, match=r"ids: 0, mask: 0, tags: 0"):
        engine.step(jax.tree.map(lambda leaf: leaf[:0], batch))


def test_a_loss_for_evaluation_that_fails_is_not_said_to_be_a_batch_of_another_shape() -> None:
    weights = {"w": jnp.ones(4)}
    engine = jaxopt_llm.initialize(
        lambda: weights, lambda w, x: (x @ w["w"]).mean(), np.ones((8, 4)), evaluation_loss=lambda w, x: w["other"]
    )
    with pytest.raises(KeyError, match="other"):
        engine.evaluate([np.ones((8, 4))])


# --- Arrays without rows


class Graph(NamedTuple):
    """Graphs in jraph's flat form: nodes [N, 4], edges [E, 3], graph of each node [N], targets [G], and a scale."""

    nodes: Any
    edges: Any
    senders: Any
    receivers: Any
    graph: Any
    target: Any
    scale: Any


def draw_graph(step: int, nodes: int, edges: int, graphs: int) -> Graph:
    random = np.random.RandomState(step)
    return Graph(
        nodes=random.randn(nodes, 4).astype(np.float32),
        edges=random.randn(edges, 3).astype(np.float32),
        senders=random.randint(nodes, size=edges),
        receivers=random.randint(nodes, size=edges),
        graph=np.sort(random.randint(graphs, size=nodes)),
        target=random.randn(graphs).astype(np.float32),
        scale=np.float32(0.5 + step),
    )


def make_network() -> dict[str, jax.Array]:
    random = np.random.RandomState(7)
    shapes = {"node": (4, 8), "edge": (3, 8), "mix": (8, 8), "out": (8, 1)}
    return {name: jnp.asarray(random.randn(*shape) * 0.5, jnp.float32) for name, shape in shapes.items()}


def pass_messages(params: Any, graph: Graph) -> jax.Array:
    x = graph.nodes @ params["node"]
    messages = jnp.tanh(x[graph.senders] + graph.edges @ params["edge"])
    x = x + jax.ops.segment_sum(messages, graph.receivers, x.shape[0]) @ params["mix"]
    pooled = jax.ops.segment_sum(jnp.tanh(x), graph.graph, graph.target.shape[0])
    return jnp.mean((graph.scale * (pooled @ params["out"])[:, 0] - graph.target) ** 2)


@pytest.mark.parametrize(("sizes", "mesh"), [((16, 40, 8), FSDP), ((13, 37, 3), BOTH)])
def test_graphs_in_flat_form(sizes: tuple[int, int, int], mesh: dict[str, int]) -> None:
    graphs = [draw_graph(0, *sizes), draw_graph(1, 24, 24, 24), draw_graph(2, *sizes)]
    engine = make_engine(make_network, pass_messages, graphs[0], sections={"mesh": mesh})
    assert_equal(engine, graphs, *train(make_network, pass_messages, [[graph] for graph in graphs]))
    if mesh is FSDP:
        means = [float(pass_messages(engine.model(), graph)) for graph in graphs]
        np.testing.assert_allclose(engine.evaluate(graphs)["loss"], np.mean(means), rtol=1e-5)


def test_graphs_are_divided_over_the_devices() -> None:
    engine = make_engine(make_network, pass_messages, draw_graph(0, 64, 512, 8))
    placed = engine.place(draw_graph(0, 64, 512, 8))
    assert placed.pieces.edges.sharding.shard_shape((512, 3)) == (64, 3)
    assert placed.whole.scale.sharding.is_fully_replicated


def look_up(params: Any, batch: Any) -> jax.Array:
    x = jnp.tanh(batch["table"][batch["ids"]] @ params["node"])
    return jnp.mean((batch["temperature"] * (x @ params["out"])[:, 0] - batch["y"]) ** 2)


def draw_table(step: int, rows: int) -> dict[str, Any]:
    random = np.random.RandomState(step)
    return {
        "ids": random.randint(16, size=rows),
        "y": random.randn(rows).astype(np.float32),
        "table": random.randn(16, 4).astype(np.float32),
        "temperature": np.float32(1 + step),
    }


def halve(batch: dict[str, Any]) -> list[dict[str, Any]]:
    halves = [np.split(batch[name], 2) for name in ("ids", "y")]
    return [batch | {"ids": ids, "y": y} for ids, y in zip(*halves, strict=True)]


def test_each_microbatch_gets_a_table_and_a_scalar_whole() -> None:
    """The table has as many rows as the batch, so that only its declaration tells."""
    batches = [draw_table(0, 16), draw_table(1, 16), draw_table(2, 6)]
    engine = make_engine(make_network, look_up, batches[0], accumulation=2, replicated=("table",))
    assert_equal(engine, batches, *train(make_network, look_up, [halve(batch) for batch in batches]))


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    message = r"numbers of rows, .* \(ids: 32, table: 16, y: 32\), .* name those without rows in initialize\(replicated"
    with pytest.raises(InputError, match=message):
        make_engine(make_network, look_up, draw_table(0, 32), accumulation=2)
    with pytest.raises(InputError, match=r"replicated: tables matches no array of the example \(ids, table, "):
        make_engine(make_network, look_up, draw_table(0, 32), replicated=("tables",))
    make_engine(make_network, look_up, draw_table(0, 32))  # in one piece


# --- Cost


def test_a_step_leaves_its_batch_to_the_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, a function of JAX that places arrays would take longer than the rest of the step's Python."""
    engine = make_engine(make_vector, square, VECTORS)
    wanted = float(engine.step(VECTORS)["loss"])
    placed: list[Any] = []
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *arguments: placed.append(arguments))
    monkeypatch.setattr(jax, "device_put", lambda *arguments: placed.append(arguments))
    assert float(engine.step(VECTORS)["loss"]) < wanted and not placed


VECTORS = np.arange(32, dtype=np.float32).reshape(16, 2) / 32


def make_vector() -> dict[str, jax.Array]:
    return {"w": jnp.ones(2)}


def square(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ model["w"]) ** 2)
