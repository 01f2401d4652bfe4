"""Mesh and accumulation of a recipe on fewer hosts than it is for, with the same model, data and global batch.

python -m jaxopt_llm.planning.search.fewer_hosts HOSTS COUNT[,COUNT...] --config FILE [--section.field VALUE ...]

HOSTS is the number of hosts that the recipe is for. For each COUNT, the output has flags of `train`, or null if no mesh
is legal there. The supervisor of a job runs this (supervision/task.py).
"""

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace

from jaxopt_llm.checkpoint import pretrained
from jaxopt_llm.config import Config, MeshConfig, RematConfig, cli, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.parallel import AXES
from jaxopt_llm.core import errors
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.planning.device_mesh import divides_over
from jaxopt_llm.planning.free_memory import count_chip_bytes, leave_free
from jaxopt_llm.planning.search.ranking import estimate, is_valid, order_candidates
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.setting_space import (
    enumerate_meshes,
    list_divisors,
    list_mesh_problems,
    list_pipelines,
)
from jaxopt_llm.planning.search.state_sizes import StateSizes, compute_state_sizes
from jaxopt_llm.planning.settings_choice import list_candidates
from jaxopt_llm.step.local_steps import has_groups

GPU = "h100"  # by whose rates meshes are compared


def choose_setting(config: Config, cluster: Cluster) -> Config | None:
    """Return the recipe with the mesh and the accumulation that are fastest by arithmetic; None: no mesh is legal.

    A setting that may fit is preferred to one that does not. Everything else stays, so a step computes the same sums;
    with local steps, there are fewer groups of the same devices.
    """
    limit = leave_free(count_chip_bytes(cluster.chip))
    settings: dict[Config, Config] = {}  # by the same setting with a policy in place of `auto`
    candidates = []
    for setting in _list_settings(config, cluster):
        (likely, *_), _ = list_candidates(setting, cluster, limit)
        if state := _compute_state(likely.config):
            settings[likely.config] = setting
            candidates.append(estimate(likely.config, cluster, state))
    ordered = (settings[candidate.config] for candidate in order_candidates(candidates, limit))
    return next(filter(is_valid, ordered), None)


def _list_settings(config: Config, cluster: Cluster) -> Iterator[Config]:
    for mesh in enumerate_meshes(config, cluster):
        if list_mesh_problems(config, mesh) or not _keeps_groups(config, mesh):
            continue
        pipeline = list_pipelines(config, mesh)[0]
        for accumulation in list_divisors(config.training.batch_size // mesh.batch_shards):
            training = replace(config.training, accumulation=accumulation)
            yield replace(config, mesh=mesh, training=training, pipeline=pipeline)


def _keeps_groups(config: Config, mesh: MeshConfig) -> bool:
    """Return whether a mesh differs from the recipe's only in the number of groups, if the run has local steps."""
    return not has_groups(config) or replace(mesh, data=1) == replace(config.mesh, data=1)


def _compute_state(config: Config) -> StateSizes | None:
    """Return the sizes of the state, which do not depend on how the batch is divided."""
    training = replace(config.training, accumulation=1)
    return _compute_state_once(replace(config, training=training, remat=RematConfig()))


_compute_state_once = functools.cache(compute_state_sizes)


def scale_mesh(mesh: MeshConfig, hosts: int, count: int) -> MeshConfig | None:
    """Return a mesh for fewer hosts that only splits the batch less; None: the other axes do not divide.

    This is for models that the planner knows nothing about.
    """
    devices, fixed = mesh.devices // hosts * count, mesh.devices // (mesh.data * mesh.size("fsdp"))
    if devices % fixed:
        return None
    shards = devices // fixed
    data = mesh.data if shards % mesh.data == 0 else 1
    return replace(mesh, data=data, fsdp=shards // data)


def scale_open_mesh(config: Config, hosts: int, count: int) -> Config | None:
    """Return a recipe whose `mesh.fsdp` is open with as many devices for each index of `mesh.data` as before.

    The start of the run fills `mesh.fsdp`. If `mesh.data` does not divide, it stays, but groups of local steps would
    then lose devices.

    Returns:
        None: the batch or the groups do not divide.
    """
    data, left = divmod(config.mesh.data * count, hosts)
    if left and has_groups(config):
        return None
    scaled = config if left else replace(config, mesh=replace(config.mesh, data=data))
    return scaled if divides_over(scaled, count) else None


def list_flags(before: Config, after: Config) -> list[str]:
    """Return the flags of `train` that make one configuration of the other."""
    names = [
        *(f"mesh.{axis}" for axis in AXES),
        "training.accumulation",
        "pipeline.schedule",
        "pipeline.virtual_stages",
    ]
    pairs = ((name, fields.get_field(after, name)) for name in names)
    return [f"--{name.replace('_', '-')}={value}" for name, value in pairs if value != fields.get_field(before, name)]


def main() -> int:
    hosts, counts = int(sys.argv[1]), [int(count) for count in sys.argv[2].split(",")]
    recipe = cli.parse_recipe(sys.argv[3:], "fewer_hosts")
    config = recipe.config if recipe.has_model else pretrained.resolve_pretrained(recipe.config)
    if config.mesh.fsdp != AUTO and config.mesh.devices % hosts:
        raise InputError(f"mesh: {config.mesh.devices} device(s) do not divide over {hosts} hosts; change --mesh.*")
    flags: dict[int, list[str] | None] = {}
    for count in counts:
        setting: Config | None
        if config.mesh.fsdp == AUTO:
            setting = config if recipe.has_model else scale_open_mesh(config, hosts, count)
        elif recipe.has_model:
            mesh = scale_mesh(config.mesh, hosts, count)
            setting = None if mesh is None else replace(config, mesh=mesh)
        else:
            setting = choose_setting(config, Cluster(GPU, count, config.mesh.devices // hosts))
        flags[count] = None if setting is None else list_flags(config, setting)
    print(json.dumps(flags))
    return 0


if __name__ == "__main__":
    errors.run_command(main)
