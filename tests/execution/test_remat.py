"""What each rematerialisation policy keeps and computes again, read off compiled programs of a small decoder."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.execution import pipeline, scan
from jaxopt_llm.execution.stacks import RematConfig
from jaxopt_llm.execution.stages import EVEN, rest_on_stages
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import make_parts
from jaxopt_llm.model.intermediates import Intermediate
from jaxopt_llm.parallel import hlo

WIDTH, LAYERS = 64, 128  # so many that what is outside of them is little beside them
LENGTH = WIDTH  # so that each of attention's products is one [B, S, D] × [D, D], as the query's is
MODEL = replace(
    toy.CONFIG, pattern=("global",), layers=LAYERS, width=WIDTH, heads=4, kv_heads=4, head_dim=16, mlp_width=2 * WIDTH
)
LATENT = replace(MODEL, latent_rank=32, query_rank=32, rotary_head_dim=8, value_head_dim=16)
ROWS = toy.packed(2, LENGTH)
TOKENS = np.float32(np.sum(ROWS.loss_mask))
ACTIVATION = 2 * LENGTH * WIDTH * 4  # bytes of [B, S, D]
PRODUCT = 2 * 2 * LENGTH * WIDTH * WIDTH  # FLOPs
LOG_SUMS = 1 / 16  # of an activation: one number of a head's 16


class Result(NamedTuple):
    activations: float  # that a layer adds to the temporaries
    products: float  # of a layer
    gradients: Any


@functools.cache
def compute(remat: RematConfig, model: ModelConfig = MODEL) -> Result:
    parts = make_parts(model)
    params = toy.params(parts.specs)
    nothing = jax.tree.map(lambda leaf: None, params)
    batch, placement = toy.microbatches(ROWS, 1), toy.placement()

    def gradients(params: Any) -> Any:
        return scan.loss_and_gradients(parts, params, nothing, batch, 1 / TOKENS, placement, remat)[-1]

    compiled = jax.jit(gradients, compiler_options=toy.QUICK_COMPILE).lower(params).compile()
    return Result(
        activations=hlo.memory(compiled).temporaries / LAYERS / ACTIVATION,
        products=hlo.dot_flops(compiled.as_text()) / LAYERS / PRODUCT,
        gradients=compiled(params),
    )


# What a layer keeps, in activations, and computes again, in products. Queries, keys and values are one each, gate and
# up two; attention is two products, and one activation with its log-sum-exp. No policy computes the last product again.
@pytest.mark.parametrize(
    ("remat", "kept", "again"),
    [
        # On CPUs attention's result twice: as the kernel gives it, and as it is then pinned.
        (RematConfig("none"), 1 + 3 + (1 + LOG_SUMS) + 1 + 1 + 4, 0),
        (RematConfig("dots"), 1 + 3 + 1 + 4, 2),
        (RematConfig("save_qkv"), 1 + 3 + (1 + LOG_SUMS), 1 + 4),
        (RematConfig("save_attention"), 1 + (1 + LOG_SUMS), 3 + 1 + 4),
        (RematConfig("full"), 1, 3 + 2 + 1 + 4),
        (RematConfig(("attention_input", "mlp_input", "attention_output")), 1 + 3, 3 + 2 + 4),
        # The layer once more, with its last product, and then as `full` does.
        (RematConfig("full", every=4), 1 / 4, (3 + 2 + 1 + 4 + 2) + (3 + 2 + 1 + 4)),
    ],
    ids=str,
)
def test_a_policy_keeps_and_computes_again_what_it_says(remat: RematConfig, kept: float, again: int) -> None:
    found, none = compute(remat), compute(RematConfig("none"))
    assert found.products - none.products == pytest.approx(again, abs=1e-6)
    assert kept <= found.activations <= kept + 0.6  # and what is outside the layers
    assert toy.distance(found.gradients, none.gradients) < 1e-6


# Latents are half of an activation each, as what heads have of keys is, and what they share an eighth.
@pytest.mark.parametrize(
    ("remat", "kept", "again"),
    [
        (RematConfig("save_qkv"), 1 + (1 / 2 + 1 / 2 + 1 / 8) + (1 + 1 / 2 + 1) + (1 + LOG_SUMS), 1 + 4),
        (RematConfig(("latent",)), 1 + 1 / 2, (1 / 2 + 1 / 8) + (1 / 2 + 1 / 4 + 1 / 2) + 2 + 1 + 4),
    ],
    ids=str,
)
def test_of_latents_it_is_the_same(remat: RematConfig, kept: float, again: float) -> None:
    found, none = compute(remat, LATENT), compute(RematConfig("none"), LATENT)
    assert found.products - none.products == pytest.approx(again, abs=1e-6)
    assert kept <= found.activations <= kept + 0.6
    assert toy.distance(found.gradients, none.gradients) < 1e-6


def test_every_name_of_the_list_is_an_intermediate_of_the_block() -> None:
    parts, batch, placement = make_parts(LATENT), jax.tree.map(jnp.asarray, ROWS), toy.placement()

    def loss(params: Any, taps: Any) -> jax.Array:
        return scan.microbatch_loss(parts, params, batch, jnp.float32(1), placement, RematConfig("none"), taps)[0]

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=1))(toy.params(parts.specs), placement.taps(parts.specs)))
    assert [name for name in get_args(Intermediate) if f"name={name}]" not in text] == []


@pytest.mark.slow
def test_a_stage_of_a_pipeline_keeps_what_the_policy_says() -> None:
    """In each of its ticks with a backward, beside the forward from the stage's input."""
    stages, microbatches, layers = 2, 3, 4
    whole = make_parts(replace(MODEL, layers=layers))
    parts = rest_on_stages(whole, stages)
    params = toy.on_stages(parts.specs, toy.params(whole.specs))
    nothing = jax.tree.map(lambda leaf: None, params)
    batch = toy.microbatches(toy.packed(2 * microbatches, LENGTH), microbatches)

    def flops(remat: RematConfig) -> int:
        def run(params: Any, batch: Batch) -> Any:
            placement = toy.placement(pipeline=stages)
            return pipeline.loss_and_gradients(parts, params, nothing, batch, jnp.float32(1), placement, remat, EVEN)

        return hlo.dot_flops(jax.jit(run).lower(params, batch).compile().as_text())

    again = flops(RematConfig("save_qkv")) - flops(RematConfig("none"))
    assert again == (microbatches + stages - 1) * layers // stages * (1 + 4) * PRODUCT
