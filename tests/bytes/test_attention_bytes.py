"""What a step with attention's own kernel holds, moves and runs, read off programs compiled for eight H200s."""

import collections
import math

import programs
import pytest
from compiled_steps import HEADS, ROWS, SEQUENCE, Compiled, compiled
from marks import slow

from jaxopt_llm.compiler import hlo, instructions
from jaxopt_llm.config import MeshConfig
from jaxopt_llm.kernels import attention_cudnn, attention_xla

LAYERS = 8
SPLIT = MeshConfig(fsdp=4, tensor=2)
MIXED = MeshConfig(pipeline=2, fsdp=2, tensor=2)
GROUPED = MeshConfig(data=2, fsdp=4)
KERNELS = {"forward": 1, "backward": 2}
DELTA = "attention/BSHV,BSHV->BHS"
TRITON = r'custom_call_target="(__gpu\$xla\.gpu\.triton)"'

pytestmark = pytest.mark.core


def calls(step: Compiled) -> int:
    """Of Triton's kernels, in a step of one device."""
    return sum(
        instructions.count_runs(instruction, run)
        for _, instruction, run in instructions.walk_instructions(step.text)
        if instruction.find(TRITON)
    )


@pytest.mark.parametrize(("remat", "forwards"), [("full", 2), ("save_attention", 1), *slow(("none", 1))])
def test_a_saved_result_is_not_computed_again(remat: str, forwards: int) -> None:
    step = compiled(LAYERS, SPLIT, 3, remat, attention="pallas")
    assert calls(step) == LAYERS * (forwards * KERNELS["forward"] + KERNELS["backward"])


def cudnn_calls(step: Compiled) -> collections.Counter[str]:
    """Of cuDNN's attention, in a step of one device, by direction."""
    found: collections.Counter[str] = collections.Counter()
    for computation, instruction, run in instructions.walk_instructions(step.text):
        name, direction = hlo.attention_kernel(computation, instruction) or ("", "")
        if name == "cudnn":
            found[direction] += instructions.count_runs(instruction, run)
    return found


@pytest.mark.parametrize(
    ("remat", "forwards", "mesh", "stage", "exchange"),
    [
        ("none", 1, SPLIT, 3, "ring"),
        *slow(
            ("save_attention", 1, GROUPED, 1, "ring"),
            ("full", 2, SPLIT, 3, "ring"),
            ("save_attention", 1, MeshConfig(fsdp=2, context=4), 3, "all_to_all"),
        ),
    ],
)
def test_cudnn_is_called_once_forward_and_once_backward(
    remat: str, forwards: int, mesh: MeshConfig, stage: int, exchange: str
) -> None:
    """And without the array that only our kernels read, the mean of the gradients of the softmax weights."""
    step, ours = (
        compiled(LAYERS, mesh, stage, remat, attention=name, context_exchange=exchange) for name in ("cudnn", "pallas")
    )
    assert cudnn_calls(step) == {"forward": forwards * LAYERS, "backward": LAYERS}
    assert DELTA in ours.text and DELTA not in step.text
    # The softmax statistics of each document exist in one layer at a time: the log-sum-exp of each query is kept.
    segments = (attention_cudnn.DOCUMENTS_PER_ROW + 1) * ROWS // mesh.batch_shards
    of_layer = segments, HEADS // (mesh.tensor * mesh.context), SEQUENCE
    statistics = [each.shape for each in programs.list_array_shapes(step.text) if each.shape[-3:] == of_layer]
    assert statistics and max(map(math.prod, statistics)) == math.prod(of_layer)


@pytest.mark.slow
def test_cudnn_in_pipeline_stages() -> None:
    """As many calls as of our kernels, which have two in a backward."""
    step, ours = (compiled(LAYERS, MIXED, 3, accumulation=4, attention=name) for name in ("cudnn", "pallas"))
    found = cudnn_calls(step)
    assert found["forward"] + 2 * found["backward"] == calls(ours)
    for axes in {each.axes for each in (*step.collectives, *ours.collectives)}:
        assert step.wire_bytes(*axes) == pytest.approx(ours.wire_bytes(*axes), rel=1e-3), axes


@pytest.mark.parametrize(("mesh", "stage"), [(SPLIT, 3), *slow((GROUPED, 1), (MIXED, 3))])
@pytest.mark.slow
def test_each_device_attends_to_its_own(mesh: MeshConfig, stage: int) -> None:
    """No operand is gathered for the kernel: what goes between devices is what goes without it."""
    accumulation = 4 if mesh.pipeline > 1 else 1
    found, expected = (
        compiled(LAYERS, mesh, stage, accumulation=accumulation, attention=name) for name in ("pallas", "xla")
    )
    assert calls(found)
    for axes in {each.axes for each in (*found.collectives, *expected.collectives)}:
        assert found.wire_bytes(*axes) == pytest.approx(expected.wire_bytes(*axes), rel=1e-3), axes
    assert found.memory.temporaries <= 1.01 * expected.memory.temporaries


def test_no_array_has_a_score_for_every_query_and_key() -> None:
    text = compiled(LAYERS, SPLIT, 3, attention="pallas").text
    assert not [each for each in programs.list_array_shapes(text) if each.shape[-2:] == (SEQUENCE, SEQUENCE)]


def test_heads_that_devices_share_are_repeated_for_each_device_alone() -> None:
    """Two key-value heads over four devices, with two query heads each: a kernel reads one."""
    step = compiled(LAYERS, MeshConfig(fsdp=2, tensor=4), 3, attention="pallas", switches=(("kv_heads", 2),))
    heads = {
        tuple(computation[name].results[0].shape[2] for name in instruction.operands[3:6])  # queries, keys and values
        for computation, instruction, _ in instructions.walk_instructions(step.text)
        if instruction.find(TRITON)
    }
    assert heads == {(2, 1, 1)}


@pytest.mark.slow
def test_masks_are_of_a_block_of_queries() -> None:
    """Not of all, formed once before the loop over layers."""
    rows, length = 8, 4096
    text = compiled(LAYERS, MeshConfig(fsdp=8), 3, shape=(rows, length)).text
    masks = [
        each
        for each in programs.list_array_shapes(text)
        if each.dtype == "pred" and length in each.shape and not each.fused
    ]
    assert masks
    assert max(math.prod(each.shape) for each in masks) <= rows // 8 * attention_xla.QUERY_BLOCK * length
