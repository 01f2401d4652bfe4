"""Activations that each remat policy keeps and products that it repeats, read off small compiled programs."""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import ModelConfig, PipelineConfig, RematConfig, Schedule
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.config.parallel import Residuals
from jaxopt_llm.execution import pipeline, scan
from jaxopt_llm.execution.schedules import make_table
from jaxopt_llm.execution.segments import is_kept
from jaxopt_llm.execution.stage_layout import stack_by_stage
from jaxopt_llm.execution.trace import TOKENS as TOKENS_OF_TRACE
from jaxopt_llm.execution.trace import list_intermediates, trace_blocks
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.parallel.placement import Placement

WIDTH, LAYERS = 64, 128  # so many that everything outside the layers is small in comparison
LENGTH = WIDTH  # so that each product of attention costs as much as [B, S, D] × [D, D], like the query's
MODEL = replace(
    toy.CONFIG, pattern=("global",), layers=LAYERS, width=WIDTH, heads=4, kv_heads=4, head_dim=16, mlp_width=2 * WIDTH
)
LATENT = replace_fields(
    MODEL, {"mla.kv_rank": 32, "mla.query_rank": 32, "mla.rotary_head_dim": 8, "mla.value_head_dim": 16}
)
PARALLEL = replace(MODEL, parallel_block=True, norm="layer_no_bias", attention_gate="element", mlp="xielu")
ROWS = toy.packed(2, LENGTH)
TOKENS = np.float32(np.sum(ROWS.loss_mask))
ACTIVATION = 2 * LENGTH * WIDTH * 4  # bytes of [B, S, D]
PRODUCT = 2 * 2 * LENGTH * WIDTH * WIDTH  # FLOPs
LOG_SUMS = 1 / 16  # share of an activation: one number for the 16 of a head


class Result(NamedTuple):
    activations: float  # temporaries of each layer, in activations [B, S, D]
    products: float  # FLOPs of each layer, in products [B, S, D] × [D, D]
    gradients: Any


@functools.cache
def compute(remat: RematConfig, model: ModelConfig = MODEL) -> Result:
    model = Decoder(model)
    params = toy.params(model.specs)
    frozen = jax.tree.map(lambda leaf: None, params)
    batch, placement = toy.microbatches(ROWS, 1), toy.placement()

    def gradients(params: Any) -> Any:
        return scan.loss_and_gradients(model, params, frozen, batch, 1 / TOKENS, placement, remat)[-1]

    compiled = jax.jit(gradients, compiler_options=toy.QUICK_COMPILE).lower(params).compile()
    return Result(
        activations=hlo.read_memory(compiled).temporaries / LAYERS / ACTIVATION,
        products=hlo.count_dot_flops(compiled.as_text()) / LAYERS / PRODUCT,
        gradients=compiled(params),
    )


# kept: what a layer keeps, in activations; again: what it computes again, in products. Queries, keys and values are one
# each, gate and up two each; attention is two products, and one activation with its log-sum-exp. No policy computes the
# last product again.
@pytest.mark.parametrize(
    ("remat", "kept", "again"),
    [
        # On CPUs the result of attention is kept twice: as the kernel returns it, and after its sharding constraint.
        (RematConfig("none"), 1 + 3 + (1 + LOG_SUMS) + 1 + 1 + 4, 0),
        (RematConfig("dots"), 1 + 3 + 1 + 4, 2),
        (RematConfig("save_qkv"), 1 + 3 + (1 + LOG_SUMS), 1 + 4),
        (RematConfig("save_attention"), 1 + (1 + LOG_SUMS), 3 + 1 + 4),
        (RematConfig("full"), 1, 3 + 2 + 1 + 4),
        (RematConfig(("attention_input", "mlp_input", "attention_output")), 1 + 3, 3 + 2 + 4),
        # The whole layer once more, with its last product, and then as with `full`.
        (RematConfig("full", every=4), 1 / 4, (3 + 2 + 1 + 4 + 2) + (3 + 2 + 1 + 4)),
    ],
    ids=str,
)
def test_a_policy_keeps_and_recomputes_what_it_promises(remat: RematConfig, kept: float, again: int) -> None:
    found, none = compute(remat), compute(RematConfig("none"))
    assert found.products - none.products == pytest.approx(again, abs=1e-6)
    assert kept <= found.activations <= kept + 0.6  # the rest is outside the layers
    assert toy.distance(found.gradients, none.gradients) < 1e-6


# A latent is half of an activation. So is the heads' own part of the keys; the part that they share is an eighth.
@pytest.mark.parametrize(
    ("remat", "kept", "again"),
    [
        (RematConfig("save_qkv"), 1 + (1 / 2 + 1 / 2 + 1 / 8) + (1 + 1 / 2 + 1) + (1 + LOG_SUMS), 1 + 4),
        (RematConfig(("latent",)), 1 + 1 / 2, (1 / 2 + 1 / 8) + (1 / 2 + 1 / 4 + 1 / 2) + 2 + 1 + 4),
    ],
    ids=str,
)
def test_a_policy_keeps_and_recomputes_latents(remat: RematConfig, kept: float, again: float) -> None:
    found, none = compute(remat, LATENT), compute(RematConfig("none"), LATENT)
    assert found.products - none.products == pytest.approx(again, abs=1e-6)
    assert kept <= found.activations <= kept + 0.6
    assert toy.distance(found.gradients, none.gradients) < 1e-6


