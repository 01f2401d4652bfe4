"""Which settings would make a step smaller, by how much, and at what price: arithmetic, nothing is compiled."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxopt_llm import config as configuration
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.errors import InputError
from jaxopt_llm.kernels import attention_pallas
from jaxopt_llm.kernels.attention import KERNELS
from jaxopt_llm.model.attention import kernel_head_dim
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.search.footprint import Footprint, footprint
from jaxopt_llm.search.resting import resting
from jaxopt_llm.search.walk import PART
from jaxopt_llm.training.memory import GIB
from jaxopt_llm.validation import validate

Settings = dict[str, Any]  # by field, as in "sharding.zero_stage"
Rung = tuple[Settings, str]  # and their price in words

WORTH = 0.01  # of the estimated peak: what saves less is no advice
SHOWN = 6
AMPERE = (8, 0)  # compute capability
# Policies, the cheapest first, with the FLOPs beyond those of `none`, in percent: see docs/rematerialisation.md.
POLICIES = {"none": 0, "dots": 3, "save_qkv": 15, "save_attention": 23, "full": 26}


@dataclass(frozen=True)
class Advice:
    """settings: fields with the values to give them; saves: predicted bytes of each GPU; fits: whether that is enough.
    same: whether the run learns the same with them, and a resume may change them."""

    settings: Settings
    saves: int
    price: str
    fits: bool
    same: bool

    @property
    def flags(self) -> str:
        return " ".join(
            f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
            for name, value in self.settings.items()
        )


def advise(config: TrainConfig, lacking: int, resumes: bool = False, simulated: bool = False) -> tuple[Advice, ...]:
    """What would save most of each GPU's memory: first what leaves the run as it is, then what changes what it learns.

    Of settings that go further and further it names the first that is predicted to save the `lacking` bytes, or else
    the one that saves most. Where none of the former is enough, the first few that are enough together come before all.

    resumes: whether there are checkpoints to go on from, which bars what changes the run. simulated: whether devices
    and host have one memory, so that offloading saves nothing.
    """
    before = predict(config)

    def size(of: Footprint) -> int:
        return round(of.peak + of.host * simulated)

    def judge(settings: Settings, price: str) -> Advice | None:
        changed = apply(config, settings)
        if changed is None:
            return None
        same, after = not configuration.differences(config, changed), predict(changed)
        saves, moved = size(before) - size(after), after.host - before.host
        if saves < WORTH * size(before) or (resumes and not same):
            return None
        price += f" ({moved / GIB:.1f} GiB of host memory for each GPU)" if moved > 0 else ""
        return Advice(settings, saves, price, saves >= lacking, same)

    found = []
    for ladder in _ladders(config, simulated):
        rungs = [rung for settings, price in ladder if (rung := judge(settings, price))]
        if rungs:
            found.append(next((rung for rung in rungs if rung.fits), max(rungs, key=lambda rung: rung.saves)))
    found.sort(key=lambda each: (not each.same, -each.saves))
    if not any(each.fits and each.same for each in found):
        settings: Settings = {}
        saved = 0
        for each in found:
            both = judge(settings | each.settings, "the prices below together")
            if both is None or both.saves < saved + WORTH * size(before):
                continue  # the others have saved what it would
            settings, saved = both.settings, both.saves
            if both.fits:
                found.insert(0, both)
                break
    return tuple(found[:SHOWN])


@functools.cache
def predict(config: TrainConfig) -> Footprint:
    rests = resting(config)
    assert rests is not None, "what `validate` refuses"
    return footprint(config, rests)


def apply(config: TrainConfig, settings: Settings) -> TrainConfig | None:
    """The configuration with these fields changed; None where it would be refused."""
    config = configuration.changed(config, settings)
    try:
        validate(config)
    except InputError:
        return None
    return config


def advice_lines(advice: Sequence[Advice]) -> list[str]:
    """As a user reads it."""
    said = ["what would save most       GiB   predicted, by arithmetic"]
    for each in advice:
        said.append(f"  {'fits' if each.fits else '':18} {each.saves / GIB:9.2f}   {each.flags}: {each.price}")
    if not any(each.fits for each in advice):
        said.append("  not enough even together: more GPUs, a smaller model or shorter sequences")
    return said


# ---- What there is to set. Each ladder is one idea, its rungs go further and further.


def _ladders(config: TrainConfig, simulated: bool) -> Iterator[list[Rung]]:
    mesh, training, remat, optimizer = config.mesh, config.training, config.remat, config.optimizer
    yield list(_sharding(config))
    if not remat.offload and remat.every == 1:
        if isinstance(remat.policy, str):
            named = POLICIES[remat.policy]
            yield [
                ({"remat.policy": policy}, f"about {extra - named}% more FLOPs")
                for policy, extra in POLICIES.items()
                if extra > named
            ]
        else:
            yield [({"remat.policy": "full"}, "what these names keep is computed again")]
    if not remat.offload and remat.policy == "full":
        more = range(remat.every + 1, config.model.layers)
        yield [({"remat.every": every}, "the blocks' forward runs three times") for every in more]
    if "block_input" not in remat.offload:
        offloaded = (*remat.offload, "block_input")
        yield [({"remat.offload": offloaded}, "each layer's input goes to the host and back over PCIe")]
    if not config.offload.optimizer:
        yield [({"offload.optimizer": True}, "the update reads and writes them over PCIe")]
    yield [
        ({"training.loss_chunk": chunk}, "a slower head, if its products become small")
        for chunk in (4096, 2048, 1024, 512, 256)
        if chunk < (training.loss_chunk or 8192)
    ]
    accumulating = "smaller products" + {
        2: ", and gradients are reduced for each microbatch",
        3: ", and weights are gathered and gradients reduced for each microbatch",
    }.get(config.sharding.zero_stage if mesh.batch_shards > 1 else 0, "")
    yield [({"training.accumulation": training.accumulation * 2**n}, accumulating) for n in range(1, 7)]
    yield list(_tensor(config))
    yield list(_context(config))
    yield from map(list, _expert(config))
    sizes = kernel_head_dim(config.model), config.precision.compute_dtype
    if not simulated and training.attention not in KERNELS and not attention_pallas.problems(*sizes, AMPERE):
        yield [({"training.attention": "pallas"}, "scores stay on the chip; for GPUs from Ampere on, not measured yet")]
    if mesh.tensor > 1 and not config.sharding.sequence_parallel:
        yield [({"sharding.sequence_parallel": True}, "two more gathers a layer")]
    if config.precision.reduce_dtype == "float32" and config.precision.compute_dtype == "bfloat16":
        yield [({"precision.reduce_dtype": "bfloat16"}, "gradients are summed over devices in 16 bits")]
    if config.precision.compute_dtype == "float32":
        yield [({"precision.compute_dtype": "bfloat16"}, "none on GPUs, which are faster in 16 bits")]
    if optimizer.state_dtype != "int8":
        yield [
            ({"optimizer.state_dtype": dtype}, "moments are rounded, see docs/moments.md")
            for dtype in ("bfloat16", "int8")
            if dtype != optimizer.state_dtype
        ]
    if not config.lora.rank:
        yield [({"lora.rank": 16}, "adapters alone are trained: for fine-tuning")]
    elif config.lora.base == "float":
        yield [
            ({"lora.base": "int8"}, "the frozen base is rounded to 8 bits"),
            ({"lora.base": "nf4"}, "the frozen base is rounded to 4 bits"),
        ]


def _sharding(config: TrainConfig) -> Iterator[Rung]:
    mesh, stage = config.mesh, config.sharding.zero_stage
    prices = {
        1: "none: the same bytes between GPUs",
        2: "none, but with accumulation every microbatch is reduced",
        3: "weights are gathered in forward and backward: half as much again between GPUs",
    }
    if any(getattr(mesh, axis) > 1 for axis in STORAGE_AXES):
        for more in range(stage + 1, 4):
            yield {"sharding.zero_stage": more}, prices[more]
    if mesh.data > 1:
        over = {"mesh.data": 1, "mesh.fsdp": mesh.data * mesh.fsdp}
        for more in range(max(stage, 1), 4):
            yield over | ({} if more == stage else {"sharding.zero_stage": more}), prices[more]


def _tensor(config: TrainConfig) -> Iterator[Rung]:
    """The same GPUs, of which more share each layer."""
    price = "activations are exchanged in every layer; keep tensor within a host"
    for times in (2, 4, 8):
        for axis in ("data", "fsdp"):
            size = getattr(config.mesh, axis)
            if size % times == 0:
                tensor = config.mesh.tensor * times
                yield {f"mesh.{axis}": size // times, "mesh.tensor": tensor, "sharding.sequence_parallel": True}, price


def _context(config: TrainConfig) -> Iterator[Rung]:
    """The same GPUs, of which more share a row, a single one at a time."""
    price = "attention exchanges keys and values in every layer, and every microbatch gathers and reduces"
    mesh, training = config.mesh, config.training
    for times in (2, 4, 8, 16):
        for axis in ("data", "fsdp"):
            size, context = getattr(mesh, axis), times * mesh.context
            if size % times == 0 and training.sequence_length >= context * PART:
                rows = max(training.batch_size * times // mesh.batch_shards, 1)
                yield {f"mesh.{axis}": size // times, "mesh.context": context, "training.accumulation": rows}, price


def _expert(config: TrainConfig) -> Iterator[Iterator[Rung]]:
    """The same GPUs, of which more, or fewer, divide the experts of a layer."""
    mesh = config.mesh
    if config.model.experts:
        yield (
            (
                {f"mesh.{axis}": getattr(mesh, axis) // times, "mesh.expert": mesh.expert * times},
                "tokens go to their experts and back in every layer that has them",
            )
            for times in (2, 4, 8)
            for axis in ("data", "fsdp")
            if getattr(mesh, axis) % times == 0
        )
        yield (
            (
                {"mesh.fsdp": mesh.fsdp * times, "mesh.expert": mesh.expert // times},
                "more experts on each, and with ZeRO-3 gathered",
            )
            for times in (2, 4, 8)
            if mesh.expert % times == 0
        )
