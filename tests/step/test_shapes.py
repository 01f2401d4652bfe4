"""Tests of sizes that are not divisible by the mesh, and of the suggested sizes."""

import re
from dataclasses import replace
from typing import Any

import pytest
import toy

from jaxopt_llm.config import MeshConfig, ShardingConfig, TrainingConfig
from jaxopt_llm.config.fields import replace_fields
from jaxopt_llm.parallel.axes import ACTIVATION_AXES, PARAMETER_AXES, SEQUENCE_PARALLEL_AXES
from jaxopt_llm.step import validation

pytestmark = pytest.mark.core

MODEL = replace(toy.CONFIG, heads=8, kv_heads=4, mlp_width=32, vocabulary_size=500)
TRAINING = TrainingConfig(batch_size=24, sequence_length=32)


def problems(tensor: int, sequence_parallel: bool = True, **sizes: int) -> list[str]:
    """Return the problems of the sizes above, with some of them replaced."""
    of: dict[str, Any] = {"model": MODEL, "training": TRAINING}
    for section, config in of.items():
        of[section] = replace(config, **{name: size for name, size in sizes.items() if hasattr(config, name)})
    mesh = MeshConfig(data=2, fsdp=2, tensor=tensor)
    return validation.size_problems(**of, mesh=mesh, sharding=ShardingConfig(sequence_parallel=sequence_parallel))


@pytest.mark.parametrize(
    "tensor, name, size, nearest",
    [
        (4, "batch_size", 10, [8, 12]),
        (4, "batch_size", 3, [4]),
        (8, "heads", 12, [8, 16]),
        (4, "heads", 6, [4, 8]),  # also multiples of the four key-value heads
        (2, "kv_heads", 1, []),
        (8, "kv_heads", 4, []),
        (4, "mlp_width", 30, [28, 32]),
        (4, "sequence_length", 30, [28, 32]),
    ],
)
def test_a_size_is_named_with_the_nearest_that_work(tensor: int, name: str, size: int, nearest: list[int]) -> None:
    found = problems(tensor, **{name: size})
    if not nearest:
        assert not found
        return
    assert re.search(rf"\.{name}={size}\b.* is not divisible by .*mesh\.(tensor={tensor}|data=2 × )", found[0])
    assert found[0].endswith(f"(nearest that are: {' and '.join(map(str, nearest))})")
    assert "training.accumulation" not in found[0].partition(")")[2]  # one microbatch does not divide either
    for near in nearest:
        assert not problems(tensor, **{name: near})


def test_a_batch_that_is_too_small_is_offered_fewer_microbatches() -> None:
    (found,) = problems(1, batch_size=16, accumulation=8)
    assert found.endswith("(nearest that are: 32); or set --training.accumulation 4")
    assert not problems(1, batch_size=16, accumulation=4)


def test_key_value_heads_are_a_divisor_of_the_heads_and_fewer_than_tensor_or_a_multiple() -> None:
    (found, other) = problems(4, heads=24, kv_heads=6)
    assert found == "model.kv_heads=6 is not divisible by mesh.tensor=4 (nearest that are: 4 and 8)"
    assert other == "or set mesh.tensor=2, which divides all of these sizes"
    assert not problems(4, heads=24, kv_heads=3)


def test_a_vocabulary_is_padded_first() -> None:
    found, _ = problems(3, heads=12, kv_heads=3, mlp_width=30, sequence_length=30)
    assert found.startswith("model.vocabulary_size=500, padded to 512, is not divisible by mesh.tensor=3 (nearest")
    assert found.endswith("that are: 384 and 768)")


def test_a_sequence_need_not_divide_unless_it_is_split() -> None:
    assert not problems(4, sequence_parallel=False, sequence_length=30)


def test_all_is_said_at_once_about_every_axis_that_the_tables_lay_over_tensor() -> None:
    found = problems(5, batch_size=7, kv_heads=8)
    fields = ["batch_size", "heads", "mlp_width", "vocabulary_size", "kv_heads", "sequence_length"]
    assert [re.match(r"\w+\.([\w.]+)=", each)[1] for each in found[:-1]] == fields  # type: ignore[index]
    tables = (PARAMETER_AXES, ACTIVATION_AXES, SEQUENCE_PARALLEL_AXES)
    split = {name for table in tables for name, axes in table.items() if "tensor" in axes}
    where_it_divides = {"sent_sequence"}  # it is only split where it is divisible, so it has no message
    in_models_of_users = {"tensor"}  # engine/checks.py names a size that does not divide
    counted_by_no_table = {"devices"}  # of rows of experts: each device has an array of its own
    of_decoder = {"heads", "mlp", "expert_mlp", "vocabulary", "kv_heads", "residual_sequence"}
    assert split - where_it_divides - in_models_of_users - counted_by_no_table == of_decoder


def test_experts_divide_over_their_axis_and_their_width_over_tensor() -> None:
    model = replace_fields(
        MODEL, {"moe.experts": 6, "moe.expert_width": 10, "mlp_width": 30, "layers": 4, "moe.expert_every": 2}
    )
    for mlp_width in ({"mlp_width"}, set()):
        found = validation.size_problems(model, TRAINING, MeshConfig(expert=4, tensor=4), ShardingConfig())
        fields = {re.match(r"model\.([\w.]+)=", each)[1] for each in found[:-1]}  # type: ignore[index]
        assert fields == {"moe.experts", "moe.expert_width"} | mlp_width
        model = replace_fields(model, {"moe.expert_every": 1})  # no layer has an MLP of its own