def predict(remat: RematConfig, model: ModelConfig) -> tuple[float, float]:
    """Return what the trace of a layer says: activations that it keeps, and products that it computes again."""
    ((trace, _),) = trace_blocks(Decoder(model), Decoder(model).specs, "float32")
    backward = trace.follow_backward(lambda name: is_kept(remat, name))
    kept = sum(math.prod(mark.shape) for mark in backward.saved) / TOKENS_OF_TRACE / WIDTH
    multiplied = sum(trace.products[index].multiplied for index in backward.products) / WIDTH**2
    return kept, multiplied + 2 * any(mark.name.role == "attention" for mark in backward.recomputed)


@pytest.mark.parametrize("model", [MODEL, LATENT, PARALLEL], ids=["plain", "latent", "parallel"])
@pytest.mark.parametrize(
    "policy", ["dots", "save_qkv", "save_attention", "full", ("mlp_up", "attention_output"), ("latent", "key")], ids=str
)
def test_the_trace_predicts_what_is_kept_and_computed_again(policy: Any, model: ModelConfig) -> None:
    remat, none = RematConfig(policy), RematConfig("none")
    kept, again = predict(remat, model)
    assert compute(remat, model).products - compute(none, model).products == pytest.approx(again, abs=1e-6)
    assert kept <= compute(remat, model).activations <= kept + 0.6


def test_blocks_name_the_intermediates_of_the_model() -> None:
    plain = ["block_input", "attention_input", "query", "key", "value", "attention", "attention_output"]
    assert list_intermediates(Decoder(MODEL)) == [*plain, "mlp_input", "mlp_gate", "mlp_up", "mlp_output"]
    assert "mlp_gate" not in list_intermediates(Decoder(replace(MODEL, mlp="gelu")))
    assert "attention_gate" in list_intermediates(Decoder(PARALLEL))
    latents = {"query_latent", "latent", "rotary_key"}
    assert {*list_intermediates(Decoder(LATENT))} - {*plain} >= latents
    assert {"router_logits", "expert_rows"} <= {*list_intermediates(Decoder(replace_fields(MODEL, {"moe.experts": 4})))}


def count_products(remat: RematConfig, model: ModelConfig, placement: Placement) -> float:
    """Return the FLOPs of a step, in products."""
    decoder = Decoder(model)
    params = toy.params(decoder.specs)
    frozen, batch = jax.tree.map(lambda leaf: None, params), toy.microbatches(ROWS, 1)

    def gradients(params: Any) -> Any:
        return scan.loss_and_gradients(decoder, params, frozen, batch, 1 / TOKENS, placement, remat)[-1]

    compiled = jax.jit(gradients, compiler_options=toy.QUICK_COMPILE).lower(params).compile()
    return hlo.count_dot_flops(compiled.as_text()) / PRODUCT


def test_layers_in_a_loop_of_their_own_recompute_by_the_policy() -> None:
    """XLA replaces a loop over one layer, as over the first that is not quantised, by its body."""
    model, placement = replace(MODEL, layers=4), toy.placement()
    placement = replace(placement, precision=replace(placement.precision, compute_dtype_layers=1))
    full, none = (count_products(RematConfig(policy), model, placement) for policy in ("full", "none"))
    assert full - none == model.layers * (3 + 2 + 1 + 4)


def test_groups_of_one_period_recompute_by_the_policy() -> None:
    """The whole period runs once more, but for the layer whose result is not read, and each layer as with `full`."""
    model = replace(MODEL, layers=4, pattern=("global", "local"), window=16)
    full, none = (
        count_products(remat, model, toy.placement()) for remat in (RematConfig("full", every=2), RematConfig("none"))
    )
    again = 3 + 2 + 1 + 4
    assert full - none == 2 * (again + 2) + model.layers * again


@pytest.mark.slow
@pytest.mark.parametrize("residuals", ["recompute", "store"])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_a_pipeline_stage_recomputes_by_the_policy(schedule: Schedule, chunks: int, residuals: Residuals) -> None:
    """It does so in each tick with a backward, with `recompute` in addition to the forward from the chunk's input.

    A chunk runs its layers without a loop, and XLA must not merge the two forwards.
    """
    stages, microbatches, layers_of_chunk = 2, 4, 2
    whole = Decoder(replace(MODEL, layers=stages * chunks * layers_of_chunk))
    pipelined = PipelineConfig(schedule, chunks, residuals=residuals)
    model = stack_by_stage(whole, stages, pipelined)
    params = toy.on_stages(model.specs, toy.params(whole.specs))
    frozen = jax.tree.map(lambda leaf: None, params)
    batch = toy.microbatches(toy.packed(2 * microbatches, LENGTH), microbatches)

    def flops(remat: RematConfig) -> int:
        def run(params: Any, batch: Batch) -> Any:
            placement = toy.placement(pipeline=stages)
            return pipeline.loss_and_gradients(
                model, params, frozen, batch, jnp.float32(1), placement, remat, pipelined
            )

        return hlo.count_dot_flops(jax.jit(run).lower(params, batch).compile().as_text())

    again = flops(RematConfig("save_qkv")) - flops(RematConfig("none"))
    backwards = int(np.sum(make_table(schedule, stages, microbatches, chunks).backward.active))
    assert again == backwards * layers_of_chunk * (1 + 4) * PRODUCT
