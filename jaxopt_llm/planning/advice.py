"""Settings that make a step smaller, their predicted saving and their price. Arithmetic only: nothing is compiled."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxopt_llm.config import Config, fields
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.kernels import attention_pallas
from jaxopt_llm.kernels.attention import KERNELS
from jaxopt_llm.model.self_attention import kernel_head_dim
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.planning.memory import GIB
from jaxopt_llm.planning.search.footprint import Footprint, compute_footprint
from jaxopt_llm.planning.search.setting_space import MIN_CONTEXT_TOKENS
from jaxopt_llm.planning.search.state_sizes import compute_state_sizes
from jaxopt_llm.training.validation import validate

Settings = dict[str, Any]  # values by field, for example {"sharding.zero_stage": 3}
Option = tuple[Settings, str]  # settings and their price in words

MIN_SAVING = 0.01  # share of the estimated peak; a setting that saves less is not advised
MAX_ADVICE = 6
AMPERE = (8, 0)  # compute capability
# Policies, cheapest first, with their FLOPs beyond those of `none` in percent (docs/rematerialisation.md).
POLICIES = {"none": 0, "dots": 3, "save_qkv": 15, "save_attention": 23, "full": 26}


@dataclass(frozen=True)
class Advice:
    """Settings to change, and their effect.

    settings: fields with their new values.
    saves: predicted bytes of each GPU.
    fits: whether this is enough.
    same: whether the run learns the same with them, so that a resume may change them.
    """

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


def advise(config: Config, lacking: int, resumes: bool = False, simulated: bool = False) -> tuple[Advice, ...]:
    """Return the settings that save most of each GPU's memory.

    Settings that do not change what the run learns come before those that do. Some settings form a series in which each
    saves more than the one before: of a series only the first that is predicted to save the `lacking` bytes is
    returned, or else the one that saves most. If none that leaves the run as it is suffices, the first entry combines
    the first few that suffice together.

    Args:
        lacking: bytes of each GPU to save.
        resumes: whether there are checkpoints to resume from; then settings that change the run are left out.
        simulated: whether devices and host share one memory, so that offloading saves nothing.
    """
    before = predict_footprint(config)

    def size(footprint: Footprint) -> int:
        return round(footprint.peak + footprint.host * simulated)

    def judge(settings: Settings, price: str) -> Advice | None:
        changed = apply_settings(config, settings)
        if changed is None:
            return None
        same, after = not fields.forbidden_changes(config, changed), predict_footprint(changed)
        saves, moved = size(before) - size(after), after.host - before.host
        if saves < MIN_SAVING * size(before) or (resumes and not same):
            return None
        price += f" ({moved / GIB:.1f} GiB of host memory for each GPU)" if moved > 0 else ""
        return Advice(settings, saves, price, saves >= lacking, same)

    found = []
    for series in _list_series(config, simulated):
        options = [advice for settings, price in series if (advice := judge(settings, price))]
        if options:
            most = max(options, key=lambda advice: advice.saves)
            found.append(next((advice for advice in options if advice.fits), most))
    found.sort(key=lambda advice: (not advice.same, -advice.saves))
    if not any(advice.fits and advice.same for advice in found):
        settings: Settings = {}
        saved = 0
        for advice in found:
            combined = judge(settings | advice.settings, "the prices below together")
            if combined is None or combined.saves < saved + MIN_SAVING * size(before):
                continue  # the settings before have already saved what this one would
            settings, saved = combined.settings, combined.saves
            if combined.fits:
                found.insert(0, combined)
                break
    return tuple(found[:MAX_ADVICE])


@functools.cache
def predict_footprint(config: Config) -> Footprint:
    """Return the memory of a step by arithmetic."""
    state = compute_state_sizes(config)
    assert state is not None, "`validate` refuses such moments"
    return compute_footprint(config, state)


def apply_settings(config: Config, settings: Settings) -> Config | None:
    """Return the configuration with these fields changed, or None if `train` would refuse it."""
    config = fields.replace_fields(config, settings)
    try:
        validate(config)
    except InputError:
        return None
    return config


def format_advice(found: Sequence[Advice]) -> list[str]:
    """Return the lines of the table of advice."""
    lines = ["settings that save most    GiB   predicted by arithmetic"]
    for advice in found:
        lines.append(f"  {'fits' if advice.fits else '':18} {advice.saves / GIB:9.2f}   {advice.flags}: {advice.price}")
    if not any(advice.fits for advice in found):
        lines.append("  not enough even together: use more GPUs, a smaller model or shorter sequences")
    return lines


# ---- Settings to try. Each series is one idea; its options go further and further.


def _list_series(config: Config, simulated: bool) -> Iterator[list[Option]]:
    yield list(_sharding(config))
    yield from _remat(config)
    if not config.offload.optimizer:
        yield [({"offload.optimizer": True}, "the update reads and writes the optimizer state over PCIe")]
    yield from _batch(config)
    yield list(_tensor(config))
    yield list(_context(config))
    yield from map(list, _expert(config))
    yield from _attention(config, simulated)
    if config.mesh.tensor > 1 and not config.sharding.sequence_parallel:
        yield [({"sharding.sequence_parallel": True}, "two more all-gathers per layer")]
    yield from _precision(config)
    yield from _lora(config)


def _remat(config: Config) -> Iterator[list[Option]]:
    remat = config.remat
    if not remat.offload and remat.every == 1:
        if isinstance(remat.policy, str):
            current = POLICIES[remat.policy]
            yield [
                ({"remat.policy": policy}, f"about {extra - current}% more FLOPs")
                for policy, extra in POLICIES.items()
                if extra > current
            ]
        else:
            yield [({"remat.policy": "full"}, "the intermediates that the policy names are computed again")]
    if not remat.offload and remat.policy == "full":
        groups = range(remat.every + 1, config.model.layers)
        yield [({"remat.every": every}, "the blocks' forward runs three times") for every in groups]
    if "block_input" not in remat.offload:
        offloaded = (*remat.offload, "block_input")
        yield [({"remat.offload": offloaded}, "each layer's input goes to the host and back over PCIe")]


def _batch(config: Config) -> Iterator[list[Option]]:
    training = config.training
    yield [
        ({"training.loss_chunk": chunk}, "a slower head, if its matmuls become small")
        for chunk in (4096, 2048, 1024, 512, 256)
        if chunk < (training.loss_chunk or 8192)
    ]
    price = "smaller matmuls" + {
        2: ", and gradients are reduced for each microbatch",
        3: ", and weights are gathered and gradients reduced for each microbatch",
    }.get(config.sharding.zero_stage if config.mesh.batch_shards > 1 else 0, "")
    yield [({"training.accumulation": training.accumulation * 2**n}, price) for n in range(1, 7)]


def _attention(config: Config, simulated: bool) -> Iterator[list[Option]]:
    sizes = kernel_head_dim(config.model), config.precision.compute_dtype
    used = config.training.attention in KERNELS
    if not simulated and not used and not attention_pallas.problems(*sizes, AMPERE):
        price = "scores stay on the chip; for GPUs from Ampere on, speed not measured yet"
        yield [({"training.attention": "pallas"}, price)]


def _precision(config: Config) -> Iterator[list[Option]]:
    precision, optimizer = config.precision, config.optimizer
    if precision.reduce_dtype == "float32" and precision.compute_dtype == "bfloat16":
        yield [({"precision.reduce_dtype": "bfloat16"}, "gradients are summed over devices in 16 bits")]
    if precision.compute_dtype == "float32":
        yield [({"precision.compute_dtype": "bfloat16"}, "none on GPUs, which are faster in 16 bits")]
    if optimizer.state_dtype != "int8":
        yield [
            ({"optimizer.state_dtype": dtype}, "moments are rounded, see docs/moments.md")
            for dtype in ("bfloat16", "int8")
            if dtype != optimizer.state_dtype
        ]


def _lora(config: Config) -> Iterator[list[Option]]:
    if not config.lora.rank:
        yield [({"lora.rank": 16}, "only adapters are trained: for fine-tuning")]
    elif config.lora.base == "float":
        yield [
            ({"lora.base": "int8"}, "the frozen base is rounded to 8 bits"),
            ({"lora.base": "nf4"}, "the frozen base is rounded to 4 bits"),
        ]


def _sharding(config: Config) -> Iterator[Option]:
    mesh, stage = config.mesh, config.sharding.zero_stage
    prices = {
        1: "none: the same bytes between GPUs",
        2: "none, but with accumulation gradients are reduced for every microbatch",
        3: "weights are gathered in forward and backward: 50% more bytes between GPUs",
    }
    if any(getattr(mesh, axis) > 1 for axis in STORAGE_AXES):
        for higher in range(stage + 1, 4):
            yield {"sharding.zero_stage": higher}, prices[higher]
    if mesh.data > 1:
        axes = {"mesh.data": 1, "mesh.fsdp": mesh.data * mesh.fsdp}
        for higher in range(max(stage, 1), 4):
            yield axes | ({} if higher == stage else {"sharding.zero_stage": higher}), prices[higher]


def _tensor(config: Config) -> Iterator[Option]:
    """Yield larger `tensor` axes on the same number of GPUs."""
    price = "activations are exchanged in every layer; keep tensor within a host"
    for times in (2, 4, 8):
        for axis in ("data", "fsdp"):
            size = getattr(config.mesh, axis)
            if size % times == 0:
                tensor = config.mesh.tensor * times
                yield {f"mesh.{axis}": size // times, "mesh.tensor": tensor, "sharding.sequence_parallel": True}, price


def _context(config: Config) -> Iterator[Option]:
    """Yield larger `context` axes on the same number of GPUs, with one row at a time on each group."""
    price = "attention exchanges keys and values in every layer, and every microbatch gathers and reduces"
    mesh, training = config.mesh, config.training
    for times in (2, 4, 8, 16):
        for axis in ("data", "fsdp"):
            size, context = getattr(mesh, axis), times * mesh.context
            if size % times == 0 and training.sequence_length >= context * MIN_CONTEXT_TOKENS:
                rows = max(training.batch_size * times // mesh.batch_shards, 1)
                yield {f"mesh.{axis}": size // times, "mesh.context": context, "training.accumulation": rows}, price


def _expert(config: Config) -> Iterator[Iterator[Option]]:
    """Yield larger, then smaller `expert` axes on the same number of GPUs."""
    mesh = config.mesh
    if config.model.experts:
        yield (
            (
                {f"mesh.{axis}": getattr(mesh, axis) // times, "mesh.expert": mesh.expert * times},
                "tokens go to their experts and back in every MoE layer",
            )
            for times in (2, 4, 8)
            for axis in ("data", "fsdp")
            if getattr(mesh, axis) % times == 0
        )
        yield (
            (
                {"mesh.fsdp": mesh.fsdp * times, "mesh.expert": mesh.expert // times},
                "more experts on each GPU; with ZeRO-3 they are gathered",
            )
            for times in (2, 4, 8)
            if mesh.expert % times == 0
        )
