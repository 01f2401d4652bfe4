"""The forms in which tokens go to their experts: whichever, and however uneven the load, every choice is computed."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from test_experts import CONFIG, CONFIGS, LENGTH, ROWS, run

from jaxopt_llm import tree
from jaxopt_llm.model import exchange, experts
from jaxopt_llm.model.config import ModelConfig
from jaxopt_llm.model.decoder import Params, make_parts
from jaxopt_llm.parallel.sharding import Placement, ShardingConfig

ALL_TO_ALL = ShardingConfig(expert_exchange="all_to_all", expert_room=1.0)


def placement(sharding: ShardingConfig = ALL_TO_ALL, **mesh: int) -> Placement:
    return replace(toy.placement(sharding.zero_stage, **mesh), sharding=sharding)


def crowded(config: ModelConfig) -> Params:
    """All tokens go to the first experts."""
    return tree.map_with_path(
        lambda path, leaf: np.zeros_like(leaf) if path.endswith("router") else leaf,
        toy.params(make_parts(config).specs),
    )


@pytest.mark.parametrize(
    ("name", "load", "mesh"),
    [
        pytest.param("mixtral", "random", {"expert": 4}, marks=pytest.mark.core),
        pytest.param("mixtral", "crowded", {"expert": 4}, marks=pytest.mark.core),
        ("qwen", "crowded", {"expert": 2, "fsdp": 2, "tensor": 2}),
        pytest.param("deepseek", "random", {"expert": 2, "context": 2}, marks=pytest.mark.slow),
        pytest.param("switch", "crowded", {"expert": 2, "data": 2}, marks=pytest.mark.slow),
        pytest.param("capacity", "crowded", {"expert": 2, "fsdp": 2}, marks=pytest.mark.slow),
    ],
)
def test_rounds_are_one_device(name: str, load: str, mesh: dict[str, int]) -> None:
    config = CONFIGS[name]
    params = crowded(config) if load == "crowded" else toy.params(make_parts(config).specs)
    zero_stage: Any = 1 if "data" in mesh else 3
    loss, _, gradients = run(config, params, toy.placement())
    of_many = run(config, params, placement(replace(ALL_TO_ALL, zero_stage=zero_stage), **mesh))
    assert of_many[0] == pytest.approx(loss, rel=1e-6)
    assert toy.distance(of_many[2], gradients) < 3e-6
    rounds = float(experts.seen(of_many[1].statistics)["expert_rounds"])
    if load == "random":
        assert 1 < rounds < 3
    else:  # twice an even load, or what is left when that is dropped
        assert rounds == (1 if name == "capacity" else 2)


@pytest.mark.parametrize("form", ["gather", "all_to_all"])
def test_a_sequence_that_tensor_divides_is_one_device(form: Any) -> None:
    params = crowded(CONFIG)
    divided = replace(ALL_TO_ALL, expert_exchange=form, sequence_parallel=True, zero_stage=3)
    (loss, _, gradients), of_many = (
        run(CONFIG, params, each) for each in (toy.placement(), placement(divided, expert=2, tensor=4))
    )
    assert of_many[0] == pytest.approx(loss, rel=1e-6)
    assert toy.distance(of_many[2], gradients) < 3e-6


@pytest.mark.core
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("per_token", [1, 2, 3, 4, 8])
def test_the_form_that_is_not_asked_for_sends_the_fewest_bytes(devices: int, per_token: int) -> None:
    config, room = replace(CONFIG, experts=8, experts_per_token=per_token), 1.5
    sent = {"gather": devices - 1, "all_to_all": room * per_token * (devices - 1) / devices}  # of a token, once
    found = exchange.form(config, ShardingConfig(expert_room=room), devices)
    assert sent[found] == min(sent.values())
    for asked in ("gather", "all_to_all", "ragged"):
        of_many = asked if devices > 1 else "gather"
        assert exchange.form(config, ShardingConfig(expert_exchange=asked), devices) == of_many


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str,
) -> jax.Array:
    """`jax.lax.ragged_all_to_all`, which XLA has on GPUs alone. NaN where a device awaits other rows than it gets."""
    row, own = jnp.arange(output.shape[0]), jax.lax.axis_index(axis_name)
    sides = jax.lax.all_gather((input_offsets, send_sizes, output_offsets), axis_name)
    for sender, rows in enumerate(jax.lax.all_gather(operand, axis_name)):
        begin, size, to = (each[sender, own] for each in sides)
        moved = jnp.where(recv_sizes[sender] == size, rows[(row - to + begin) % row.size], jnp.nan)
        output = jnp.where(((row >= to) & (row < to + size))[:, None], moved, output)
    return output


@pytest.mark.parametrize("load", ["random", "crowded"])
def test_what_is_filled_alone_is_one_device(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    params = crowded(CONFIG) if load == "crowded" else toy.params(make_parts(CONFIG).specs)
    loss, _, gradients = run(CONFIG, params, toy.placement())
    ragged = replace(ALL_TO_ALL, expert_exchange="ragged", zero_stage=3)
    of_many = run(CONFIG, params, placement(ragged, expert=2, fsdp=2))
    assert of_many[0] == pytest.approx(loss, rel=1e-6)
    assert toy.distance(of_many[2], gradients) < 3e-6


@pytest.mark.core
def test_it_is_said_what_goes_between_devices() -> None:
    said = "all_to_all over 4 devices, with room for 1.5 times an even load at a time"
    assert exchange.said(CONFIG, placement(replace(ALL_TO_ALL, expert_room=1.5), expert=4)) == said
    assert exchange.said(CONFIG, placement(ShardingConfig(), expert=2)) == "gather over 2 devices"
    assert exchange.said(CONFIG, placement(fsdp=2)) == exchange.said(toy.CONFIG, placement(expert=2)) == ""


@pytest.mark.core
def test_padding_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it would go to the same experts: of rows of nothing to one device's, in more rounds than tokens take."""
    batch = toy.packed(ROWS, LENGTH)
    nothing = jax.tree.map(lambda field: np.where(np.arange(ROWS)[:, None] < 3, field, 0), batch)
    monkeypatch.setattr(toy, "packed", lambda *of: nothing)
    params = toy.params(make_parts(CONFIG).specs)
    loss, _, gradients = run(CONFIG, params, toy.placement())
    room = replace(ALL_TO_ALL, expert_room=1.9, zero_stage=3)
    of_many = run(CONFIG, params, placement(room, expert=4))
    assert experts.seen(of_many[1].statistics)["expert_rounds"] == 1
    assert of_many[0] == pytest.approx(loss, rel=1e-6)
    assert toy.distance(of_many[2], gradients) < 3e-6
