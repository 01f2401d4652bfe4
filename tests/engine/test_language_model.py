"""LanguageModel: the decoder in a loss of the user's is the decoder that `train` trains, in values and in bytes."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from marks import slow

import jaxopt_llm
from jaxopt_llm.compiler import hlo, topology
from jaxopt_llm.config import Config, LoraConfig, ModelConfig, OptimizerConfig, RematConfig, ScheduleConfig
from jaxopt_llm.config import MLAConfig, MoEConfig, TrainingConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.engine.engine import Engine
from jaxopt_llm.engine.frontends import unbox
from jaxopt_llm.engine.gradients import differentiate_user_model
from jaxopt_llm.engine.program import make_engine_program
from jaxopt_llm.execution import scan
from jaxopt_llm.model.decoder import Decoder
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.placement import Placement

# Biases, norms of queries and keys, a head of its own, soft caps; with windows, in two segments.
SWITCHES = replace(toy.CONFIG, biases="all", qk_norm="head", norm_placement="both", tied_head=False, logit_softcap=3.0)
LATENT = replace(toy.UNIFORM, mla=MLAConfig(kv_rank=8, rotary_head_dim=2), kv_heads=4, norm_epsilon=1e-6)
CONFIGS = {
    "toy": toy.CONFIG,
    "switches": SWITCHES,
    "learned": replace(toy.UNIFORM, positions="learned", max_positions=16, norm="layer", mlp="gelu"),
    "latent": LATENT,
}
FIELDS = ("tokens", "targets", "loss_mask", "segment_ids", "positions")


def next_token_loss(model: jaxopt_llm.LanguageModel, parameters: Any, batch: Any) -> Any:
    logits = model.logits(parameters, batch["tokens"], batch["segment_ids"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return (losses * batch["loss_mask"]).sum(), batch["loss_mask"].sum()


def make_engine(model: jaxopt_llm.LanguageModel, batch: Any, rules: Any = None, **sections: Any) -> Engine:
    loss = functools.partial(next_token_loss, model)
    sections = {"precision": {"compute_dtype": "float32"}} | sections
    return jaxopt_llm.initialize(functools.partial(model.initialize, 0), loss, batch, Config(**sections), rules=rules)


def as_dict(batch: Any) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in FIELDS}


@functools.cache
def of_the_decoder(name: str) -> tuple[float, Any]:
    """Return the mean loss and the gradients of the decoder's own executor, on one device."""
    decoder, placement, batch = Decoder(CONFIGS[name]), toy.placement(), toy.packed(8, 16)
    parameters = jax.jit(lambda: unbox(LANGUAGE[name].initialize(0)))()
    weight = jnp.float32(1 / batch.loss_mask.sum())
    run = functools.partial(
        scan.loss_and_gradients, decoder, placement=placement, remat=RematConfig("none"), loss_weight=weight
    )
    nothing = jax.tree.map(lambda _: None, parameters)
    loss, tokens, _, gradients = jax.jit(run)(parameters, nothing, toy.microbatches(batch, 1))
    return float(loss / tokens), gradients


LANGUAGE = {name: jaxopt_llm.LanguageModel(config) for name, config in CONFIGS.items()}
TENSOR = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocabulary": "tensor"}


@pytest.mark.parametrize(
    ("name", "sections", "rules"),
    [
        ("toy", {"mesh": {"fsdp": 8}, "remat": {"policy": "full"}}, None),
        ("switches", {"mesh": {"fsdp": 4, "tensor": 2}}, TENSOR),
        (
            "learned",
            {"mesh": {"data": 2, "fsdp": 4}, "training": {"accumulation": 1}, "sharding": {"zero_stage": 1}},
            None,
        ),
        ("latent", {"mesh": {"fsdp": 8}, "remat": {"policy": "full"}}, None),
    ],
)
def test_losses_and_gradients_are_those_of_the_decoder(name: str, sections: Any, rules: Any) -> None:
    engine = make_engine(LANGUAGE[name], as_dict(toy.packed(8, 16)), rules, **sections)
    job, program, batch = engine._job, engine.program, engine.place(as_dict(toy.packed(8, 16)))
    differentiate = differentiate_user_model(program.model, program.placement)

    @jax.jit
    def mean(state: Any, batch: Any) -> Any:
        found = differentiate(state, batch, 1.0)
        gradients = jax.tree.map(lambda gradient: gradient / found.divisor, found.gradients)
        return found.loss, job.frontend.as_tree(program.model.flatten(gradients))

    (loss, gradients), (expected_loss, expected) = mean(engine.state, batch), of_the_decoder(name)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    jax.tree.map_with_path(
        lambda path, *pair: np.testing.assert_array_less(toy.distance(*pair), 1e-5, path), gradients, expected
    )
