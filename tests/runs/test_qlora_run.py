"""QLoRA learns what LoRA over a bf16 base does: 200 steps of each over one pre-trained model."""

import inspect
import tarfile
import typing
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import toy
from texts import stream

from jaxopt_llm.config import LoraConfig, ModelConfig, OptimizerConfig, RematConfig, ScheduleConfig, TrainingConfig
from jaxopt_llm.core import tree
from jaxopt_llm.data.rows.packing import PackedRows
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.model.linear import leaves
from jaxopt_llm.model.model import Params
from jaxopt_llm.step import state as training_state

MODEL = ModelConfig(width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=128)
ROWS, LENGTH, STEPS = 4, 48, 200


def batches(module: ModuleType, count: int) -> list[Batch]:
    source = PackedRows(stream([inspect.getsource(module).encode()]), LENGTH, ByteTokenizer.vocabulary_size)
    order = np.random.default_rng(0).integers(0, len(source), (count, ROWS))
    return [jax.tree.map(lambda *rows: np.stack(rows)[None], *(source[int(row)] for row in rows)) for rows in order]


def trained(adapters: LoraConfig, base: Params | None, corpus: list[Batch]) -> tuple[Params, list[float]]:
    """What was trained, on the host, and the losses."""
    placement = toy.placement(compute_dtype="bfloat16")
    training = TrainingConfig(batch_size=ROWS, sequence_length=LENGTH)
    optimizer, schedule = OptimizerConfig(learning_rate=5e-3), ScheduleConfig(10, len(corpus))
    program = toy.make_program(MODEL, training, optimizer, schedule, RematConfig("none"), adapters, placement)
    state = training_state.initialize_state(program.specs, program.optimizers, 0, placement)
    if base is not None:
        params = jax.jit(lambda arrays: leaves.wrap_arrays(program.model.specs, arrays, seed=0))(base)
        state = replace(state, frozen=tree.restrict(params, program.specs.frozen))
    losses = []
    for batch in corpus:
        state, metrics = program.step(state, jax.device_put(batch, program.batch_sharding))
        losses.append(metrics["loss"])
    return jax.tree.map(np.asarray, state.masters), [float(loss) for loss in losses]


@pytest.mark.slow
def test_after_200_steps_its_loss_is_within_two_percent() -> None:
    base, learnt = trained(LoraConfig(), None, batches(typing, STEPS))
    corpus = batches(tarfile, STEPS)
    qlora: dict[str, Any] = {"base": "nf4", "double_quantisation": True}
    losses = {name: trained(LoraConfig(rank=8, **each), base, corpus)[1] for name, each in (("", {}), ("nf4", qlora))}
    began, ended = (
        {name: np.mean(each[part]) for name, each in losses.items()} for part in (slice(5), slice(-20, None))
    )
    assert np.mean(learnt[-20:]) < began[""] - 0.1  # the second corpus is another one
    assert ended[""] < began[""] - 0.1  # and is learnt
    assert ended["nf4"] == pytest.approx(ended[""], rel=0.02)
    assert losses["nf4"][0] != losses[""][0]
