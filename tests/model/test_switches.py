"""Every switch of the decoder against the float64 reference, in models with many switches on."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import toy
from test_reference import assert_finite_differences

from jaxopt_llm.config import DeltaConfig, LoraConfig, ModelConfig, MoEConfig, OptimizerConfig, RematConfig
from jaxopt_llm.config.fields import get_field, replace_fields, walk_fields
from jaxopt_llm.core import tree
from jaxopt_llm.execution import scan
from jaxopt_llm.kernels.attention_types import KeyRanges
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.context import Context
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import OBJECTIVE, Params
from jaxopt_llm.step import lora
from jaxopt_llm.step.optimizer import make_optimizer

pytestmark = pytest.mark.core

PLACEMENT = toy.placement()
BATCH = toy.packed(rows=2, length=16)
TOKENS = int(np.sum(BATCH.loss_mask))

# Together they have every switch. Each value has a visible effect: caps are near the values that they bound, and the
# four frequencies of a head are of all three kinds.
SWITCHES: dict[str, dict[str, Any]] = {
    "gpt": {
        "norm": "layer",
        "positions": "learned",
        "max_positions": 16,
        "biases": "all",
        "mlp": "gelu",
        "attention_softcap": 1.5,  # without it the keys' bias, which shifts all scores of a query, has no effect
    },
    "gemma": {
        "norm_placement": "both",
        "norm_zero_centered": True,
        "qk_norm": "head",
        "mlp": "geglu",
        "attention_scale": 0.9,
        "logit_softcap": 1.5,
        "embedding_scale": 4.0,
        "residual_scale": 0.6,
        "logit_scale": 0.7,
    },
    "olmo": {
        "pattern": ("sliding", "global_nope"),
        "norm_placement": "post",
        "qk_norm": "projection",
        "biases": "qkv",
        "rope.factor": 8.0,
        "rope.original_length": 14,
        "rope.low_frequency_factor": 0.5,
        "rope.high_frequency_factor": 2.0,
    },
    "deepseek": {
        "mla.kv_rank": 6,
        "mla.query_rank": 5,
        "rope.scaling": "yarn",
        "rope.factor": 8.0,
        "rope.original_length": 64,
        "rope.low_frequency_factor": 0.25,
        "rope.high_frequency_factor": 2.0,
        "rope.truncate": False,
        "rope.mscale": 0.7,
        "rope.mscale_all_dim": 0.4,
    },
    "glm": {"biases": "attention", "rope.size": 4, "rope.interleaved": True},
    "ministral": {"rope.query_growth": 0.7, "rope.original_length": 3},
    "gemma3": {
        "rope.sliding_theta": 30.0,
        "biases": "mlp",
        "rope.scaling": "yarn",
        "rope.factor": 4.0,
        "rope.original_length": 16,
        "rope.low_frequency_factor": 0.5,
    },
    "gemma4": {
        "values_from_keys": True,
        "value_norm": True,
        "layer_scales": True,
        "qk_norm": "head",
        "rope.sliding_theta": 30.0,
        "rope.rotated_pairs": 2,
        "rope.scaling": "linear",  # of the pairs that rotate
        "rope.factor": 2.0,
        "biases": "qkv",  # with values_from_keys, values have the bias of the keys
    },
    "gemma4 e": {
        "shared_key_layers": 2,
        "layer_input_size": 6,
        "qk_norm": "head",
        "norm_placement": "both",
        "embedding_scale": 1.3,
        "mlp": "geglu",
    },
    # Some documents of the batch have several chunks.
    "llama4": {
        "pattern": ("chunked", "global_nope"),
        "qk_norm": "rotated_unit",
        "rope.interleaved": True,
        "rope.query_growth": 0.7,
        "rope.growth_layers": "nope",
        "rope.growth_length": 3,
    },
    "hunyuan": {"qk_norm": "rotated_head", "mlp": "relu2"},
    "apertus": {"mlp": "xielu", "attention_gate": "element"},
    "cohere": {
        "pattern": ("sliding", "global_nope"),
        "norm": "layer_no_bias",
        "parallel_block": True,
        "rope.interleaved": True,
        "logit_scale": 0.7,
    },
    "parallel, both norms": {"parallel_block": True, "norm_placement": "both", "residual_scale": 0.6},
    # Some documents of the batch are longer than the original length, and some are shorter.
    "dynamic": {"rope.scaling": "dynamic", "rope.factor": 3.0, "rope.original_length": 4},
    "phi": {
        "rope.scaling": "longrope",
        "rope.original_length": 4,
        "rope.attention_factor": 1.4,
        "rope.short_factors": (1.0, 1.3, 1.6, 2.0),
        "rope.long_factors": (2.0, 3.0, 4.0, 8.0),
    },
    "gpt_oss": {"attention_sinks": True, "mlp": "clamped_swiglu", "biases": "all"},
    "qwen3_next": {
        "pattern": ("gated_delta", "global"),
        "attention_gate": "element",
        "qk_norm": "head",
        "norm_zero_centered": True,
        "norm_placement": "both",
    },
}
BASE = dataclasses.replace(toy.CONFIG, head_dim=8)
SIZES: dict[str, dict[str, Any]] = {
    "deepseek": {"kv_heads": 4, "mla.rotary_head_dim": 6, "mla.value_head_dim": 3},
    "gemma4": {"global_head_dim": 12, "global_kv_heads": 1},
    "gemma4 e": {"wide_mlp": True},
    "qwen3_next": {"delta.key_head_dim": 6, "delta.value_head_dim": 5, "delta.kernel": 3},
}
MODELS = {name: replace_fields(BASE, switches | SIZES.get(name, {})) for name, switches in SWITCHES.items()}


@functools.cache
def params(name: str) -> Params:
    return toy.params(param_specs(MODELS[name]))


def paths(specs: tree.Tree) -> set[str]:
    return set(jax.tree.leaves(tree.map_with_path(lambda path, spec: path, specs)))


def test_every_switch_is_on_in_some_model() -> None:
    sizes = {"vocabulary_size", "width", "layers", "heads", "kv_heads", "head_dim", "mlp_width"}
    sizes |= {name for name, _, _ in walk_fields(DeltaConfig, "delta.")}
    sizes |= {"mla.rotary_head_dim", "mla.value_head_dim", "global_head_dim", "global_kv_heads", "wide_mlp"}
    elsewhere = {
        "window",
        "rope.theta",
        "norm_epsilon",
        "tied_head",
        "pretrained",
        "family",
        "resize_vocabulary",
        "last_layers",
        "mtp_layers",
        "scores",
        *(name for name, _, _ in walk_fields(MoEConfig, "moe.")),
    }  # tested in test_decoder.py, test_larger_vocabulary.py, test_trainable.py, test_router_bias.py, test_experts.py,
    # test_refusals_hf_torch.py, test_mtp.py, test_scores_hf_torch.py
    fields = {name for name, _, _ in walk_fields(ModelConfig)}
    assert set().union(*SWITCHES.values()) == fields - sizes - elsewhere


@pytest.mark.parametrize("name, policy", [(name, "full" if name == "gemma" else "none") for name in MODELS])
def test_loss_and_gradients_match_the_reference(name: str, policy: str) -> None:
    model, batch, remat = Decoder(MODELS[name]), toy.microbatches(BATCH, 1), RematConfig(policy)  # type: ignore[arg-type]

    def loss_and_gradients(params: Params) -> Any:
        nothing = jax.tree.map(lambda leaf: None, params)
        return scan.loss_and_gradients(model, params, nothing, batch, 1 / jnp.float32(TOKENS), PLACEMENT, remat)

    run = jax.jit(loss_and_gradients, compiler_options=toy.QUICK_COMPILE)
    sums, gradients = run(params(name))
    expected_loss, expected = toy.reference_mean(MODELS[name], params(name), BATCH)
    assert sums[OBJECTIVE] / TOKENS == pytest.approx(expected_loss, rel=1e-6)

    def check(path: str, found: jax.Array, expected: np.ndarray) -> None:
        if path.endswith("layer/scale"):  # which the model does not learn
            assert not jnp.any(found), path
            return
        assert np.linalg.norm(expected) > 1e-4, path
        assert np.linalg.norm(found - expected) <= 2e-5 * np.linalg.norm(expected), path

    tree.map_with_path(check, gradients, expected)


EXPERTS = {"moe.experts": 4, "moe.expert_width": 12, "moe.balance_loss": 0.0}


@pytest.mark.parametrize("name, changes", [*((name, {}) for name in MODELS), ("gpt_oss", EXPERTS)])
def test_documents_of_a_row_compute_as_documents_alone(name: str, changes: dict[str, Any]) -> None:
    model, alone = Decoder(replace_fields(MODELS[name], changes)), toy.one_document_per_row(BATCH)
    values = toy.params(model.specs)
    assert len(alone.tokens) > 2 * len(BATCH.tokens)

    @functools.partial(jax.jit, compiler_options=toy.QUICK_COMPILE)
    @jax.value_and_grad
    def run(params: Params, batch: Batch) -> jax.Array:
        return scan.microbatch_loss(model, params, batch, jnp.float32(1), PLACEMENT, RematConfig("none"))[0]

    (loss, gradients), (expected_loss, expected) = run(values, BATCH), run(values, alone)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)

    def check(path: str, found: jax.Array, expected: jax.Array) -> None:
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected), path

    tree.map_with_path(check, gradients, expected)


@pytest.mark.parametrize("name", ["dynamic", "phi"])
def test_documents_over_several_devices_keep_their_frequencies(name: str) -> None:
    model, placement = Decoder(MODELS[name]), toy.placement(context=2, data=2)

    @functools.partial(jax.jit, compiler_options=toy.QUICK_COMPILE)
    def run(params: Params) -> jax.Array:
        return scan.microbatch_loss(model, params, BATCH, jnp.float32(1), placement, RematConfig("none"))[1][OBJECTIVE]

    expected, _ = toy.reference_mean(MODELS[name], params(name), BATCH)
    assert run(params(name)) / TOKENS == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_reference_match_finite_differences(name: str) -> None:
    where = BATCH.loss_mask, BATCH.segment_ids, BATCH.positions
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), params(name))
    assert_finite_differences(wide, toy.reference_config(MODELS[name]), (BATCH.tokens, BATCH.targets, *where))


@pytest.mark.parametrize("name, switch", [(name, switch) for name, on in SWITCHES.items() for switch in on])
def test_each_switch_changes_the_reference(name: str, switch: str) -> None:
    off = replace_fields(MODELS[name], {switch: get_field(BASE, switch)})
    if paths(param_specs(off)) <= paths(param_specs(MODELS[name])):
        where = BATCH.tokens, BATCH.segment_ids, BATCH.positions
        models = MODELS[name], off
        on, without = (reference.logits(params(name), toy.reference_config(model), *where) for model in models)
        assert switch == "max_positions" or toy.distance(on, without) > 1e-3
    else:
        assert switch in (
            "mlp",
            "norm_placement",
            "values_from_keys",
            "shared_key_layers",
            "parallel_block",
            "pattern",
            "mla.kv_rank",
            "mla.query_rank",
        )  # switches that need other parameters


@pytest.mark.parametrize("name", MODELS)
def test_cached_logits_match_uncached_logits(name: str) -> None:
    model, tokens = Decoder(MODELS[name]), BATCH.tokens[:, :8]
    positions, ones = np.broadcast_to(np.arange(8), tokens.shape), np.ones_like(tokens)
    forward = jax.jit(functools.partial(scan.forward, model), compiler_options=toy.QUICK_COMPILE)
    caches, pieces = scan.make_caches(model, *tokens.shape, jnp.float32, PLACEMENT), []
    for first in (0, 4):
        part = slice(first, first + 4)
        context = Context(
            positions[:, part],
            KeyRanges(jnp.zeros((len(tokens), 4), jnp.int32), positions[:, part]),
            PLACEMENT,
            jnp.full(len(tokens), first),
            lengths=jnp.full((len(tokens), 1), 8),
        )
        piece, caches = forward(toy.by_layer(params(name)), tokens[:, part], context, caches)
        pieces.append(piece[..., : toy.CONFIG.vocabulary_size])
    expected = reference.logits(params(name), toy.reference_config(MODELS[name]), tokens, ones, positions)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), expected, rtol=1e-5, atol=2e-5)


# ---- Norms, biases and sinks are neither adapted nor decayed; initially norms and biases are the identity.


OF_DELTA = ("_kernel", "/decay_offset", "/decay_rate")  # of a Gated DeltaNet


def is_vector(path: str) -> bool:
    return "_norm/" in path or path.endswith(("_bias", "/sinks", "/alpha_p", "/alpha_n", "layer/scale", *OF_DELTA))


def test_initial_norms_and_biases_are_the_identity() -> None:
    for name, model in MODELS.items():
        values = leaves.initialize(param_specs(model), seed=0)
        centred = 0 if model.norm_zero_centered else 1

        def check(path: str, leaf: jax.Array, centred: int = centred) -> None:
            one = 1 if "delta_norm" in path else centred
            if path.endswith(OF_DELTA):
                if path.endswith("_rate"):
                    assert (jnp.exp(leaf) < 16).all() and jnp.std(leaf) > 0
                elif path.endswith("_offset"):
                    np.testing.assert_array_equal(leaf, 1)
                else:
                    assert jnp.std(leaf) == pytest.approx(leaf.shape[-1] ** -0.5, rel=0.3), path
                return
            if "/alpha_" in path:  # through softplus
                np.testing.assert_allclose(np.logaddexp(0, leaf), 0.8 if path.endswith("_p") else 0.3, rtol=1e-6)
                return
            if is_vector(path):
                np.testing.assert_array_equal(leaf, one if path.endswith("/scale") else 0)
            else:
                assert jnp.std(leaf) > 0, path

        tree.map_with_path(check, values)
        assert any(is_vector(path) for path in paths(values)), name


@pytest.mark.parametrize("name", MODELS)
def test_only_matrices_and_tables_decay_and_have_adapters(name: str) -> None:
    model = Decoder(MODELS[name])
    block = jax.tree.map(lambda spec: spec.unstack(), model.specs["segment_0"]["block_0"])
    for section, specs in (("non_layer", model.specs["non_layer"]), ("segment_0", block)):
        optimizer = make_optimizer(OptimizerConfig(), lambda step: 1.0, section, specs)
        ones = jax.tree.map(lambda spec: jnp.ones(spec.shape), specs)
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, ones), optimizer.init(ones), ones)
        decayed = tree.map_with_path(lambda path, update: path if jnp.any(update) else None, updates)
        assert set(jax.tree.leaves(decayed)) == {path for path in paths(specs) if not is_vector(path)}
    everything = LoraConfig(rank=2, targets=("*",))
    _, adapted, _ = lora.adapt_model(model, everything, PLACEMENT.precision)
    assert {path.rsplit("/", 1)[0] for path in paths(adapted)} == {
        path for path in paths(model.specs) if not is_vector(path)
    }
