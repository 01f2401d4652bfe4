"""Every switch of the decoder against the float64 reference, in models that have many of them on."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy
from test_experts import EXPERTS
from test_reference import assert_finite_differences

from jaxopt_llm import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.kernels.spans import Spans
from jaxopt_llm.model import leaves
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Params, make_parts, param_specs
from jaxopt_llm.training import lora
from jaxopt_llm.training.lora import LoraConfig
from jaxopt_llm.training.optimizer import OptimizerConfig, make_optimizer

pytestmark = pytest.mark.core

PLACEMENT = toy.placement()
BATCH = toy.packed(rows=2, length=16)
TOKENS = int(np.sum(BATCH.loss_mask))

# Between them every switch. The values are such that each shows: caps near what they bound, frequencies of all three
# kinds among the four of a head.
SWITCHES: dict[str, dict[str, Any]] = {
    "gpt": {
        "norm": "layer",
        "positions": "learned",
        "max_positions": 16,
        "biases": "all",
        "mlp": "gelu",
        "attention_softcap": 1.5,  # without it a key's bias, which moves all of a query's scores alike, does nothing
    },
    "gemma": {
        "norm_placement": "both",
        "norm_zero_centered": True,
        "qk_norm": "head",
        "mlp": "geglu",
        "attention_scale": 0.9,
        "logit_softcap": 1.5,
        "scale_embedding": True,
    },
    "olmo": {
        "pattern": ("sliding", "global_nope"),
        "norm_placement": "post",
        "qk_norm": "projection",
        "biases": "qkv",
        "rope_factor": 8.0,
        "rope_original_length": 14,
        "rope_low_frequency_factor": 0.5,
        "rope_high_frequency_factor": 2.0,
    },
    "deepseek": {
        "latent_rank": 6,
        "query_rank": 5,
        "rope_scaling": "yarn",
        "rope_factor": 8.0,
        "rope_original_length": 64,
        "rope_low_frequency_factor": 0.25,
        "rope_high_frequency_factor": 2.0,
        "rope_mscale": 0.7,
        "rope_mscale_all_dim": 0.4,
    },
}
BASE = dataclasses.replace(toy.CONFIG, head_dim=8)
SIZES: dict[str, dict[str, Any]] = {"deepseek": {"kv_heads": 4, "rotary_head_dim": 6, "value_head_dim": 3}}
MODELS = {name: dataclasses.replace(BASE, **switches, **SIZES.get(name, {})) for name, switches in SWITCHES.items()}


@functools.cache
def params(name: str) -> Params:
    return toy.params(param_specs(MODELS[name]))


def paths(specs: tree.Tree) -> set[str]:
    return set(jax.tree.leaves(tree.map_with_path(lambda path, spec: path, specs)))


def test_every_switch_is_on_somewhere() -> None:
    sizes = {"vocabulary_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width"}
    sizes |= {"rotary_head_dim", "value_head_dim"}
    elsewhere = {
        "window",
        "rope_theta",
        "norm_epsilon",
        "tied_head",
        "pretrained",
        "last_layers",
        "router_bias_rate",
        *EXPERTS,
    }  # test_decoder.py, test_pretrained.py, test_trainable.py, test_router_bias.py, test_experts.py
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert set().union(*SWITCHES.values()) == fields - sizes - elsewhere


@pytest.mark.parametrize("name, policy", [("gpt", "none"), ("gemma", "full"), ("olmo", "none"), ("deepseek", "none")])
def test_loss_and_gradients_are_the_references(name: str, policy: str) -> None:
    parts, batch, remat = make_parts(MODELS[name]), toy.microbatches(BATCH, 1), RematConfig(policy)  # type: ignore[arg-type]

    def loss_and_gradients(params: Params) -> Any:
        nothing = jax.tree.map(lambda leaf: None, params)
        return scan.loss_and_gradients(parts, params, nothing, batch, 1 / jnp.float32(TOKENS), PLACEMENT, remat)

    run = jax.jit(loss_and_gradients, compiler_options=toy.QUICK_COMPILE)
    loss, _, _, gradients = run(params(name))
    expected_loss, expected = toy.reference_mean(MODELS[name], params(name), BATCH)
    assert loss / TOKENS == pytest.approx(expected_loss, rel=1e-6)

    def check(path: str, found: jax.Array, expected: np.ndarray) -> None:
        assert np.linalg.norm(expected) > 1e-4, path
        assert np.linalg.norm(found - expected) <= 2e-5 * np.linalg.norm(expected), path

    tree.map_with_path(check, gradients, expected)


@pytest.mark.parametrize("name", MODELS)
def test_the_references_gradients_are_finite_differences(name: str) -> None:
    where = BATCH.loss_mask, BATCH.segment_ids, BATCH.positions
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), params(name))
    assert_finite_differences(wide, toy.reference_config(MODELS[name]), (BATCH.tokens, BATCH.targets, *where))


@pytest.mark.parametrize("name, switch", [(name, switch) for name, on in SWITCHES.items() for switch in on])
def test_each_switch_changes_the_reference(name: str, switch: str) -> None:
    off = dataclasses.replace(MODELS[name], **{switch: getattr(BASE, switch)})
    if paths(param_specs(off)) <= paths(param_specs(MODELS[name])):
        where = BATCH.tokens, BATCH.segment_ids, BATCH.positions
        models = MODELS[name], off
        on, without = (reference.logits(params(name), toy.reference_config(model), *where) for model in models)
        assert switch == "max_positions" or toy.distance(on, without) > 1e-3
    else:
        assert switch in ("mlp", "norm_placement", "latent_rank", "query_rank")  # which then lacks parameters


@pytest.mark.parametrize("name", MODELS)
def test_cached_logits_are_the_uncached(name: str) -> None:
    parts, tokens = make_parts(MODELS[name]), BATCH.tokens[:, :8]
    positions, ones = np.broadcast_to(np.arange(8), tokens.shape), np.ones_like(tokens)
    forward = jax.jit(functools.partial(scan.forward, parts), compiler_options=toy.QUICK_COMPILE)
    caches, pieces = scan.make_caches(parts, *tokens.shape, jnp.float32, PLACEMENT), []
    for first in (0, 4):
        part = slice(first, first + 4)
        context = Context(
            positions[:, part],
            Spans(jnp.zeros((len(tokens), 4), jnp.int32), positions[:, part]),
            PLACEMENT,
            jnp.int32(first),
        )
        piece, caches = forward(params(name), tokens[:, part], context, caches)
        pieces.append(piece[..., : toy.CONFIG.vocabulary_size])
    expected = reference.logits(params(name), toy.reference_config(MODELS[name]), tokens, ones, positions)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, rtol=1e-5, atol=2e-5)


# ---- Norms and biases are neither adapted nor decayed; they start as if they were not there.


def is_vector(path: str) -> bool:
    return "_norm/" in path or path.endswith("_bias")


def test_initial_norms_and_biases_change_nothing() -> None:
    for name, model in MODELS.items():
        values = leaves.initialize(param_specs(model), seed=0)
        one = 0 if model.norm_zero_centered else 1

        def check(path: str, leaf: jax.Array, one: int = one) -> None:
            if is_vector(path):
                np.testing.assert_array_equal(leaf, one if path.endswith("/scale") else 0)
            else:
                assert jnp.std(leaf) > 0, path

        tree.map_with_path(check, values)
        assert any(is_vector(path) for path in paths(values)), name


@pytest.mark.parametrize("name", MODELS)
def test_matrices_and_tables_alone_decay_and_have_adapters(name: str) -> None:
    parts = make_parts(MODELS[name])
    block = jax.tree.map(lambda spec: spec.layer(), parts.specs["segment_0"]["block_0"])
    for section, specs in (("outer", parts.specs["outer"]), ("segment_0", block)):
        optimizer = make_optimizer(OptimizerConfig(), lambda step: 1.0, section, specs)
        ones = jax.tree.map(lambda spec: jnp.ones(spec.shape), specs)
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, ones), optimizer.init(ones), ones)
        decayed = tree.map_with_path(lambda path, update: path if jnp.any(update) else None, updates)
        assert set(jax.tree.leaves(decayed)) == {path for path in paths(specs) if not is_vector(path)}
    everything = LoraConfig(rank=2, targets=("*",))
    _, adapted, _ = lora.adapt(parts, everything, PLACEMENT.precision)
    assert {path.rsplit("/", 1)[0] for path in paths(adapted)} == {
        path for path in paths(parts.specs) if not is_vector(path)
    }
