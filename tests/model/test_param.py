"""Initial values of parameters: what they depend on, and what they do not."""

import chex
import jax
import numpy as np
import pytest
import toy

from jaxopt_llm.config import ModelConfig
from jaxopt_llm.core.tree import Tree
from jaxopt_llm.model import param
from jaxopt_llm.model.decoder_specs import param_specs
from jaxopt_llm.model.param import ParamSpec, normal
from jaxopt_llm.parallel.zero import master_sharding

pytestmark = pytest.mark.core

UP = ParamSpec((32, 64), ("embed", "mlp"), (0,), normal())
OUTPUT = ParamSpec((4, 8, 32), ("heads", "head_dim", "embed"), (0, 1), normal(0.5))
TABLE = ParamSpec((128, 32), ("vocabulary", "embed"), (1,), normal())
SCALE = ParamSpec((32,), ("embed",))
SPECS = {"non_layer": {"table": TABLE, "scale": SCALE}, "segment_0": {"up": UP.stack(3), "output": OUTPUT.stack(3)}}


def assert_trees_equal(actual: Tree, expected: Tree) -> None:
    chex.assert_trees_all_equal(actual, expected)


def test_values_do_not_depend_on_other_leaves() -> None:
    alone = param.initialize({"segment_0": {"up": UP.stack(3)}}, seed=0)
    np.testing.assert_array_equal(alone["segment_0"]["up"], param.initialize(SPECS, seed=0)["segment_0"]["up"])


def test_values_depend_on_seed_path_and_layer() -> None:
    twice = {"a": UP.stack(2), "b": UP.stack(2)}
    first, second = (param.initialize(twice, seed) for seed in (0, 1))
    draws = [*first["a"], *first["b"], *second["a"], *second["b"]]
    assert len({np.asarray(draw).tobytes() for draw in draws}) == len(draws)
    assert_trees_equal(param.initialize(twice, seed=0), first)


def test_a_layer_does_not_depend_on_the_depth_of_its_stack() -> None:
    low, high = (param.initialize({"up": UP.stack(repeats)}, seed=0)["up"] for repeats in (3, 5))
    np.testing.assert_array_equal(low, high[:3])


def test_padding_a_table_keeps_its_other_rows() -> None:
    padded = ParamSpec((256, 32), TABLE.axes, TABLE.contracting, TABLE.init)
    small, large = (param.initialize({"table": spec}, seed=0)["table"] for spec in (TABLE, padded))
    np.testing.assert_array_equal(small, large[:128])


@pytest.mark.parametrize(
    "spec, deviation",
    [(UP, 32**-0.5), (OUTPUT, 0.5 * (4 * 8) ** -0.5), (TABLE, 32**-0.5)],
    ids=["up", "output", "table"],
)
def test_the_standard_deviation_is_scale_over_the_root_of_fan_in(spec: ParamSpec, deviation: float) -> None:
    for each in (spec, spec.stack(3)):
        values = np.asarray(param.initialize({"leaf": each}, seed=0)["leaf"])
        # The sample deviation of 1,024 or more normal values is off by 2% (one sigma).
        assert np.std(values) == pytest.approx(deviation, rel=0.1)
        assert abs(np.mean(values)) < 0.1 * deviation


@pytest.mark.parametrize("spec", [UP, OUTPUT, TABLE, SCALE])
def test_unstack_is_the_inverse_of_stack(spec: ParamSpec) -> None:
    stack = spec.stack(3)
    assert stack.leading == 1 and stack.shape == (3, *spec.shape) and stack.fan_in == spec.fan_in
    assert stack.unstack() == spec


def test_layer_indices_and_parameter_count() -> None:
    np.testing.assert_array_equal(param.layer_indices(SPECS["segment_0"]), range(3))
    assert param.layer_indices(SPECS["non_layer"]) is None
    assert param.count_parameters(SPECS) == 128 * 32 + 32 + 3 * (32 * 64 + 4 * 8 * 32)


def test_values_are_the_same_to_the_bit_on_eight_devices() -> None:
    def values(placement: toy.Placement) -> Tree:
        shardings = master_sharding(SPECS, placement)
        return jax.jit(lambda: param.initialize(SPECS, seed=0), out_shardings=shardings)()

    divided = values(toy.placement(zero_stage=3, fsdp=4, tensor=2))
    assert divided["segment_0"]["up"].addressable_shards[0].data.shape == (3, 8, 32)
    assert_trees_equal(divided, values(toy.placement()))


@pytest.mark.parametrize("ids, rows", [(1, 128), (128, 128), (129, 256), (258, 384)])
def test_tables_have_the_next_multiple_of_128_rows(ids: int, rows: int) -> None:
    # Independent of the mesh: the model is made before it.
    non_layer = param_specs(ModelConfig(vocabulary_size=ids, tied_head=False))["non_layer"]
    assert non_layer["embedding"]["table"].shape[0] == non_layer["head"]["table"].shape[0] == rows
