"""Generation from codes writes what the dequantised weights write, and int8 products what NumPy computes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import folders
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy
from chats import write_tokenizer
from commands import train
from marks import slow

from jaxopt_llm.checkpoint.huggingface.model_folder import Origin
from jaxopt_llm.config import Config, LoraConfig, PrecisionConfig
from jaxopt_llm.core import tree
from jaxopt_llm.execution.decode import TokenGenerator
from jaxopt_llm.inference import models
from jaxopt_llm.inference.flags import Quantisation
from jaxopt_llm.inference.load import Pretrained
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.linear.leaves import Int8Weight, Nf4Weight
from jaxopt_llm.model.model import Model, Params
from jaxopt_llm.parallel.placement import Placement
from jaxopt_llm.step import lora

CONFIG = replace(folders.CONFIG, vocabulary_size=512, layers=2, width=64, mlp_width=64)
PROMPTS = [np.array([5, 80, 33, 7, 200], np.int32), np.array([11, 12, 250], np.int32)]
COUNT = 24


def generate_ids(model: Model, params: Params, placement: Placement) -> np.ndarray:
    """Return the most likely tokens after each prompt, [B, COUNT]."""
    length = max(each.size for each in PROMPTS) + COUNT
    size = CONFIG.vocabulary_size
    return toy.continue_prompts(TokenGenerator(model, params, placement, size, len(PROMPTS), length), PROMPTS, COUNT)


def adapt(config: Config) -> Model:
    return lora.adapt_model(Decoder(config.model, attention="xla"), config.lora, config.precision)[0]


def dequantise_base(config: Config, params: Params) -> tuple[Config, Params]:
    """Return the model with arrays in the compute dtype in place of codes, and with the same adapters."""

    def decode(leaf: tree.Leaf) -> tree.Leaf:
        if isinstance(leaf, Int8Weight):
            values = np.asarray(leaf.codes).astype(np.float32) * np.asarray(leaf.scales)
            return jnp.asarray(values, config.precision.compute_dtype)
        is_nf4 = isinstance(leaf, Nf4Weight)
        return jnp.asarray(leaves.dequantise(leaf), config.precision.compute_dtype) if is_nf4 else leaf

    is_codes: Callable[[Any], bool] = lambda leaf: isinstance(leaf, Int8Weight | Nf4Weight)  # noqa: E731
    found = jax.tree.map(decode, params, is_leaf=is_codes)
    assert list_codes(params) and not list_codes(found)
    return replace(config, lora=replace(config.lora, base="float", double_quantisation=False)), found


def list_codes(params: Params) -> list[str]:
    return [path for path, _ in tree.leaves_with_path(params) if path.endswith("/codes")]


def assert_the_codes_write_the_same(config: Config, params: Params, placement: Placement) -> None:
    found = generate_ids(adapt(config), params, placement)
    assert len({*found.ravel().tolist()}) > 4, "it writes the same tokens again and again"
    same, dequantised = dequantise_base(config, params)
    np.testing.assert_array_equal(found, generate_ids(adapt(same), dequantised, placement))


@pytest.mark.parametrize(
    ("base", "dtype", "settings"),
    [
        ("int8", "float32", {"dora": True}),
        ("nf4", "bfloat16", {"double_quantisation": True}),
        *slow(("int8", "bfloat16", {}), ("nf4", "float32", {})),
    ],
)
def test_codes_write_what_the_dequantised_weights_write(base: Any, dtype: Any, settings: dict[str, Any]) -> None:
    """Check greedy tokens with a cache, beside adapters that change the products."""
    config = Config(
        model=CONFIG, lora=LoraConfig(rank=2, base=base, **settings), precision=PrecisionConfig(compute_dtype=dtype)
    )
    adapted = leaves.wrap_arrays(adapt(config).specs, folders.params(CONFIG), seed=0)
    random = np.random.default_rng(0)

    def store(path: str, array: jax.Array) -> jax.Array:
        if path.endswith("/lora_b"):  # zeros before training
            array = jnp.asarray(random.normal(size=array.shape), array.dtype)
        return array if array.dtype in (np.int8, np.uint8) or path.endswith("scales") else array.astype(dtype)

    params = tree.map_with_path(store, adapted)
    assert_the_codes_write_the_same(config, toy.by_layer(params), toy.placement(compute_dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_run_over_codes_writes_what_the_dequantised_weights_write(base: str, tmp_path: Path) -> None:
    given = ("--lora.rank", 2, "--lora.base", base, "--optimizer.learning-rate", 0.01, "--model.tied-head", False)
    given += ("--model.vocabulary-size", CONFIG.vocabulary_size)
    done = train(tmp_path / "run", *given, "--training.steps", 2)
    assert done.returncode == 0, done.stderr
    source = models.load_model(tmp_path / "run")
    assert_the_codes_write_the_same(source.config, source.params, source.placement)


def round_to_codes(array: np.ndarray, dims: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    array = array.astype(np.float32)
    scales = np.abs(array).max(dims, keepdims=True) / np.float32(127)
    return np.round(array / scales), scales.astype(np.float64)


def multiply_codes(spec: str, x: np.ndarray, weights: dict[str, Any], name: str, biased: bool) -> Any:
    """Replace `reference.project` by a product of int8 codes: a scale for each token, and for each output channel."""
    left, right, _ = spec.replace("->", ",").split(",")
    summed = {*left} & {*right}
    (x_codes, x_scales), (w_codes, w_scales) = (
        round_to_codes(array, tuple(dim for dim, axis in enumerate(axes) if axis in summed))
        for array, axes in ((x, left), (weights[name], right))
    )
    scales = np.einsum(spec, x_scales, w_scales)
    y = np.einsum(spec, x_codes, w_codes, optimize=True) * scales
    return y + (weights[f"{name}_bias"] if biased else 0), None


def test_products_of_codes_are_those_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check logits, and greedy tokens that NumPy chooses without a cache. No column is above the threshold."""
    config = replace(CONFIG, pattern=("global",))
    path = write_tokenizer(folders.folder(tmp_path / "model", config))
    source = models.load_model(path, quantisation=Quantisation("int8", 1e9))
    assert source.placement.precision.matmul == "int8"
    weights = jax.tree.map(lambda array: array.astype(np.float64), folders.params(config))

    def compute_logits(ids: np.ndarray) -> np.ndarray:
        where = np.ones_like(ids), np.arange(ids.size)
        found = reference.logits(weights, toy.reference_config(config), ids[None], *(each[None] for each in where))
        return found[0, :, : config.vocabulary_size]

    exact = compute_logits(PROMPTS[0])
    monkeypatch.setattr(reference, "project", multiply_codes)
    expected = compute_logits(PROMPTS[0])
    loaded = Pretrained(config, source.params, path, Origin, source.model, source.placement)
    found = loaded.logits(PROMPTS[0][None])[0]
    assert toy.distance(found, expected) < 0.1 * toy.distance(exact, expected)  # a few values lie between two codes
    written = generate_ids(source.model, source.params, source.placement)
    for prompt, tokens in zip(PROMPTS, written, strict=True):
        ids = np.concatenate([prompt, tokens])
        np.testing.assert_array_equal(np.argmax(compute_logits(ids)[prompt.size - 1 : -1], axis=-1), tokens)
