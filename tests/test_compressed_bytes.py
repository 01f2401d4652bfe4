"""Bytes between replicas with the optimizer divided over them and with blocks of codes, on programs for 8 × 8 GPUs.

`data` is between hosts and `fsdp` inside them.
"""

from typing import Any

import pytest
from marks import slow
from test_bytes import Compiled, compiled, layer_parameters, per_layer

from jaxopt_llm.config import MeshConfig
from jaxopt_llm.parallel.blocks import BLOCK_SIZES

HOSTS = MeshConfig(data=8, fsdp=8)
SHARE = 7 / 8  # of an array, sent by each device of a ring of 8
ROWS = (64, 128)
CODED = {"int8": 1 + 4 / BLOCK_SIZES[0], "int4": 0.5 + 4 / BLOCK_SIZES[0]}  # bytes of a value: a scale per block


def between_hosts(step: Compiled) -> float:
    return step.wire_bytes("data")


def measure(sharded: dict[str, Any], stage: int = 3, accumulation: int = 1) -> float:
    """Return the bytes between hosts, per parameter of a layer that a device of a host holds."""
    settings = {"accumulation": accumulation, "sharded": tuple(sharded.items()), "shape": ROWS}
    return per_layer(between_hosts, HOSTS, stage, **settings) / (layer_parameters() / 8)


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize(
    ("sharded", "expected"),
    [
        ({}, 2 * 4),
        ({"optimizer_over_data": True}, 4 + 2),
        ({"data_gradients": "int8"}, CODED["int8"] + CODED["int8"]),
        ({"optimizer_over_data": True, "int8_gathers": ("data",), "data_gradients": "int8"}, 2 * CODED["int8"]),
        ({"optimizer_over_data": True, "int8_gathers": ("data",), "data_gradients": "int4"}, sum(CODED.values())),
    ],
)
def test_bytes_between_hosts(sharded: dict[str, Any], expected: float) -> None:
    """Gradients are summed, and new weights gathered, once a step, whatever the number of microbatches."""
    assert measure(sharded, accumulation=3) == pytest.approx(SHARE * expected, rel=0.02)


@pytest.mark.parametrize("accumulation", [1, *slow(3)])
def test_a_dense_step_sends_about_a_quarter_between_hosts(accumulation: int) -> None:
    """All of a step, its tables and norms included: ZeRO++'s factor of 4, and more with 4 bits."""
    exact, int8, int4 = (
        between_hosts(compiled(8, HOSTS, 3, accumulation=accumulation, sharded=sharded, shape=ROWS))
        for sharded in (
            (),
            *(
                (("optimizer_over_data", True), ("int8_gathers", ("data",)), ("data_gradients", bits))
                for bits in ("int8", "int4")
            ),
        )
    )
    assert int8 <= 0.28 * exact
    assert int4 <= 0.21 * exact


@pytest.mark.slow
@pytest.mark.parametrize("over_data", [False, True])
def test_gathers_of_layers_stay_inside_the_host_and_send_codes(over_data: bool) -> None:
    """Forward and backward each gather a layer, in int8; only the reduce-scatter of gradients is exact there."""
    sharded = (("optimizer_over_data", over_data), ("int8_gathers", ("fsdp",)))
    inside = per_layer(lambda step: step.wire_bytes("fsdp"), HOSTS, 3, sharded=sharded, shape=ROWS)
    assert inside == pytest.approx(SHARE * (4 + 2 * CODED["int8"]) * layer_parameters(), rel=0.02)


@pytest.mark.slow
def test_the_optimizer_over_data_rests_on_all_devices() -> None:
    """2 bytes of a compute copy inside each host, and 12 of masters and moments over all of them."""
    sharded = (("optimizer_over_data", True),)
    resting = per_layer(lambda step: step.memory.arguments, HOSTS, 3, sharded=sharded, shape=ROWS)
    assert resting == pytest.approx((2 / 8 + 12 / 64) * layer_parameters(), rel=0.02)
