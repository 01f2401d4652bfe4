"""What an engine does besides a step in float32: checkpoints, evaluation, the user's model, other precisions."""

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax._src.ad_checkpoint import saved_residuals
from plain_training import list_arrays, split_output
from test_equality import BOTH, CASES, FSDP, TENSOR, Setting, make_engine, reference

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.checks import EngineWarning
from jaxopt_llm.engine.engine import Engine
from jaxopt_llm.parallel.gathering import make_perturbations


def leaves(engine: Engine) -> dict[str, np.ndarray]:
    """Return the state by path, without the compute copy, which not every stage has."""
    return {path: np.asarray(leaf) for path, leaf in tree.leaves_with_path(engine.state.replace(compute=None))}


def assert_same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for path, array in left.items():
        np.testing.assert_array_equal(array, right[path], err_msg=path)


@pytest.mark.parametrize(
    ("setting", "other"),
    [
        (Setting("mlp", 2, TENSOR, 3), Setting("mlp", 3, FSDP, 1)),
        (Setting("vae", 3, FSDP, 1), Setting("vae", 0, BOTH, 3)),
        (Setting("linen_batchnorm", 1, BOTH, 3), Setting("linen_batchnorm", 3, FSDP, 1)),
        (Setting("functions", 3, BOTH, 1), Setting("functions", 2, FSDP, 3)),
    ],
    ids=str,
)
def test_a_checkpoint_continues_on_any_mesh(setting: Setting, other: Setting, tmp_path: Path) -> None:
    batches = CASES[setting.name].batches(4)
    uninterrupted = make_engine(setting)
    for batch in batches[:2]:
        uninterrupted.step(batch)
    saved = leaves(uninterrupted)
    uninterrupted.save(tmp_path)
    moved, resumed = make_engine(other), make_engine(setting)
    assert moved.restore(tmp_path) == resumed.restore(tmp_path) == 2
    assert_same_bits(leaves(moved), saved)
    for batch in batches[2:]:
        uninterrupted.step(batch)
        resumed.step(batch)
    assert_same_bits(leaves(resumed), leaves(uninterrupted))
    assert any(not np.array_equal(array, saved[path]) for path, array in leaves(resumed).items())


def mean_loss(case: Any, model: Any, batches: list[Any]) -> float:
    """Return the mean over all that the losses of these batches count."""
    parts = [split_output(case.loss(model, batch)) for batch in batches]
    return float(sum(total for total, _, _ in parts) / sum(count for _, count, _ in parts))


@pytest.mark.parametrize("name", ["bert", "mnist"])
def test_evaluation_is_the_mean_loss_without_dropout(name: str) -> None:
    """BERT's batches have different numbers of masked positions; the MNIST model normalises by its running means."""
    case, engine = CASES[name], make_engine(Setting(name, 3, FSDP, 3))
    before = leaves(engine)
    found = engine.evaluate(case.batches(3))
    model = engine.model()
    model.eval()
    microbatches = [
        {key: np.split(array, 3)[part] for key, array in batch.items()}
        for batch in case.batches(3)
        for part in range(3)
    ]
    np.testing.assert_allclose(found["loss"], mean_loss(case, model, microbatches), rtol=1e-5)
    assert 0 <= found["accuracy"] <= 1
    assert_same_bits(leaves(engine), before)


