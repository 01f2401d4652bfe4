"""What tensor and sequence parallelism hold and move, read off programs compiled for eight H200s."""

import math
from collections import Counter

import programs
import pytest
from compiled_steps import (
    DEVICES,
    LOSS_CHUNK,
    ROWS,
    SEQUENCE,
    SHARE,
    VOCABULARY,
    WIDTH,
    Compiled,
    compiled,
    layer_parameters,
    per_layer,
)
from marks import slow

from jaxopt_llm.config import MeshConfig

TENSOR = MeshConfig(tensor=DEVICES)
ACTIVATION = ROWS * SEQUENCE * WIDTH * 2  # bytes of [B, S, D] in 16 bits
MIXED = MeshConfig(data=2, fsdp=2, tensor=2)


def whole_activations(step: Compiled, kind: str) -> float:
    """Arrays [B, S, D] that collectives of this kind work on in one step, several combined into one or not."""
    found = [each for each in step.collectives if each.kind == kind and each.array_bytes >= ACTIVATION]
    assert all(each.axes == ("tensor",) for each in found)
    assert {dtype for each in found for dtype in each.dtypes} <= {"bf16"}
    return sum(each.array_bytes * each.times for each in found) / ACTIVATION


@pytest.mark.core
@pytest.mark.parametrize(("remat", "reductions"), [("full", 5), *slow(("none", 4))])
def test_tensor_parallelism_reduces_as_megatron_does(remat: str, reductions: int) -> None:
    """Shoeybi et al. 2019 (arXiv:1909.08053): two all-reduces forward, two backward. Recomputation repeats the
    attention's; the MLP's is the block's output, which no backward needs."""

    def count(step: Compiled) -> int:
        found = [each for each in step.collectives if each.axes == ("tensor",) and each.array_bytes == ACTIVATION]
        assert {each.kind for each in found} == {"all-reduce"}
        assert {dtype for each in found for dtype in each.dtypes} == {"bf16"}
        return sum(each.times for each in found)

    assert per_layer(count, TENSOR, 0, remat) == reductions
    moved = per_layer(Compiled.wire_bytes, TENSOR, 0, remat)
    assert moved == pytest.approx(reductions * 2 * SHARE * ACTIVATION, rel=0.02), "something else is moved"


@pytest.mark.parametrize("mesh", [TENSOR, MeshConfig(fsdp=4, tensor=2)])
def test_split_vocabulary_is_never_whole(mesh: MeshConfig) -> None:
    step = compiled(8, mesh, 3 if mesh.size("fsdp") > 1 else 0)
    whole = [each for each in programs.list_array_shapes(step.text) if VOCABULARY in each.shape]
    assert all(math.prod(each.shape) < LOSS_CHUNK * VOCABULARY for each in whole)
    assert any(each.shape == (LOSS_CHUNK, VOCABULARY // mesh.tensor) for each in programs.list_array_shapes(step.text))


@pytest.mark.core
@pytest.mark.parametrize(
    ("remat", "gathers", "scatters"), [("full", 2 + 2 + 4, 2 + 1 + 2), *slow(("none", 2 + 4, 2 + 2))]
)
def test_sequence_parallelism_gathers_and_scatters_as_megatron_does(remat: str, gathers: int, scatters: int) -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198): each product's input is gathered and its sum scattered, attention's
    and the MLP's, forward and backward. The backward gathers the inputs once more, for the weights' gradients. What
    is recomputed is that forward without its last sum."""
    of = {"remat": remat, "sequence_parallel": True}
    assert per_layer(lambda step: whole_activations(step, "all-gather"), TENSOR, 0, **of) == gathers
    assert per_layer(lambda step: whole_activations(step, "reduce-scatter"), TENSOR, 0, **of) == scatters
    assert whole_activations(compiled(8, TENSOR, 0, **of), "all-reduce") == 0
    moved = per_layer(Compiled.wire_bytes, TENSOR, 0, **of)
    assert moved == pytest.approx((gathers + scatters) * SHARE * ACTIVATION, rel=0.01), "something else is moved"


GPT = (("norm", "layer"), ("positions", "learned"), ("biases", "all"), ("mlp", "gelu"))


@pytest.mark.slow
def test_switches_move_no_more_than_their_gradients() -> None:
    """Biases and norms are replicated over `tensor`, as key-value heads fewer than it are, of which keys' and values'
    gradients are summed over the heads that read them; learned positions leave attention's masks whole."""
    step = compiled(8, TENSOR, 0, "none", sequence_parallel=True, switches=(*GPT, ("kv_heads", 2)))
    # In eight layers, for the embedding and the head, and of the table of positions, which is replicated.
    assert whole_activations(step, "all-gather") == 8 * 6 + 2
    assert whole_activations(step, "reduce-scatter") == 8 * 4 + 2
    small = [each for each in step.collectives if each.array_bytes < ACTIVATION]
    heads = [each for each in small if each.dtypes == ("bf16",)]
    keys_and_values = 2 * ROWS * SEQUENCE * 2 * 128 * 2
    assert {each.array_bytes for each in heads if each.kind == "all-gather"} == {keys_and_values}
    assert sum(each.array_bytes * each.times for each in heads) < 8 * 2 * keys_and_values
    assert sum(each.array_bytes * each.times for each in small if each not in heads) < 8 * 0.02 * ACTIVATION


@pytest.mark.parametrize(("remat", "kept"), [("full", 1), *slow(("none", 2))])
def test_what_the_backward_keeps_of_the_residual_stream_is_divided(remat: str, kept: int) -> None:
    """A block's input, and without rematerialisation the MLP's too."""
    whole, divided = (
        per_layer(lambda step: step.memory.temporaries, TENSOR, 0, remat=remat, sequence_parallel=on)
        for on in (False, True)
    )
    assert whole - divided == pytest.approx(kept * SHARE * ACTIVATION, rel=0.05)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_outside_the_stacks_the_table_is_never_moved(sequence_parallel: bool) -> None:
    """The embedding's sum and that of the head's input's gradient, or gather and scatter of each; and of the loss a few
    numbers per token."""
    moved = Counter()
    for layers, times in ((8, 2), (16, -1)):
        for each in compiled(layers, TENSOR, 0, sequence_parallel=sequence_parallel).collectives:
            moved[each.kind] += times * each.array_bytes * each.times
    large = {kind: total for kind, total in moved.items() if total > 0.02 * ACTIVATION}
    kinds = ("all-gather", "reduce-scatter") if sequence_parallel else ("all-reduce",)
    assert large == pytest.approx(dict.fromkeys(kinds, 2 * ACTIVATION), rel=0.02)


@pytest.mark.slow
def test_composed_axes_each_move_their_own_and_as_much_for_every_layer_at_any_depth() -> None:
    shallow, deep = (compiled(layers, MIXED, 3, sequence_parallel=True) for layers in (4, 32))
    expected = {
        "fsdp": (4 + 2 + 2) * layer_parameters() / MIXED.tensor / 2,
        "data": 2 * 4 * layer_parameters() / MIXED.tensor / MIXED.fsdp / 2,
        "tensor": (8 + 5) * ACTIVATION / MIXED.data / MIXED.fsdp / 2,
    }
    for axis, bytes_per_layer in expected.items():
        moved = (deep.wire_bytes(axis) - shallow.wire_bytes(axis)) / 28
        assert moved == pytest.approx(bytes_per_layer, rel=2e-3), axis
    moved = (deep.wire_bytes() - shallow.wire_bytes()) / 28
    assert moved == pytest.approx(sum(expected.values()), rel=2e-3), "something else is moved"
