"""What `mesh.fsdp auto` makes of the devices that there are, and what stays as the recipe or the user has it."""

from dataclasses import replace
from typing import Any

import pytest

from jaxopt_llm.config import Config, MeshConfig, ModelConfig, cli, fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.planning import device_mesh
from jaxopt_llm.planning.device_mesh import COPIED_SHARE, Devices, divides_over, fill_mesh
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes
from jaxopt_llm.step.validation import validate

pytestmark = pytest.mark.core

SIZES = ModelConfig(vocabulary_size=300, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=128)
FINETUNE = fields.replace_fields(cli.load_recipe("finetune.py"), {"model": SIZES})  # 16 rows, one at a time
MUCH = 10**12


def make(config: Config = FINETUNE, **values: Any) -> Config:
    return fields.replace_fields(config, {name.replace("__", "."): value for name, value in values.items()})


def fill(config: Config, count: int, hosts: int = 1, usable: int = 0, *given: str) -> tuple[dict[str, int], int, str]:
    """Return the axes above 1, the accumulation and the line. Without `usable`, no copy of the state fits."""
    filled, line = fill_mesh(config, Devices(count, hosts, usable), {*given})
    assert filled.training.batch_size == config.training.batch_size
    sizes = {axis: size for axis, size in filled.mesh.sizes.items() if size > 1}
    assert isinstance(filled.mesh.fsdp, int)
    return sizes, filled.training.accumulation, line


def test_all_devices_share_the_batch_and_the_state() -> None:
    assert fill(FINETUNE, 1) == ({}, 16, "")
    line = "2 devices: mesh.fsdp 2, training.accumulation 16 → 8 (1 row of each device at a time)"
    assert fill(FINETUNE, 2) == ({"fsdp": 2}, 8, line)
    assert fill(FINETUNE, 8)[:2] == ({"fsdp": 8}, 2)
    assert fill(FINETUNE, 16, hosts=2)[:2] == ({"fsdp": 16}, 1)


def test_a_device_has_no_more_rows_at_a_time_than_the_recipe_says() -> None:
    rows = make(training__batch_size=32, training__accumulation=8)  # 4 at a time
    assert [fill(rows, count)[:2] for count in (2, 4, 8, 16)] == [
        ({"fsdp": 2}, 4), ({"fsdp": 4}, 2), ({"fsdp": 8}, 1), ({"fsdp": 16}, 1),
    ]  # fmt: skip
    assert fill(rows, 3)[:2] == ({"fsdp": 2}, 4)
    odd = make(training__batch_size=24, training__accumulation=2)  # 12 at a time; 8 devices have 3
    line = "8 devices: mesh.fsdp 8, training.accumulation 2 → 1 (3 rows of each device at a time)"
    assert fill(odd, 8) == ({"fsdp": 8}, 1, line)


def test_devices_that_do_not_divide_the_recipes_batch_stay_idle() -> None:
    sizes, accumulation, line = fill(FINETUNE, 6)
    assert (sizes, accumulation) == ({"fsdp": 4}, 4)
    assert line == (
        "6 devices, 4 of them used: mesh.fsdp 4, training.accumulation 16 → 4 (1 row of each device at a time); "
        "training.batch_size=16 is not divisible by mesh.fsdp=6 (nearest that are: 12 and 18)"
    )


@pytest.mark.parametrize(
    ("values", "count", "words"),
    [
        ({"training__batch_size": 16}, 6, "training.batch_size=16 is not divisible by mesh.fsdp=6 (nearest"),
        ({"training__accumulation": 16}, 2, "accumulation=16 × mesh.fsdp=2 (nearest that are: 32); or set --training"),
    ],
)
def test_numbers_of_the_command_line_are_not_changed(values: dict[str, Any], count: int, words: str) -> None:
    given = [name.replace("__", ".") for name in values]
    with pytest.raises(InputError) as refused:
        fill(make(**values), count, 1, 0, *given)
    assert words in str(refused.value) and "; or set --mesh.fsdp " in str(refused.value)
    divisible = make(training__batch_size=32, training__accumulation=4)
    assert fill(divisible, 8, 1, 0, "training.batch_size", "training.accumulation")[:2] == ({"fsdp": 8}, 4)


def typed(*flags: str) -> cli.Recipe:
    """Return the recipe finetune.py with flags, and with a small model."""
    recipe = cli.parse_recipe(["--config", "finetune.py", *flags], "train")
    return replace(recipe, config=fields.replace_fields(recipe.config, {"model": SIZES}))


@pytest.mark.parametrize(("batch", "on"), [(8, {1: 8, 2: 4, 8: 1}), (32, {1: 32, 2: 16, 8: 4}), (6, {1: 6, 2: 3})])
def test_the_recipes_accumulation_follows_a_given_batch_size(batch: int, on: dict[int, int]) -> None:
    recipe = typed("--training.batch-size", str(batch))
    validate(recipe.config)
    for count, accumulation in on.items():
        assert fill(recipe.config, count, 1, 0, *recipe.flags)[:2] == (
            {"fsdp": count} if count > 1 else {},
            accumulation,
        )


