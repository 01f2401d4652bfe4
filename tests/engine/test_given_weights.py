"""Weights of the user's, in whatever form they come: each device's part is read once, and replaces initial values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxopt_llm
from jaxopt_llm.config import Config
from jaxopt_llm.core import tree
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.engine import Engine

LAYERS, WIDTH, ROWS = 3, 64, 16
SHAPES = {
    "first": (16, WIDTH),
    "layers/bias": (LAYERS, WIDTH),
    "layers/kernel": (LAYERS, WIDTH, WIDTH),
    "head": (WIDTH, 1),
}
BATCH = {"x": np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)}


def make_model() -> dict[str, Any]:
    return {
        "first": jnp.ones(SHAPES["first"]),
        "layers": {"bias": jnp.ones(SHAPES["layers/bias"]), "kernel": jnp.ones(SHAPES["layers/kernel"])},
        "head": jnp.ones(SHAPES["head"]),
    }


def loss(model: Any, batch: Any) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ weights["kernel"] + weights["bias"]), None

    x = batch["x"].astype(model["first"].dtype) @ model["first"]
    x, _ = jax.lax.scan(layer, x, model["layers"])
    return jnp.mean((x @ model["head"]).astype(jnp.float32) ** 2)


def values() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {path: random.normal(size=shape).astype(np.float32) / 8 for path, shape in SHAPES.items()}


def make_engine(weights: Any, optimizer: Any = None, **sections: Any) -> Engine:
    sections = {"mesh": {"fsdp": 8}, "precision": {"compute_dtype": "float32"}} | sections
    return jaxopt_llm.initialize(make_model, loss, BATCH, Config(**sections), optimizer, weights=weights)


def trained(engine: Engine) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in tree.leaves_with_path(engine.model())}


class Counted:
    """An array in a file, that counts the values that are read."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape, self.dtype, self._array = array.shape, array.dtype, array
        self.reads: list[int] = []

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self._array[index]
        self.reads.append(part.size)
        return part


def by_mapping(folder: Path) -> Any:
    return values()


def by_function(folder: Path) -> Any:
    return values().__getitem__


def nested(folder: Path) -> Any:
    given = values()
    return {name: given[name] for name in ("first", "head")} | {
        "layers": {name: given[f"layers/{name}"] for name in ("bias", "kernel")}
    }


def memory_maps(folder: Path) -> Any:
    for path, array in values().items():
        np.save(folder / path.replace("/", "."), array)
    return lambda path: np.load(folder / f"{path.replace('/', '.')}.npy", mmap_mode="r")


def slices_of_safetensors(folder: Path) -> Any:
    library = pytest.importorskip("safetensors.numpy")  # not in the test extra
    library.save_file(values(), folder / "model.safetensors")
    return library.safe_open(folder / "model.safetensors", framework="numpy").get_slice


def jax_arrays(folder: Path) -> Any:
    return {path: jnp.asarray(array) for path, array in values().items()}


@pytest.mark.parametrize(
    "form",
    [by_mapping, by_function, nested, memory_maps, slices_of_safetensors, jax_arrays],
    ids=lambda form: form.__name__,
)
def test_weights_in_any_form_replace_the_initial_values(form: Callable[[Path], Any], tmp_path: Path) -> None:
    found, expected = trained(make_engine(form(tmp_path))), values()
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({}, 8),
        ({"mesh": {"data": 2, "fsdp": 4}}, 4),
        ({"lora": {"rank": 2, "targets": ("*/kernel",), "base": "int8"}}, 8),
        ({"lora": {"rank": 2, "targets": ("*/kernel", "*/first"), "base": "nf4"}}, 8),
    ],
)
def test_each_part_is_read_once_and_by_itself(sections: Any, parts: int) -> None:
    given = {path: Counted(array) for path, array in values().items()}
    assert make_engine(given, **sections).state.step == 0
    for path, source in given.items():
        whole = int(np.prod(source.shape))
        assert sum(source.reads) == whole, path
        layers = LAYERS if path.startswith("layers") else 1
        assert set(source.reads) == {whole // layers // parts}, path


ADAPTED = {"rank": 2, "targets": ("*/kernel", "*/first")}


@pytest.mark.parametrize(
    ("sections", "optimizer"),
    [
        ({"lora": ADAPTED | {"base": "int8"}}, None),
        ({"lora": ADAPTED | {"base": "nf4", "double_quantisation": True}}, None),
        ({"lora": ADAPTED | {"targets": ("*/kernel",), "dora": True}, "training": {"trainable": ("*/head",)}}, None),
        ({"training": {"trainable": ("*/kernel",)}, "precision": {}, "sharding": {"zero_stage": 1}}, None),
        ({"offload": {"parameters": True, "optimizer": True}}, None),
        ({}, optax.contrib.schedule_free(optax.sgd(0.1), 0.1)),
    ],
    ids=["int8", "nf4", "dora", "frozen", "offload", "average of the masters"],
)
def test_the_state_is_that_of_a_model_with_these_values(sections: Any, optimizer: Any) -> None:
    found = make_engine(values(), optimizer, **sections).state
    tree_of_values = nested(Path())
    config = Config(**({"mesh": {"fsdp": 8}, "precision": {"compute_dtype": "float32"}} | sections))
    expected = jaxopt_llm.initialize(lambda: tree_of_values, loss, BATCH, config, optimizer).state
    pairs = zip(tree.leaves_with_path(found), tree.leaves_with_path(expected), strict=True)
    for (path, leaf), (other, wanted) in pairs:
        assert (path, leaf.dtype, leaf.sharding) == (other, wanted.dtype, wanted.sharding)
        # Norms of one layer and of a stack are summed in other orders.
        tolerance = 3e-7 if path.endswith("magnitude") else 0
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(wanted), rtol=tolerance, err_msg=path)