@pytest.mark.parametrize("name", ["mlp", "functions", "linen_batchnorm"])
def test_the_model_is_the_users_own(name: str) -> None:
    case, engine = CASES[name], make_engine(Setting(name, 3, FSDP, 1))
    first, second = case.batches(2)
    engine.step(first)
    model = engine.model()
    if isinstance(case.model, linen.Module):
        output, _ = case.model.apply(model, second, method=case.loss, mutable=["batch_stats"])
    else:
        assert type(model).__name__ == {"mlp": "Mlp", "functions": "dict"}[name]
        output = case.loss(model, second)
    total, count, _ = split_output(output)
    np.testing.assert_allclose(total / count, engine.step(second)["loss"], rtol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "mnist", "nested"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_train_like_float32(name: str, dtype: str) -> None:
    """The loss after some steps is that of float32 within the rounding of bfloat16, 2⁻⁸."""
    engine = make_engine(Setting(name, 3, FSDP, 3), precision={"compute_dtype": dtype})
    steps = [jax.device_get(engine.step(batch)) for batch in CASES[name].batches()]
    np.testing.assert_allclose([step["loss"] for step in steps], reference(name, 3).losses, rtol=2**-6)
    assert steps[-1]["skipped"] == 0
    assert all(array.dtype != dtype for array in list_arrays(engine.model()).values())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_sum_in_float16_does_not_overflow(accumulation: int) -> None:
    """The gradients of a sum over many numbers are those of the mean, times a count that is in float32."""

    def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        error = (batch["x"].astype(jnp.float16) @ model["w"]).astype(jnp.float32) - batch["y"]
        return jnp.sum(error**2), jnp.sum(batch["counts"]) * error.shape[1]

    batch = {"x": np.ones((64, 32), np.float32), "y": np.full((64, 64), 9.0, np.float32), "counts": np.ones(64)}
    config = Config(
        mesh=dict(fsdp=8),  # type: ignore[arg-type]
        training=dict(accumulation=accumulation),  # type: ignore[arg-type]
        precision=dict(compute_dtype="float16"),  # type: ignore[arg-type]
    )
    engine = jaxopt_llm.initialize(lambda: {"w": jnp.ones((32, 64)) / 32}, loss, batch, config, optax.sgd(0.1))
    metrics = engine.step(batch)
    assert not metrics["skipped"] and metrics["loss"] == pytest.approx(64.0, rel=1e-3)
    # Each of the 32 × 64 weights has the gradient 2 · (1 - 9) / 64.
    assert metrics["grad_norm"] == pytest.approx(np.sqrt(32 * 64) / 4, rel=1e-3)


def test_a_step_that_overflows_changes_nothing() -> None:
    precision = {"compute_dtype": "float16", "initial_loss_scale": 2.0**60}
    case, engine = CASES["mnist"], make_engine(Setting("mnist", 3, FSDP, 1), precision=precision)
    before = list_arrays(engine.model())
    metrics = engine.step(case.batches(1)[0])
    assert metrics["overflow"] and metrics["skipped"] == 1 and metrics["loss_scale"] == 2.0**59
    assert_same_bits(list_arrays(engine.model()), before)


def test_a_batch_that_is_refused_leaves_the_state() -> None:
    case, engine = CASES["mlp"], make_engine(Setting("mlp", 3, FSDP, 1))
    first, second = case.batches(2)
    engine.step(first)
    before = leaves(engine)
    for wrong in (
        {**second, "image": second["image"].reshape(-1, 16)},
        {**second, "image": second["image"][:, :2]},
        {**second, "label": second["label"] + 0.5},
        {"image": second["image"]},
        {**second, "label": second["label"][:8]},
    ):
        with pytest.raises(InputError, match=r"batch: (image|label|its arrays .*\(image: 24, label: 8\))"):
            engine.step(wrong)
    assert_same_bits(leaves(engine), before)


def test_outside_of_remat_no_gathered_weight_is_kept_for_the_backward() -> None:
    """Of the weights, the backward keeps those at rest, and gathers them again."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["product"]) ** 2) + jnp.mean(jnp.sin(params["factors"]))

    made = {"product": jnp.ones((16, 32)), "factors": jnp.ones((8, 32))}
    batch = {"x": np.ones((24, 16), np.float32)}
    engine = jaxopt_llm.initialize(lambda: made, loss, batch, Config(precision={"compute_dtype": "float32"}))
    program, state = engine.program, engine.state

    def total(perturbations: Any, masters: Any) -> jax.Array:
        return program.model.evaluate(masters, perturbations, state.variables, batch, program.placement)[0].total

    kept = saved_residuals(total, make_perturbations(program.model.specs, program.placement), state.masters)
    weights = [(shaped.shape, source) for shaped, source in kept if shaped.shape in ((16, 32), (8, 32))]
    assert {shape for shape, _ in weights} == {(16, 32), (8, 32)}
    assert all("argument" in source for _, source in weights), weights


class Refused(nnx.Module):
    """A linear layer, and what a test adds."""

    def __init__(self, **more: Any) -> None:
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        for name, value in more.items():
            setattr(self, name, value)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


def square(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


def assign(model: Refused, batch: Any) -> jax.Array:
    model.linear.bias[...] += jnp.mean(batch["x"])
    return square(model, batch)


def remove(model: Refused, batch: Any) -> jax.Array:
    loss = square(model, batch)
    del model.linear
    return loss


def grow(model: Refused, batch: Any) -> jax.Array:
    model.seen.set_value(batch["x"])
    return square(model, batch)


def as_param(tree: Any) -> Any:
    return nnx.Param(jax.tree.map(jnp.asarray, tree))


ROWS = {"x": np.zeros((16, 4), np.float32)}
PLAIN = lambda p, batch: jnp.mean((batch["x"] @ p["w"]) ** 2)  # noqa: E731


@pytest.mark.parametrize(
    ("model", "loss", "example", "message"),
    [
        (Refused, lambda model, batch: model(batch["x"]), ROWS, "loss: the loss is not a scalar, it has shape"),
        (Refused, lambda model, batch: (square(model, batch), batch["x"]), ROWS, "its count is not a scalar"),
        (Refused, lambda model, batch: (square(model, batch), {"x": batch["x"]}), ROWS, "metric x is not a scalar"),
        (Refused, lambda model, batch: None, ROWS, "the loss is not a scalar, it has type NoneType"),
        (Refused, lambda model, batch: square(model, batch) + 1j, ROWS, "loss: the loss is complex"),
        (Refused, lambda model, batch: jnp.sum(batch["x"] > 0), ROWS, "loss: it is int32, which has no gradient"),
        (Refused, assign, ROWS, "it assigns to the parameter linear/bias what depends on"),
        (Refused, remove, ROWS, "loss: it removes linear/"),
        (lambda: Refused(seen=nnx.BatchStat(jnp.zeros(()))), grow, ROWS, r"changes the variable seen from float32\[\]"),
        (
            lambda: Refused(both=as_param({"a": [1.0]})),
            square,
            ROWS,
            "model: both holds dict, and a variable holds one",
        ),
        (lambda: Refused(number=nnx.Param(jnp.arange(3))), square, ROWS, "the parameter number is int32"),
        (lambda: {"w": jnp.ones((4, 4), jnp.complex64)}, PLAIN, ROWS, "the parameter w is complex64"),
        (lambda: {"w": jnp.ones(4), "n": 3}, PLAIN, ROWS, "the parameter n is int32"),
        (lambda: {"w": jnp.ones(4), "a": {"b": 1.0}, "a/b": 2.0}, PLAIN, ROWS, "another array has the path .*a/b"),
        (lambda: {"w": jnp.ones(4), "a": 1.0, "a/b": 2.0}, PLAIN, ROWS, "another array has the path .*a"),
        (Refused(), square, ROWS, "model: Refused already holds its arrays"),
        (lambda: linen.Dense(4), square, ROWS, r"returns Dense, .* give the module itself, as Dense"),
        (lambda: {"w": "text"}, square, ROWS, "returns str, which is no NNX module and no pytree of arrays; give one"),
        ({"w": jnp.ones(4)}, PLAIN, ROWS, "model: dict already holds its arrays"),
        (Refused, square, {"x": np.zeros((12, 4), np.float32)}, "12 rows are not divisible by mesh.fsdp=8"),
        (Refused, square, {"x": 3}, "example: x is no array; give arrays"),
        (Refused, square, ROWS | {"name": np.array(["a"] * 16)}, "example: name is <U1, which are no numbers"),
        (Refused, square, ROWS | {"any": np.array([None] * 16)}, "example: any is object, which are no numbers"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(model: Any, loss: Any, example: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        jaxopt_llm.initialize(model, loss, example, optimizer=optax.sgd(0.1))


def test_names_of_fewer_dimensions_are_those_of_the_first() -> None:
    """As in a PartitionSpec: Flax itself gives the kernels of its attention fewer names than dimensions."""
    engine = make_engine(Setting("vit", 3, TENSOR, 1))
    named = [
        spec.axes for path, spec in tree.leaves_with_path(engine.program.model.specs) if path.endswith("query/kernel")
    ]
    assert named == [(None, "tensor", None)]


@pytest.mark.parametrize("named", ["of_layers", "of_stacks"])
def test_rules_divide_the_named_dimension_of_a_stack(named: str) -> None:
    """The names of a block are those of one layer, whether or not `nnx.vmap` adds one for the stack."""

    def make_block(rngs: nnx.Rngs) -> nnx.Linear:
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "hidden"))
        return nnx.Linear(8, 8, kernel_init=kernel, use_bias=False, rngs=rngs)

    def make_model() -> nnx.Module:
        metadata = {nnx.PARTITION_NAME: "layers"} if named == "of_stacks" else {}
        return nnx.vmap(make_block, transform_metadata=metadata)(nnx.Rngs(0).split(2))

    def loss(model: nnx.Module, batch: jax.Array) -> jax.Array:
        scan = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(batch, model).mean()

    config = Config(mesh=dict(fsdp=4, tensor=2))  # type: ignore[arg-type]
    batch = np.ones((8, 8), np.float32)
    engine = jaxopt_llm.initialize(make_model, loss, batch, config, rules={"hidden": "tensor"})
    (spec,) = jax.tree.leaves(engine.program.model.specs)
    assert spec.axes == ("layers", None, "tensor")


class Remembers(nnx.Module):
    """A layer that keeps what is no variable: a result, a number, or the results of all calls."""

    def __init__(self, kept: str, rngs: nnx.Rngs) -> None:
        self.layer, self.kept, self.calls, self.seen = nnx.Linear(4, 4, rngs=rngs), kept, 0, []

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.layer(x)
        if self.kept == "calls":
            self.calls += 1
        elif self.kept == "seen":
            self.seen.append(y)
        elif self.kept == "last":
            self.last = y
        return y


@pytest.mark.parametrize("kept", ["last", "calls", "seen", "nothing"])
def test_what_a_loss_keeps_outside_of_variables_is_named(kept: str) -> None:
    x = np.ones((8, 4), np.float32)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        jaxopt_llm.initialize(lambda: Remembers(kept, nnx.Rngs(0)), lambda model, batch: model(batch).mean(), x)
    found = [str(each.message) for each in raised if "changes the attributes" in str(each.message)]
    assert len(found) == (kept != "nothing")
    assert all(f"the loss changes the attributes {kept} of the model" in each for each in found)


def test_a_scalar_has_the_gradient_of_all_rows_in_float32() -> None:
    """Scalars are repeated without an equation that says so."""

    def loss(model: Any, batch: jax.Array) -> jax.Array:
        x = batch.astype(model["w"].dtype)
        x = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) * model[name] + x, None)), x, model["w"])[0]
        return (x.astype(jnp.float32) ** 2).mean()

    batch, norms = np.random.default_rng(0).normal(size=(64, 32, 16)).astype(np.float32), []
    for name, shape in (("t", ()), ("u", (1,))):
        weights = {"w": jax.random.normal(jax.random.key(0), (3, 16, 16)) * 0.3, name: jnp.ones(shape)}
        config = Config(mesh=FSDP, training=dict(trainable=(name,)))  # type: ignore[arg-type]
        engine = jaxopt_llm.initialize(lambda: weights, loss, batch, config, optax.sgd(1e-3))  # noqa: B023
        norms.append(float(engine.step(batch)["grad_norm"]))
        exact = jax.grad(lambda given: loss(weights | {name: given}, batch))(weights[name])  # noqa: B023
    assert norms == pytest.approx([float(abs(exact).item())] * 2, rel=0.01)


def test_a_microbatch_that_counts_nothing_keeps_what_it_adds() -> None:
    def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        return ((batch["x"] @ model["w"]) * batch["m"]).sum() + (model["w"] ** 2).sum(), batch["m"].sum()

    batch = {"x": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32), "m": np.repeat([1, 0], 8)}
    config = Config(mesh=FSDP, training=dict(accumulation=2), precision=dict(compute_dtype="float32"))  # type: ignore[arg-type]
    engine = jaxopt_llm.initialize(lambda: {"w": jnp.ones(4)}, loss, batch, config, optax.sgd(1.0))
    halves = [{name: leaf[first : first + 8] for name, leaf in batch.items()} for first in (0, 8)]
    expected = jax.grad(lambda w: sum(loss({"w": w}, half)[0] for half in halves) / 8)(jnp.ones(4))
    engine.step(batch)
    np.testing.assert_allclose(engine.model()["w"], 1 - expected, rtol=1e-6)


def test_a_count_that_depends_on_parameters_is_named() -> None:
    def loss(model: Any, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (batch @ model["w"]).sum(), jax.nn.sigmoid(batch @ model["w"]).sum()

    with pytest.warns(EngineWarning, match="the count that the loss returns depends on the parameters"):
        jaxopt_llm.initialize(lambda: {"w": jnp.ones(4)}, loss, np.ones((8, 4), np.float32))


def test_an_evaluation_that_counts_nothing_is_0() -> None:
    def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        return ((batch["x"] @ model["w"]) * batch["m"]).sum(), batch["m"].sum()

    batch = {"x": np.ones((8, 4), np.float32), "m": np.zeros(8)}
    assert jaxopt_llm.initialize(lambda: {"w": jnp.ones(4)}, loss, batch).evaluate([batch]) == {"loss": 0.0}


def test_a_metric_with_the_name_of_one_of_the_step_is_refused() -> None:
    def loss(model: Any, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return (batch @ model["w"]).mean(), {"grad_norm": jnp.float32(1)}

    with pytest.raises(InputError, match="a metric is named grad_norm"):
        jaxopt_llm.initialize(lambda: {"w": jnp.ones(4)}, loss, np.ones((8, 4), np.float32))
