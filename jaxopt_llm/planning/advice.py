"""Settings that make a step smaller, their predicted saving and their price. Arithmetic only: nothing is compiled."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxopt_llm.config import Config, MeshConfig, RematConfig, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.kernels.attention import KERNELS, find_unsupported
from jaxopt_llm.parallel.axes import STORAGE_AXES
from jaxopt_llm.planning.free_memory import GIB
from jaxopt_llm.planning.search.footprint import Footprint
from jaxopt_llm.planning.search.ranking import is_valid
from jaxopt_llm.planning.search.report import format_flags
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.setting_space import MIN_CONTEXT_TOKENS, list_divisors, list_narrower
from jaxopt_llm.planning.search.workload import predict_footprint, predict_seconds
from jaxopt_llm.step.program import describe_attention

Settings = dict[str, Any]  # values by field, for example {"sharding.zero_stage": 3}
Option = tuple[Settings, str]  # settings and their price in words

MIN_SAVING = 0.01  # share of the estimated peak; a setting that saves less is not advised
MAX_ADVICE = 6
TOGETHER = "the prices of these together"
MAX_PAIRS = 100  # pairs of settings that are judged; each takes about a millisecond
PAIR_SLACK = 0.8  # share of the lacking bytes that the savings of a pair must add up to, to be judged together
MIN_GAIN = 0.01  # share of a step's time; less is not worth a word
AMPERE = (8, 0)  # compute capability
# Policies, cheapest first, with their additional FLOPs over `none` in percent (docs/rematerialisation.md).
POLICIES = {"none": 0, "dots": 3, "save_qkv": 15, "save_attention": 23, "full": 26}


@dataclass(frozen=True)
class Advice:
    """Settings to change, and their effect.

    settings: fields with their new values.
    saves: predicted bytes of each GPU; negative if it needs more.
    slowdown: predicted additional time of a step, as a share of its time; negative if it is faster.
    fits: whether this is enough.
    same: whether the run learns the same with them, so that a resume may change them.
    """

    settings: Settings
    saves: int
    slowdown: float
    price: str
    fits: bool
    same: bool

    @property
    def flags(self) -> str:
        return format_flags(self.settings)


def advise(
    config: Config, cluster: Cluster, lacking: int, resumes: bool = False, simulated: bool = False
) -> tuple[Advice, ...]:
    """Return settings that save much of each GPU's memory, cheapest first.

    Settings that do not change what the run learns come before those that do; in both groups those that suffice come
    first. Some settings form a series in which each saves more than the one before: of a series only the first that is
    predicted to save the `lacking` bytes is returned, or else the one that saves most. A combination is added if it
    suffices and is cheaper than each single setting that does. It has no settings that change what the run learns,
    unless nothing else suffices.

    Args:
        cluster: the GPUs, whose rates determine what is cheap.
        lacking: bytes of each GPU to save.
        resumes: whether there are checkpoints to resume from; then settings that change the run are left out.
        simulated: whether devices and host share one memory, so that offloading saves nothing.
    """
    judge = _Judge(config, cluster, lacking, resumes, simulated)
    series = [
        [advice for settings, price in options if (advice := judge(settings, price))]
        for options in _list_series(config, simulated)
    ]
    series = [options for options in series if options]
    singles = [
        next((advice for advice in options if advice.fits), max(options, key=lambda advice: advice.saves))
        for options in series
    ]
    singles.sort(key=lambda advice: (not advice.same, -advice.saves))
    sufficient = [advice.slowdown for advice in singles if advice.fits and advice.same]
    below = min(sufficient) - MIN_GAIN if sufficient else math.inf
    together = _cheapest_pair(judge, series, below)
    if together is None and not sufficient:
        together = _combine_most(judge, [advice for advice in singles if advice.same])
    if together is None and not any(advice.fits for advice in singles):
        together = _combine_most(judge, singles)
    return _order([*singles, together] if together else singles)


@dataclass(frozen=True)
class _Judge:
    """Prediction of the effect of settings on a configuration; it takes the arguments of `advise`."""

    config: Config
    cluster: Cluster
    lacking: int
    resumes: bool
    simulated: bool

    def __call__(self, settings: Settings, price: str) -> Advice | None:
        """Return the effect of settings; None if they are not legal, save little, or may not change in a resume."""
        config = self.config
        changed = apply_settings(config, settings)
        if changed is None:
            return None
        same, before, after = (
            not fields.forbidden_changes(config, changed),
            predict_footprint(config),
            predict_footprint(changed),
        )
        saves, moved = self._size(before) - self._size(after), after.host - before.host
        if saves < self.least or (self.resumes and not same):
            return None
        price += f" ({moved / GIB:.1f} GiB of host memory for each GPU)" if moved > 0 else ""
        # Rates of attention kernels were measured on Hopper only: a change of the kernel is neither slower nor faster.
        timed = {name: value for name, value in settings.items() if name != "training.attention"}
        seconds = predict_seconds(fields.replace_fields(config, timed), self.cluster)
        slowdown = seconds / predict_seconds(config, self.cluster) - 1
        return Advice(settings, saves, slowdown, price, saves >= self.lacking, same)

    @property
    def least(self) -> float:
        """Bytes that a setting must save."""
        return MIN_SAVING * self._size(predict_footprint(self.config))

    def _size(self, footprint: Footprint) -> int:
        return round(footprint.peak + footprint.host * self.simulated)


def _cheapest_pair(judge: _Judge, series: Sequence[Sequence[Advice]], below: float) -> Advice | None:
    """Return the cheapest pair of settings of two series that suffices and leaves the run as it is.

    Prices and savings about add up. So pairs are judged in the order of the sums of their slowdowns, and only if the
    sum of their savings is about enough.

    Args:
        below: slowdown that the pair must not reach.
    """
    pairs = [
        (first, second)
        for one, other in itertools.combinations(series, 2)
        for first, second in itertools.product(one, other)
        if first.same and second.same and not first.settings.keys() & second.settings.keys()
        if not (first.fits or second.fits)
        if first.slowdown + second.slowdown < below
        if first.saves + second.saves > PAIR_SLACK * judge.lacking
    ]
    pairs.sort(key=lambda pair: (pair[0].slowdown + pair[1].slowdown, -pair[0].saves - pair[1].saves))
    for first, second in pairs[:MAX_PAIRS]:
        together = judge(first.settings | second.settings, TOGETHER)
        if together and together.fits and together.same and together.slowdown < below:
            return together
    return None


def _combine_most(judge: _Judge, singles: Sequence[Advice]) -> Advice | None:
    """Return a combination that suffices: of the settings that save most, those that it cannot do without."""

    def combine(members: Sequence[Advice]) -> Advice | None:
        settings = {name: value for advice in members for name, value in advice.settings.items()}
        return judge(settings, TOGETHER)

    members: list[Advice] = []
    saved = 0.0
    for advice in singles:
        together = combine([*members, advice])
        if together is None or together.saves < saved + judge.least:
            continue  # the settings before have already saved what this one would
        members, saved = [*members, advice], together.saves
        if together.fits:
            break
    else:
        return None
    for advice in sorted(members, key=lambda advice: -advice.slowdown):
        fewer = [member for member in members if member is not advice]
        smaller = combine(fewer)
        if smaller and smaller.fits and smaller.slowdown < together.slowdown:
            members, together = fewer, smaller
    return together


def _order(found: Sequence[Advice]) -> tuple[Advice, ...]:
    """Return the best of the settings: first those for the same run, then those that fit, cheapest first."""
    best = sorted(found, key=lambda advice: (not advice.same, not advice.fits, -advice.saves))[:MAX_ADVICE]
    return tuple(sorted(best, key=lambda advice: (not advice.same, not advice.fits, advice.slowdown)))


def apply_settings(config: Config, settings: Settings) -> Config | None:
    """Return the configuration with these fields changed, or None if `train` would refuse it."""
    changed = fields.replace_fields(config, settings)
    return changed if is_valid(changed) else None


def format_advice(found: Sequence[Advice]) -> list[str]:
    """Return the lines of the table of advice."""
    lines = ["settings that save most    GiB   predicted by arithmetic, cheapest first"]
    for advice in found:
        text = f"{advice.flags}: {advice.price}{describe_slowdown(advice.slowdown)}"
        lines.append(f"  {'fits' if advice.fits else '':18} {advice.saves / GIB:9.2f}   {text}")
    if not any(advice.fits for advice in found):
        lines.append("  not enough even together: use more GPUs, a smaller model or shorter sequences")
    return lines


def describe_slowdown(slowdown: float) -> str:
    """Return ", about N% slower" or faster; "" for less than 1%."""
    if abs(slowdown) < MIN_GAIN:
        return ""
    return f", about {abs(slowdown):.0%} {'slower' if slowdown > 0 else 'faster'}"


# ---- Settings to try. Each series is one idea; its options go further and further.


def _list_series(config: Config, simulated: bool) -> Iterator[list[Option]]:
    yield list(_sharding(config))
    yield from _remat(config)
    if config.mesh.pipeline > 1 and config.pipeline.residuals == "store":
        yield [({"pipeline.residuals": "recompute"}, "each backward runs the forward of its chunk again")]
    if not config.offload.optimizer:
        yield [({"offload.optimizer": True}, "the update reads and writes the optimizer state over PCIe")]
    yield from _batch(config)
    yield list(_tensor(config))
    yield list(_context(config))
    yield from _expert(config)
    if config.mesh.tensor > 1 and not config.sharding.sequence_parallel:
        yield [({"sharding.sequence_parallel": True}, "two more all-gathers per layer")]
    yield from _narrower(config, simulated)
    yield from _lora(config)


def _count_extra(remat: RematConfig) -> int:
    """Return the additional FLOPs of a policy over `none` in percent. An unresolved policy counts as full."""
    return POLICIES["full" if remat.policy == AUTO else str(remat.policy)]


def _remat(config: Config) -> Iterator[list[Option]]:
    remat, loop = config.remat, {}
    if config.training.unroll == "all":
        loop = {"training.unroll": "none"}
        yield [(loop, "a loop over the layers copies their activations into stacks and back")]
    if not remat.offload and remat.every == 1:
        if isinstance(remat.policy, str):
            current = _count_extra(remat)
            more = {policy: extra - current for policy, extra in POLICIES.items() if extra > current}
            yield [({"remat.policy": policy} | loop, f"about {extra}% more FLOPs") for policy, extra in more.items()]
        else:
            yield [({"remat.policy": "full"}, "the intermediates that the policy names are computed again")]
    if not remat.offload and remat.policy in (AUTO, "full"):
        groups = range(remat.every + 1, config.model.layers)
        yield [({"remat.every": every}, "the blocks' forward runs three times") for every in groups]
    if "block_input" not in remat.offload:
        offloaded = (*remat.offload, "block_input")
        yield [({"remat.offload": offloaded} | loop, "each layer's input goes to the host and back over PCIe")]


def _batch(config: Config) -> Iterator[list[Option]]:
    training = config.training
    yield [
        ({"training.loss_chunk": chunk}, "a slower head, if its matmuls become small")
        for chunk in (4096, 2048, 1024, 512, 256)
        if chunk < (training.logit_tokens or 8192)
    ]
    price = "smaller matmuls" + {
        2: ", and gradients are reduced for each microbatch",
        3: ", and weights are gathered and gradients reduced for each microbatch",
    }.get(config.sharding.zero_stage if config.mesh.batch_shards > 1 else 0, "")
    rows = training.batch_size // config.mesh.batch_shards
    more = (count for count in list_divisors(rows) if count > training.accumulation)
    yield [({"training.accumulation": count}, price) for count in more]


def _narrower(config: Config, simulated: bool) -> Iterator[list[Option]]:
    """Yield the narrower values of the settings that `plan --search --allow` may change, too."""
    unsupported = find_unsupported(describe_attention(config), AMPERE)
    for name in fields.SEARCHED:
        current, *values = list_narrower(config, name)
        if name == "training.attention":
            used = simulated or current in KERNELS
            values = [] if used else [value for value in values if not unsupported[value]]
        if name == "precision.reduce_dtype" and config.precision.compute_dtype == "float32":
            values = []  # who computes in float32 asked for exact gradients
        yield [({name: value}, fields.METADATA[name].price) for value in values]


def _lora(config: Config) -> Iterator[list[Option]]:
    if not config.lora.rank:
        yield [({"lora.rank": 16}, "only adapters are trained: for fine-tuning")]
    elif config.lora.base == "float":
        yield [
            ({"lora.base": base}, f"the frozen base is rounded to {bits} bits")
            for base, bits in (("int8", 8), ("nf4", 4))
        ]


def _sharding(config: Config) -> Iterator[Option]:
    mesh, stage = config.mesh, config.sharding.zero_stage
    prices = {
        1: "none: the same bytes between GPUs",
        2: "none, but with accumulation gradients are reduced for every microbatch",
        3: "weights are gathered in forward and backward: 50% more bytes between GPUs",
    }
    if any(mesh.size(axis) > 1 for axis in STORAGE_AXES):
        for higher in range(stage + 1, 4):
            yield {"sharding.zero_stage": higher}, prices[higher]
    if mesh.data > 1 and not config.sharding.optimizer_over_data:
        yield {"sharding.optimizer_over_data": True}, "none, but replicas no longer hold copies of the state"
    if mesh.data > 1:
        axes = {"mesh.data": 1, "mesh.fsdp": mesh.data * mesh.size("fsdp")}
        for higher in range(max(stage, 1), 4):
            yield axes | ({} if higher == stage else {"sharding.zero_stage": higher}), prices[higher]


def _tensor(config: Config) -> Iterator[Option]:
    """Yield larger `tensor` axes on the same number of GPUs."""
    price = "activations are exchanged in every layer; keep tensor within a host"
    for times in (2, 4, 8):
        for axes in _enlarge(config.mesh, "tensor", times):
            yield axes | {"sharding.sequence_parallel": True}, price


def _context(config: Config) -> Iterator[Option]:
    """Yield larger `context` axes on the same number of GPUs, with one row at a time on each group."""
    price = "attention exchanges keys and values in every layer, and every microbatch gathers and reduces"
    mesh, training = config.mesh, config.training
    for times in (2, 4, 8, 16):
        for axes in _enlarge(mesh, "context", times):
            if training.sequence_length >= axes["mesh.context"] * MIN_CONTEXT_TOKENS:
                rows = max(training.batch_size * times // mesh.batch_shards, 1)
                yield axes | {"training.accumulation": rows}, price


def _expert(config: Config) -> Iterator[list[Option]]:
    """Yield larger, then smaller `expert` axes on the same number of GPUs."""
    mesh, factors = config.mesh, (2, 4, 8)
    if config.model.moe.experts:
        price = "tokens go to their experts and back in every MoE layer"
        yield [(axes, price) for times in factors for axes in _enlarge(mesh, "expert", times)]
        price = "more experts on each GPU; with ZeRO-3 they are gathered"
        smaller = [times for times in factors if mesh.expert % times == 0]
        fsdp = mesh.size("fsdp")
        yield [({"mesh.fsdp": fsdp * times, "mesh.expert": mesh.expert // times}, price) for times in smaller]


def _enlarge(mesh: MeshConfig, axis: str, times: int) -> Iterator[Settings]:
    """Yield the sizes of axes that enlarge `axis`, at the cost of `data` or of `fsdp`."""
    for other in ("data", "fsdp"):
        if mesh.size(other) % times == 0:
            yield {f"mesh.{other}": mesh.size(other) // times, f"mesh.{axis}": mesh.size(axis) * times}