def test_an_accumulation_that_is_given_or_belongs_to_a_mesh_does_not_follow() -> None:
    both = typed("--training.batch-size", "8", "--training.accumulation", "16")
    assert both.config.training.accumulation == 16
    with pytest.raises(InputError, match=r"^training.batch_size=8 is not divisible by training.accumulation=16 .*8$"):
        validate(both.config)
    assert typed("--training.batch-size=8", "--mesh.fsdp=1").config.training.accumulation == 16
    whole = cli.parse_recipe(["--config", "quickstart.py", "--training.batch-size", "64"], "train")
    assert whole.config.training.accumulation == 1, "the recipe does not limit the rows at a time"
    with pytest.raises(InputError, match="or set --mesh.fsdp 2, and 1 of them stays idle"):
        fill(typed("--training.batch-size=8").config, 3, 1, 0, "training.batch_size")


def test_axes_that_are_set_keep_their_sizes() -> None:
    assert fill(make(mesh__tensor=2), 8)[0] == {"fsdp": 4, "tensor": 2}
    assert fill(make(mesh__data=4), 8, usable=MUCH)[0] == {"data": 4, "fsdp": 2}
    assert fill(make(mesh__tensor=2), 3)[2].endswith("; the other axes of the mesh do not divide over more")
    assert fill(make(mesh__tensor=4), 2)[0] == {"tensor": 4}, "make_mesh refuses it"
    recipe = cli.load_recipe("llama2_7b.py")
    assert fill(recipe, recipe.mesh.devices) == (dict(filter(lambda each: each[1] > 1, recipe.mesh.sizes.items())),
                                                 recipe.training.accumulation, "")  # fmt: skip
    # Where auto takes no device, the mesh is the recipe's own, and nothing needs to be said.
    assert fill(make(mesh__tensor=2), 2) == ({"tensor": 2}, 16, "")


def test_fewer_devices_than_are_visible_get_a_line() -> None:
    one = make(mesh__fsdp=1)
    line = "2 devices, 1 of them used: mesh.fsdp 1 (1 row of each device at a time); --mesh.fsdp auto takes all"
    assert fill(one, 2) == ({}, 16, line)
    assert fill(one, 1)[2] == ""


def test_a_small_state_is_copied() -> None:
    sizes = compute_state_sizes(make(mesh__data=2))
    assert sizes is not None
    enough = int((sizes.parameters + sizes.optimizer) / COPIED_SHARE) + 1
    assert fill(FINETUNE, 2, 1, enough)[:2] == ({"data": 2}, 8)
    assert fill(FINETUNE, 2, 1, enough - 4)[:2] == ({"fsdp": 2}, 8)
    for name, value in (("zero_stage", 2), ("optimizer_over_data", True), ("fsdp_gradients", "int8")):
        assert fill(make(**{f"sharding__{name}": value}), 2, 1, MUCH)[0] == {"fsdp": 2}, "a setting asks for division"
    local = make(training__local_steps=20, training__steps=40, training__epochs=0.0)
    assert fill(local, 2, 1, MUCH)[0] == {"fsdp": 2}, "each index of mesh.data would train by itself"


def test_what_is_returned_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Config] = []
    monkeypatch.setattr(device_mesh, "validate", checked.append)
    for usable in (0, MUCH):
        assert fill_mesh(FINETUNE, Devices(2, 1, usable))[0] == checked[-1]


def test_a_problem_that_only_names_given_numbers_leaves_devices_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's numbers divide, so that another one of them would not help."""

    def refuse(config: Config) -> None:
        if config.mesh.devices > 2:
            raise InputError("something with training.batch_size=16 and training.accumulation=2 is not supported")

    monkeypatch.setattr(device_mesh, "validate", refuse)
    rows = make(training__batch_size=16, training__accumulation=2)
    sizes, _, line = fill(rows, 4, 1, 0, "training.batch_size", "training.accumulation")
    assert sizes == {"fsdp": 2} and line.endswith("is not supported")


def test_a_pipeline_keeps_its_microbatches() -> None:
    stages = make(mesh__pipeline=2, training__accumulation=4)
    assert fill(stages, 4)[:2] == ({"pipeline": 2, "fsdp": 2}, 2)
    assert fill(stages, 16)[:2] == ({"pipeline": 2, "fsdp": 8}, 2)


def test_each_host_has_as_many_devices() -> None:
    assert fill(FINETUNE, 12, hosts=2)[0] == {"fsdp": 8}
    assert fill(FINETUNE, 20, hosts=4)[0] == {"fsdp": 16}
    with pytest.raises(InputError, match=r"^24 devices in 3 processes: training.batch_size=16 .* 24"):
        fill(FINETUNE, 24, hosts=3)
    assert [hosts for hosts in range(1, 17) if divides_over(FINETUNE, hosts)] == [1, 2, 4, 8, 16]
    assert divides_over(make(mesh__tensor=3), 3)


def test_what_a_setting_does_not_support_is_left_out() -> None:
    """A block of 8-bit moments must not straddle two devices."""
    blocks = make(optimizer__state_dtype="int8", lora__rank=0, lora__alpha=16.0, training__batch_size=64)
    sizes, _, line = fill(blocks, 64)
    assert sizes.get("fsdp", 1) < 64 and "optimizer.state_dtype=int8" in line


def test_before_it_is_resolved_auto_counts_as_one() -> None:
    assert MeshConfig().devices == MeshConfig().batch_shards == 1 and MeshConfig(tensor=2).devices == 2
    assert set(MeshConfig().sizes.values()) == {1}
