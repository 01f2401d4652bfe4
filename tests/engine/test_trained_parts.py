"""Tests of adapters, quantised bases and trainable patterns on a user's model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from marks import slow

import jaxopt_llm
from jaxopt_llm.config import Config, OptimizerConfig
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine import user_model
from jaxopt_llm.model.linear.leaves import adapter_paths
from jaxopt_llm.parallel.gathering import PlacedWeight, attach_shardings

WIDTH, LAYERS, ROWS = 32, 2, 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.up = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Network(nnx.Module):
    """Blocks in a loop over a stack, or in a list, and a head with one output."""

    def __init__(self, listed: bool, rngs: nnx.Rngs) -> None:
        self.table, self.head = nnx.Embed(16, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)
        self.blocks: Any = (
            nnx.List([Block(rngs) for _ in range(LAYERS)]) if listed else nnx.vmap(Block)(rngs.split(LAYERS))
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table(ids)
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x = block(x)
            return self.head(x)
        run = nnx.scan(nnx.remat(lambda x, block: block(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(x, self.blocks))


def loss(model: Network, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["ids"])[..., 0] - batch["y"]) ** 2)


BATCH = {
    "ids": np.random.default_rng(0).integers(0, 16, (ROWS, 4)),
    "y": np.random.default_rng(1).normal(size=(ROWS, 4)).astype(np.float32),
}


def make_engine(listed: bool = False, optimizer: Any = None, **sections: Any) -> jaxopt_llm.Engine:
    given = {"mesh": {"fsdp": 4, "data": 2}, "precision": {"compute_dtype": "float32"}} | sections
    factory = lambda: Network(listed, nnx.Rngs(0))  # noqa: E731
    return jaxopt_llm.initialize(factory, loss, BATCH, Config(**given), optimizer or optax.adam(1e-2))


def read(engine: jaxopt_llm.Engine, half: str) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in tree.leaves_with_path(getattr(engine.state, half))}


@pytest.mark.parametrize(
    ("listed", "lora"),
    [
        (False, {"rank": 4}),
        (True, {"rank": 4, "dora": True}),
        (False, {"rank": 4, "base": "int8"}),
        *slow((True, {"rank": 4}), (False, {"rank": 4, "dora": True}), (True, {"rank": 4, "base": "int8"})),
    ],
)
def test_adapters_train_and_merge_and_the_base_does_not_change(listed: bool, lora: dict[str, Any]) -> None:
    engine = make_engine(listed, lora=lora)
    base = read(engine, "frozen")
    losses = [float(engine.step(BATCH)["loss"]) for _ in range(4)]
    assert losses[-1] < losses[0]
    merged = float(loss(engine.model(), {name: jnp.asarray(value) for name, value in BATCH.items()}))
    assert float(engine.step(BATCH)["loss"]) == pytest.approx(merged, rel=1e-5)
    for path, array in read(engine, "frozen").items():
        np.testing.assert_array_equal(array, base[path])


def test_products_with_the_base_alone_are_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, set[str]] = {"adapters": set(), "bases": set()}

    def spy(*arguments: Any, **named: Any) -> Any:
        placed, adapters = attach_shardings(*arguments, **named), adapter_paths(arguments[0])
        is_placed = lambda leaf: isinstance(leaf, PlacedWeight)  # noqa: E731
        for path, leaf in tree.leaves_with_path(placed, is_leaf=is_placed):
            if "kernel" in path and "blocks" in path:
                found["adapters" if path in adapters else "bases"].add(leaf.shardings.matmul)
        return placed

    monkeypatch.setattr(user_model, "attach_shardings", spy)
    int8 = {"compute_dtype": "float32", "matmul": "int8", "outlier_threshold": 6.0}
    losses = {
        matmul: float(make_engine(lora={"rank": 4, "base": "int8"}, precision=precision).step(BATCH)["loss"])
        for matmul, precision in (("float32", {"compute_dtype": "float32"}), ("int8", int8))
    }
    assert found == {"adapters": {"compute_dtype"}, "bases": {"compute_dtype", "int8"}}
    assert losses["int8"] != losses["float32"] and losses["int8"] == pytest.approx(losses["float32"], rel=0.02)


def test_new_adapters_change_nothing() -> None:
    assert float(make_engine(lora={"rank": 4}).step(BATCH)["loss"]) == pytest.approx(
        float(make_engine().step(BATCH)["loss"]), rel=1e-6
    )


def test_all_linear_leaves_out_tables_and_matrices_narrower_than_the_rank() -> None:
    trained = {path.rsplit("/", 1)[0] for path in read(make_engine(lora={"rank": 4}), "masters")}
    assert trained == {"segment_0/blocks/up/kernel", "segment_0/blocks/down/kernel"}


@pytest.mark.parametrize("pattern", ["blocks/norm/*", "segment_0/blocks/norm/*", "*/norm/*"])
def test_a_pattern_may_leave_out_the_section(pattern: str) -> None:
    engine = make_engine(training={"trainable": (pattern,)})
    assert {*read(engine, "masters")} == {"segment_0/blocks/norm/scale", "segment_0/blocks/norm/bias"}
    before = read(engine, "frozen")
    engine.step(BATCH)
    assert all(np.array_equal(array, before[path]) for path, array in read(engine, "frozen").items())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"rank": 4, "targets": ("table/*",)}}, "read by something else than matrix products"),
        ({"lora": {"rank": 4, "targets": ("*/gate/*",)}}, r"\*/gate/\* matches no parameter"),
        ({"training": {"trainable": ("*/gate/*",)}}, r"\*/gate/\* matches no parameter"),
        ({"lora": {"rank": 4, "dropout": 0.1}}, r"does not read lora\.dropout"),
    ],
)
def test_a_selection_that_has_no_effect_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_engine(**sections)


@pytest.mark.parametrize(
    ("listed", "sections", "message"),
    [
        (True, {"precision": {"matmul": "int8"}}, r"precision\.matmul=int8 has no effect"),
        (True, {"offload": {"parameters": True}}, r"offload\.parameters=True has no effect"),
        (False, {"run": {"deterministic": True}}, r"does not read run\.deterministic"),
        (
            False,
            {"lora": {"rank": 4, "base": "nf4"}, "precision": {"matmul": "int8"}},
            r"int8 does not support lora\.base=nf4",
        ),
        (
            False,
            {"lora": {"rank": 4, "dora": True}, "precision": {"matmul": "fp8"}},
            r"fp8 does not support lora\.dora",
        ),
    ],
)
def test_a_setting_that_would_reach_nothing_is_refused(listed: bool, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_engine(listed, **sections)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (OptimizerConfig(decay_groups=("*/gate/*=0", "*=1")), r"\*/gate/\* matches no parameter"),
        (OptimizerConfig(learning_rate=-1.0), r"optimizer\.learning_rate=-1\.0: must be above 0"),
        (OptimizerConfig(in_backward=True, clip_norm=0.0), r"does not read optimizer\.in_backward"),
    ],
)
def test_settings_of_an_optimizer_that_is_an_argument_are_checked(optimizer: OptimizerConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_engine(optimizer=optimizer)
