"""FLOPs of a step whose attention is a kernel, which XLA cannot look into: what is counted is what its formula says."""

from typing import Any

import pytest
from compiled_steps import ROWS, SEQUENCE, VOCABULARY, WIDTH, compiled
from marks import slow

from jaxopt_llm.compiler import hlo
from jaxopt_llm.config import MeshConfig, ModelConfig
from jaxopt_llm.kernels import attention_triton
from jaxopt_llm.model import flops

LAYERS, WINDOW = 8, 32
SPLIT = MeshConfig(fsdp=4, tensor=2)
RING = MeshConfig(fsdp=2, context=4)
KERNELS = {
    "pallas": [],
    "triton": [pytest.mark.skipif(bool(attention_triton.problems(128, "bfloat16", (9, 0))), reason="wants jax-triton")],
}
# A product of queries and keys, or of weights and values, over all keys: of one device, in all layers.
PRODUCT = 2 * LAYERS * ROWS * SEQUENCE * SEQUENCE * WIDTH // 8

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in KERNELS.items()])
@pytest.mark.parametrize(("remat", "forwards"), [("none", 1), *slow(("full", 2))], ids=["none", "full"])
def test_a_kernel_is_counted_by_the_keys_that_are_seen(name: str, remat: str, forwards: int) -> None:
    found, by_xla = (
        hlo.count_dot_flops(compiled(LAYERS, SPLIT, 3, remat, attention=each).text) for each in (name, "xla")
    )
    # Forward 2 products; backward 3 for the queries' gradient and 4 for the keys' and values', where XLA's has 5. So
    # few rows are one part, of which XLA multiplies all keys.
    of_xla = PRODUCT * (2 * forwards + 5)
    assert found - (by_xla - of_xla) == PRODUCT * (2 * forwards + 7) * (SEQUENCE + 1) / (2 * SEQUENCE)


def test_cudnn_computes_five_products_in_its_backward() -> None:
    found, ours = (
        hlo.count_dot_flops(compiled(LAYERS, SPLIT, 3, "none", attention=each).text) for each in ("cudnn", "pallas")
    )
    assert ours - found == PRODUCT * 2 * (SEQUENCE + 1) / (2 * SEQUENCE)


def test_a_ring_of_cudnn_computes_half_of_the_scores_of_another_devices_part() -> None:
    """Of each query and the keys before it, but that the diagonal is shared out over the calls."""
    found, ours = (
        hlo.count_dot_flops(compiled(2, RING, 3, "none", attention=each).text) for each in ("cudnn", "pallas")
    )
    product, parts = PRODUCT * 2 // LAYERS, RING.context
    of_cudnn = ((SEQUENCE + 1) + (parts - 1) * SEQUENCE) / parts
    assert ours - found == product * (9 * (SEQUENCE + 1) - 7 * of_cudnn) / (2 * SEQUENCE)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in KERNELS.items()])
@pytest.mark.parametrize("mesh, layers", [(SPLIT, LAYERS), (RING, 2)], ids=["tensor", "ring"])
@pytest.mark.slow
def test_of_a_window_its_own_keys(name: str, mesh: MeshConfig, layers: int) -> None:
    """In half of the layers. The model needs six products of attention's; a backward of two kernels has three more. In
    a ring once over all calls, each of which has a part of the keys that is no longer than the window."""
    switches: tuple[tuple[str, Any], ...] = (("pattern", ("global", "sliding")), ("window", WINDOW))
    step = compiled(layers, mesh, 3, "none", attention=name, switches=switches)
    model = ModelConfig(vocabulary_size=VOCABULARY, heads=8, head_dim=128, layers=layers, **dict(switches))
    specs = step.program.specs
    needed, attention = (
        flops.count_per_token(model, *of, SEQUENCE).causal for of in ((specs.masters, specs.frozen), ({}, {}))
    )
    tokens = ROWS * SEQUENCE / 8
    assert hlo.count_dot_flops(step.text) == pytest.approx(tokens * (needed + attention * (9 / 6 - 1)), rel=1e-9)