def test_none_keeps_the_initial_values() -> None:
    given = values()
    for weights in (given | {"head": None}, {"first": given["first"], "layers": None, "head": None}, lambda path: None):
        found = trained(make_engine(weights))
        for path, array in found.items():
            source = weights(path) if callable(weights) else weights.get(path)
            np.testing.assert_array_equal(array, np.ones(SHAPES[path]) if source is None else source, err_msg=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": ...}, r"weights: head missing; give None for a parameter that keeps its initial values"),
        ({path: ... for path in SHAPES}, r"weights: first, head, layers/bias and 1 more missing; "),
        ({"hesd": 1, "head": ...}, "weights: hesd: there is no such parameter; the paths are those of .* such as head"),
        ({"layers": {"kernel": 1, "scale": 1}}, "weights: layers/scale: there is no such parameter"),
        ({"head": np.ones((1, WIDTH))}, r"weights: head is \[1, 64\], and the parameter is \[64, 1\]"),
    ],
)
def test_a_mapping_that_does_not_fit_is_one_line_before_anything_is_read(change: Any, message: str) -> None:
    given = {path: Counted(array) for path, array in values().items()} | change
    given = {path: source for path, source in given.items() if source is not ...}
    with pytest.raises(InputError, match=f"^{message}") as caught:
        make_engine(given)
    assert "\n" not in str(caught.value)
    assert not any(source.reads for source in given.values() if isinstance(source, Counted))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (np.ones(WIDTH), r"weights: head is \[64\], and the parameter is \[64, 1\]"),
        (np.ones((WIDTH, 1), np.int8), "weights: head is int8; give real floating-point numbers"),
        (np.full((WIDTH, 1), 1e300), "weights: head has values that are not finite in float32"),
    ],
)
def test_a_wrong_array_of_a_function_is_one_line(head: np.ndarray, message: str) -> None:
    engine = make_engine((values() | {"head": head}).__getitem__)
    with pytest.raises(InputError, match=message):
        engine.step(BATCH)


def test_scalars_and_the_items_of_a_list_have_weights() -> None:
    def make_model() -> nnx.Module:
        model = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(0))])
        model[0].scale = nnx.Param(jnp.ones(()))
        return model

    def loss(model: Any, batch: Any) -> jax.Array:
        return (model[0](batch["x"]) * model[0].scale[...]).mean()

    weights = jax.tree.map(lambda leaf: np.asarray(leaf) + 2, nnx.to_pure_dict(nnx.state(make_model(), nnx.Param)))
    engine = jaxopt_llm.initialize(make_model, loss, BATCH, weights=weights)
    given = nnx.to_pure_dict(nnx.state(engine.model(), nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, given, weights)
    assert given[0]["scale"] == 3


def test_something_else_than_weights_is_refused() -> None:
    with pytest.raises(InputError, match="weights: list is neither a mapping by path nor a function of a path"):
        make_engine([1])


def test_a_run_that_continues_reads_no_weights(tmp_path: Path) -> None:
    engine = make_engine(values())
    engine.step(BATCH)
    engine.save(tmp_path)
    given = {path: Counted(array) for path, array in values().items()}
    resumed = make_engine(given)
    assert resumed.restore(tmp_path) == 1
    assert not any(source.reads for source in given.values())
    for path, array in trained(engine).items():
        np.testing.assert_array_equal(trained(resumed)[path], array, err_msg=path)
