"""Quantised products and what they move, read off programs compiled for eight H200s."""

import jax
import numpy as np
import pytest
from compiled_steps import FSDP, LOSS_CHUNK, ROWS, SEQUENCE, WIDTH, Compiled, compiled, layer_parameters, per_layer
from marks import slow

from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.instructions import parse_module
from jaxopt_llm.config import MeshConfig
from jaxopt_llm.model.linear.outliers import COLUMNS
from jaxopt_llm.planning.kernel_bytes import walk_kernels

LAYERS = 8
BOTH = MeshConfig(fsdp=4, tensor=2)
CALL = "__cublas$lt$matmul$f8"
MLP_WIDTH = 4096
DOWN = MLP_WIDTH * WIDTH  # parameters of the product that no recomputation repeats


def matrices() -> int:
    """Parameters of a layer's."""
    return layer_parameters() - 2 * WIDTH


def products(layers: int, devices: int = 8) -> float:
    """FLOPs of each device in one pass through the matrices of so many layers."""
    return 2 * ROWS * SEQUENCE * layers * matrices() / devices


def gathered(step: Compiled, dtype: str) -> int:
    """Bytes of the layers' gathers that have this dtype; XLA sends norms with them, and scales."""
    inside = [each for each in step.collectives if each.kind == "all-gather" and each.axes == ("fsdp",)]
    return sum(each.array_bytes * each.times for each in inside if dtype in each.dtypes and each.times > 1)


@pytest.mark.core  # XLA's pattern of such calls is its own
@pytest.mark.parametrize(
    ("mesh", "stage", "exempt"),
    # On one device, XLA would join the products of queries, keys and values, and multiply them in 16 bits.
    [(BOTH, 3, 0), (MeshConfig(), 3, 0), *slow((FSDP, 3, 1), (MeshConfig(data=2, fsdp=4), 1, 0))],
)
def test_all_three_products_are_calls_in_fp8(mesh: MeshConfig, stage: int, exempt: int) -> None:
    """Under the scan over layers with remat full: forward, its recomputation, and both products of the backward."""
    step = compiled(LAYERS, mesh, stage, matmul="fp8", exempt=exempt)
    flops = hlo.count_dot_flops_by_dtype(step.text)
    once = products(LAYERS - 2 * exempt, mesh.devices)
    assert flops["f8e5m2"] == once  # the gradient of the input: e5m2 × e4m3
    assert flops["f8e4m3fn"] == once * (3 - DOWN / matrices())  # forward, again, and the gradient of the weight
    assert CALL in step.text and " dot(" not in step.text


def test_fp8_gathers_a_byte_per_parameter_and_reduces_scales() -> None:
    step = compiled(LAYERS, BOTH, 3, matmul="fp8", exempt=0)
    both_passes = 2 * LAYERS * matrices() / BOTH.tensor
    assert gathered(step, "f8e4m3fn") == pytest.approx(both_passes, rel=0.01)
    # What else is gathered in the loops is smaller than any matrix.
    assert gathered(step, "bf16") - gathered(step, "f8e4m3fn") < WIDTH * WIDTH
    # A scale per tensor: in loops devices reduce no more than scalars, and the loss of a chunk of tokens, in float32.
    of_scales = [each for each in step.collectives if each.kind == "all-reduce" and each.dtypes == ("f32",)]
    assert max(each.array_bytes for each in of_scales if each.times > 1) <= 4 * LOSS_CHUNK


@pytest.mark.core  # what a program computes once is XLA's choice
def test_unrolled_layers_keep_gate_and_up_but_not_the_activation() -> None:
    """No kernel reads more arrays of the MLP's width than gate, up and the gradient of their product."""
    rows = 64  # with fewer, XLA computes silu(gate) again by itself
    step = compiled(2, MeshConfig(), 3, remat="none", matmul="fp8", unroll="all", shape=(rows, SEQUENCE))
    read = [
        sum(array.dtype == "bf16" and array.bytes == 2 * rows * SEQUENCE * MLP_WIDTH for array in operands)
        for computation, kernel, _ in walk_kernels(parse_module(step.text))
        if kernel.opcode == "fusion"
        for operands in [[each for name in kernel.operands for each in computation[name].results]]
    ]
    assert max(read) == 3


@pytest.mark.slow
def test_exempt_layers_cost_no_second_stack_of_gradients() -> None:
    """Three loops write their layers' gradients to one stack: a layer more costs what it does in one loop, a share of
    its gradient in float32 and its block's input."""
    none, some = (
        per_layer(lambda step: step.alive, FSDP, 3, matmul="fp8", exempt=exempt, listed=True) for exempt in (0, 1)
    )
    gradient, block_input = 4 / 8 * layer_parameters(), ROWS // FSDP.fsdp * SEQUENCE * WIDTH * 2
    assert none == pytest.approx(gradient + block_input, rel=1e-3)
    # The loops of one layer are unrolled. XLA 0.10.2 reduces the gradients of both with the table's, and keeps them
    # whole until then: its peak comes after the backward, when no input is left.
    assert some == pytest.approx(gradient + (0 if jax.__version_info__ < (0, 11) else block_input), rel=1e-3)


@pytest.mark.slow
def test_int8_forwards_multiply_codes_and_gather_them() -> None:
    step = compiled(LAYERS, BOTH, 3, matmul="int8")
    flops = hlo.count_dot_flops_by_dtype(step.text)
    assert flops["s8"] == products(LAYERS) * (2 - DOWN / matrices())
    # Between the devices of `tensor`, partial sums go as they do without codes: in 16 bits.
    sums = {
        each.dtypes for each in step.collectives if each.axes == ("tensor",) and each.array_bytes > 4 * SEQUENCE * ROWS
    }
    assert sums == {("bf16",)}
    assert gathered(step, "s8") == pytest.approx(2 * LAYERS * matrices() / BOTH.tensor, rel=0.01)


@pytest.mark.slow
def test_outliers_add_no_gather_of_a_matrix() -> None:
    step, plain = (compiled(LAYERS, BOTH, 3, matmul="int8", outlier_threshold=each) for each in (6.0, 0.0))
    assert gathered(step, "s8") == pytest.approx(gathered(plain, "s8"), rel=0.01)
    others = [each for each in step.collectives if each.times > 1 and each.axes == ("fsdp",)]
    sizes = [each.array_bytes for each in others if each.kind != "reduce-scatter" and "s8" not in each.dtypes]
    # The rows of a matrix that meet outliers, in 16 bits; a whole matrix would be larger.
    assert max(sizes) <= COLUMNS * 4096 * 2 < WIDTH * WIDTH


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["int8_qat", "int4_qat"])
def test_weights_in_training_for_codes_multiply_in_16_bits(matmul: str) -> None:
    step, plain = (compiled(LAYERS, BOTH, 3, matmul=each) for each in (matmul, "compute_dtype"))
    assert hlo.count_dot_flops(step.text) == hlo.count_dot_flops(plain.text)
    assert "s8" not in hlo.count_dot_flops_by_dtype(step.text)
    dtypes = {spec.dtype for spec in jax.tree.leaves(step.program.specs.masters)}
    assert dtypes == {np.dtype(np.float32)}
