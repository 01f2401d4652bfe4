"""Meshes for fewer hosts than a recipe is for."""

import json
from dataclasses import replace

import pytest
from commands import command

from jaxopt_llm.config import Config, MeshConfig, ModelConfig, TrainingConfig
from jaxopt_llm.planning.search.fewer_hosts import choose_setting, list_flags, scale_mesh, scale_open_mesh
from jaxopt_llm.planning.search.roofline import Cluster

TOY = ModelConfig(width=64, layers=4, heads=4, kv_heads=4, head_dim=16, mlp_width=128, pattern=("global",))


def recipe(model: ModelConfig, batch_size: int, **mesh: int) -> Config:
    training = TrainingConfig(batch_size=batch_size, sequence_length=2048)
    return Config(model=model, training=training, mesh=MeshConfig(**mesh))


@pytest.mark.parametrize("hosts", [2, 3])
def test_the_batch_stays(hosts: int) -> None:
    chosen = choose_setting(recipe(TOY, 12, fsdp=4), Cluster("h100", hosts, 1))
    assert chosen is not None and chosen.mesh.devices == hosts
    assert chosen.training.batch_size == 12
    assert 12 % (chosen.mesh.batch_shards * chosen.training.accumulation) == 0
    changed = {flag.split("=")[0] for flag in list_flags(recipe(TOY, 12, fsdp=4), chosen)}
    assert changed <= {*(f"--mesh.{axis}" for axis in ("data", "fsdp", "pipeline")), "--training.accumulation"}


@pytest.mark.slow
def test_a_batch_that_does_not_fit_is_taken_in_more_parts() -> None:
    wide = ModelConfig(width=4096, layers=2, heads=32, kv_heads=32, head_dim=128, mlp_width=11008, pattern=("global",))
    chosen = choose_setting(recipe(wide, 1024, fsdp=64), Cluster("h100", 1, 2))
    assert chosen is not None and chosen.training.accumulation > 1


def test_a_number_of_devices_that_no_axis_takes_has_no_mesh() -> None:
    assert choose_setting(recipe(TOY, 8, fsdp=8), Cluster("h100", 7, 1)) is None


@pytest.mark.parametrize("hosts", [2, 3])
def test_groups_of_local_steps_stay_whole(hosts: int) -> None:
    """Without groups, no reason makes the planner divide the state over two devices in each of the hosts."""
    config = recipe(TOY, 12, data=4, fsdp=1, tensor=2)
    local = replace(config, training=replace(config.training, local_steps=5))
    chosen, free = (choose_setting(each, Cluster("h100", hosts, 2)) for each in (local, config))
    assert chosen is not None and chosen.mesh == replace(config.mesh, data=hosts)
    assert free is not None and free.mesh != chosen.mesh


def test_hosts_that_make_no_whole_groups_have_no_mesh() -> None:
    config = recipe(TOY, 12, data=2, fsdp=4)
    config = replace(config, training=replace(config.training, local_steps=5))
    assert choose_setting(config, Cluster("h100", 3, 2)) is None


@pytest.mark.parametrize(
    ("mesh", "hosts", "count", "expected"),
    [
        (MeshConfig(fsdp=8), 4, 3, MeshConfig(fsdp=6)),
        (MeshConfig(data=2, fsdp=4, tensor=2), 4, 2, MeshConfig(data=2, fsdp=2, tensor=2)),
        (MeshConfig(data=4, fsdp=2), 4, 3, MeshConfig(fsdp=6)),
        (MeshConfig(fsdp=2, tensor=4), 4, 3, None),
    ],
)
def test_an_own_model_splits_the_batch_less(
    mesh: MeshConfig, hosts: int, count: int, expected: MeshConfig | None
) -> None:
    assert scale_mesh(mesh, hosts, count) == expected


@pytest.mark.parametrize(
    ("data", "local_steps", "counts", "expected"),
    [
        (1, 1, (4, 3, 2), (1, 1, 1)),
        (4, 1, (3, 2), (3, 2)),
        (4, 5, (3, 2), (3, 2)),
        (2, 1, (3, 2), (2, 1)),
        (2, 5, (3, 2), (None, 1)),  # three hosts make no two groups of two
    ],
)
def test_an_open_mesh_keeps_the_devices_of_a_group(
    data: int, local_steps: int, counts: tuple[int, ...], expected: tuple[int | None, ...]
) -> None:
    config = replace(recipe(TOY, 24), mesh=MeshConfig(data=data, fsdp="auto"))
    config = replace(config, training=replace(config.training, local_steps=local_steps))
    scaled = [scale_open_mesh(config, 4, count) for count in counts]
    assert tuple(each and each.mesh.data for each in scaled) == expected
    assert all(each is None or each.mesh.fsdp == "auto" for each in scaled)


@pytest.mark.slow
def test_the_command_prints_flags_by_number_of_hosts() -> None:
    recipe = ("--config", "quickstart.py", "--mesh.fsdp", 4, "--training.batch-size", 8)
    done = command("planning.search.fewer_hosts", 4, "2,3", *recipe)
    assert (done.returncode, done.stderr) == (0, "")
    flags = json.loads(done.stdout)
    assert flags["2"] == ["--mesh.fsdp=2"]
    assert flags["3"] is None or all(flag.startswith("--") for flag in flags["3"])
