"""The mesh of a configuration that leaves `mesh.fsdp` open: all devices, with the batch that the recipe has.

What a run learns does not depend on the number of devices, so the batch stays. Only its division changes: the mesh, and
`training.accumulation`, so that a device has no more rows at a time than the recipe gives to one device.
"""

import math
from collections.abc import Set
from dataclasses import dataclass

from jaxopt_llm.config import Config, ShardingConfig, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.training import choose_accumulation
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes
from jaxopt_llm.step.validation import validate

# Share of a device's memory up to which every device holds a copy of the state, so that no weights are gathered. It
# leaves the activations almost as much memory as a divided state would.
COPIED_SHARE = 0.25
BATCH, ACCUMULATION = "training.batch_size", "training.accumulation"


@dataclass(frozen=True)
class Devices:
    """Devices to fill: `count` in `hosts` processes, each with `usable` bytes for a step."""

    count: int
    hosts: int
    usable: int

    def __str__(self) -> str:
        return f"{self.count} device{'s' * (self.count > 1)}"


def fill_mesh(config: Config, devices: Devices, given: Set[str] = frozenset()) -> tuple[Config, str]:
    """Return the configuration on all devices that divide its batch, and a line that says so; "" for a single device.

    A mesh without `auto` stays.

    Args:
        config: as `cli.parse_recipe` returns it, so that the accumulation of a recipe follows a given batch size.
        given: settings of the command line. Its numbers of rows and of microbatches stay as they are.

    Raises:
        InputError: the rows or microbatches given on the command line do not divide, or no number of devices per host
            divides the batch.
    """
    others = config.mesh.devices
    if config.mesh.fsdp != AUTO:
        return config, _describe(config, config, devices, "--mesh.fsdp auto takes all")
    if others > devices.count:  # `make_mesh` says so
        return fields.replace_fields(config, {"mesh.fsdp": 1}), ""
    whole, refused, keeps = devices.count // others, "", False
    for fsdp in range(whole, 0, -1):
        if others * fsdp % devices.hosts == 0:
            divided = _divide(config, fsdp, given)
            filled, problem = _choose_valid(config, divided, devices.usable)
            if problem and not refused:
                refused, keeps = problem, _keeps_from_dividing(divided, given)
            if filled and keeps:
                idle = devices.count - others * fsdp
                stay = "stays" if idle == 1 else "stay"
                raise InputError(f"{devices}: {refused}; or set --mesh.fsdp {fsdp}, and {idle} of them {stay} idle")
            if filled:
                left = refused or "the other axes of the mesh do not divide over more"
                return filled, _describe(config, filled, devices, left)
    raise InputError(f"{devices} in {devices.hosts} processes: {refused}")


def divides_over(config: Config, hosts: int) -> bool:
    """Return whether the batch divides over some number of devices of each of these hosts."""
    fsdp = hosts // math.gcd(config.mesh.devices, hosts)  # smallest with which the mesh divides over the hosts
    return config.training.batch_size % (config.mesh.batch_shards * fsdp) == 0


def _describe(config: Config, filled: Config, devices: Devices, left: str) -> str:
    """Return the line on the devices of a run. left: why some of them are left out, if they are."""
    used, before, after = filled.mesh.devices, config.training.accumulation, filled.training.accumulation
    if used >= devices.count and filled.mesh.sizes == config.mesh.sizes:  # the recipe's own mesh
        return ""
    changed = [f"mesh.{axis} {size}" for axis, size in filled.mesh.sizes.items() if size > 1] or ["mesh.fsdp 1"]
    changed += [f"{ACCUMULATION} {before} → {after}"] if before != after else []
    rows = filled.training.batch_size // (after * filled.mesh.batch_shards)
    line = f"{', '.join(changed)} ({rows} row{'s' * (rows > 1)} of each device at a time)"
    return f"{devices}: {line}" if used >= devices.count else f"{devices}, {used} of them used: {line}; {left}"


def _divide(config: Config, fsdp: int, given: Set[str]) -> Config:
    """Return the configuration with so many devices in place of `auto`, which may be invalid."""
    divided: Config = fields.replace_fields(config, {"mesh.fsdp": fsdp})
    if ACCUMULATION in given:
        return divided
    return fields.replace_fields(divided, {ACCUMULATION: _choose_accumulation(config, divided.mesh.batch_shards)})


def _choose_valid(config: Config, divided: Config, usable: int) -> tuple[Config | None, str]:
    """Return the divided configuration, or the one with a copy of the state on each device; None and why if invalid."""
    chosen, fsdp = divided, divided.mesh.size("fsdp")
    try:
        validate(divided)
        copied = fields.replace_fields(divided, {"mesh.data": fsdp, "mesh.fsdp": 1})
        if fsdp > 1 and _may_copy(config, copied, usable):
            validate(copied)
            chosen = copied
    except InputError as error:
        return None, str(error)
    return chosen, ""


def _keeps_from_dividing(divided: Config, given: Set[str]) -> bool:
    """Return whether the rows do not divide, and a number of the command line is among what has to divide."""
    training = divided.training
    fixed = BATCH in given or (ACCUMULATION in given and training.accumulation > 1)
    return fixed and training.batch_size % (divided.mesh.batch_shards * training.accumulation) != 0


def _choose_accumulation(config: Config, shards: int) -> int:
    """Return the smallest number of microbatches that gives a device no more rows at a time than the recipe.

    A pipeline keeps as many microbatches as stages, if the recipe has as many.
    """
    training, (own, left) = config.training, divmod(config.training.batch_size, shards)
    if left:  # then no number is valid, and 1 does not hide why
        return 1
    rows = training.batch_size // (training.accumulation * config.mesh.batch_shards)
    least = min(training.accumulation, config.mesh.pipeline)
    return choose_accumulation(own, rows, least)


def _may_copy(config: Config, copied: Config, usable: int) -> bool:
    """Return whether each device can hold the whole state, and no setting asks for its division."""
    # With local steps each index of mesh.data would train by itself.
    if config.sharding != ShardingConfig() or config.mesh.data > 1 or config.training.local_steps > 1:
        return False
    sizes = compute_state_sizes(copied)
    return sizes is not None and sizes.parameters + sizes.optimizer <= COPIED_SHARE * usable
