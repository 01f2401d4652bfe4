"""Choice of the settings that exchange memory for time, where the configuration leaves it open with `auto`.

These are `remat.policy`, `training.unroll`, `training.loss_chunk`, `xla.own_remat` and `pipeline.residuals`. Candidates
are compiled in the order of their speed, and the first that fits is taken. Arithmetic leaves out those that cannot fit,
so that most runs compile one candidate: the program that they run. The choice depends on the program and the GPU only,
and never on the time that compiling takes. `sharding.expert_exchange` is chosen before, by arithmetic alone
(exchanges.py).

`compile_fitting` compiles the programs of a run with them.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import jax

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.compiler import hlo
from jaxopt_llm.compiler.chips import chip_of
from jaxopt_llm.config import Config, RematConfig, fields
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.parallel import Policy
from jaxopt_llm.config.training import MIN_LOSS_CHUNK
from jaxopt_llm.config.unread import describe_newly_unread
from jaxopt_llm.core.errors import OutOfMemory
from jaxopt_llm.planning.exchanges import resolve_expert_exchange
from jaxopt_llm.planning.free_memory import GIB, add_slack, count_usable_bytes, leave_free
from jaxopt_llm.planning.oom import make_explainer
from jaxopt_llm.planning.search.attention_cost import resolve_attention
from jaxopt_llm.planning.search.block_cost import BlockCost, keep_existing
from jaxopt_llm.planning.search.microbatch import count_tokens
from jaxopt_llm.planning.search.report import format_value
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.search.workload import STAND_IN, describe_cluster, predict_footprint, predict_seconds
from jaxopt_llm.run.compile import Executables, compile_program, lower_programs
from jaxopt_llm.run.directory import Started, find_changes
from jaxopt_llm.run.replicas import count_copied_bytes
from jaxopt_llm.run.setup import Setup

T = TypeVar("T")

CHOSEN = (
    *("remat.policy", "training.unroll", "training.loss_chunk", "xla.own_remat"),
    *("sharding.expert_exchange", "pipeline.residuals"),
)
NO_MEMORY = 2**63 - 1  # peak of a candidate for whose compilation there is no memory
MAX_REFUSED = 4  # compiled candidates that do not fit; then only those that save most memory are left
# Shortest run, by arithmetic, whose layers are unrolled: compiling them takes half a minute more, and a step 4 to 7%
# less.
UNROLLED_RUN_SECONDS = 600.0
# Policies to choose from. Which of them compute least again depends on the model.
POLICIES: tuple[Policy | tuple[str, ...], ...] = (
    "none",
    ("query", "key", "attention", "mlp_gate", "mlp_up"),
    ("attention", "mlp_gate", "mlp_up"),
    ("query", "key", "value", "attention", "mlp_up"),
    ("attention", "mlp_up"),
    "save_qkv",
    "save_attention",
    "full",
)
LOSS_CHUNKS = (8192, 4096, 2048)


@dataclass(frozen=True)
class Candidate:
    """Configuration without `auto`.

    Attributes:
        limit: bytes of a device that its step may use.
        predicted: bytes that it needs by arithmetic.
    """

    config: Config
    limit: int
    predicted: float

    def __str__(self) -> str:
        return format_choices({name: value for name, value in list_settings(self.config).items() if value != AUTO})


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The configuration of the chosen candidate, what compiling it returned, and why faster ones were not chosen."""

    config: Config
    compiled: T
    refused: tuple[str, ...]


def list_candidates(config: Config, cluster: Cluster, limit: int, on_gpu: bool = True) -> tuple[list[Candidate], str]:
    """Return the candidates in the order of their speed, and a line on those left out; "" if there are none.

    The last candidate is taken even if it does not fit.

    Args:
        cluster: the GPUs; without `on_gpu`, those by whose rates a step is estimated.
        limit: bytes of a device that XLA may use.
        on_gpu: False for CPUs, where only arithmetic decides: there is one candidate.
    """
    *faster, last = _predict_all(resolve_expert_exchange(config, cluster), cluster, limit, on_gpu)
    left_out = [each for each in faster if not _may_fit(each)]
    candidates = [*filter(_may_fit, faster), replace(last, limit=limit)]
    if not on_gpu:
        del candidates[1:]
    elif config.xla.own_remat == AUTO:
        on = fields.replace_fields(last.config, {"xla.own_remat": "on"})
        candidates.append(replace(last, limit=limit, config=on))
    return candidates, _describe_left_out(left_out)


def _describe_left_out(left: Sequence[Candidate]) -> str:
    if not left:
        return ""
    needs = ", ".join(f"{_name_policy(each.config)} {each.predicted / GIB:.2f}" for each in left)
    return f"not compiled, because by arithmetic they need more than {left[0].limit / GIB:.2f} GiB per device: {needs}"


def _name_policy(config: Config) -> str:
    policy = format_choices({"remat.policy": config.remat.policy})
    policy += f" {config.pipeline.residuals}" if config.mesh.pipeline > 1 else ""
    return f"{policy} unrolled" if config.training.unroll == "all" else policy


def _predict_all(config: Config, cluster: Cluster, limit: int, on_gpu: bool) -> list[Candidate]:
    """Return the possible candidates, fastest first, except for the last resort `xla.own_remat on`."""
    found = (_choose_chunk(each, cluster, on_gpu) for each in _list_variants(config, cluster, on_gpu))
    return [Candidate(each, leave_free(limit), _predict_peak(each, cluster)) for each in found]


def _may_fit(candidate: Candidate) -> bool:
    return candidate.predicted <= add_slack(candidate.limit)


def choose_settings(
    candidates: Sequence[Candidate],
    compile: Callable[[Config], T],
    count_peak: Callable[[T], int],
    agree: Callable[[int], int] = lambda peak: peak,
    say: Callable[[str], None] = lambda line: None,
) -> Choice[T]:
    """Compile candidates until one fits.

    A candidate that does not fit corrects the arithmetic of the others with the same `training.unroll` and
    `pipeline.residuals`, by the ratio of its peak to the predicted one. Those that do not fit by the corrected
    arithmetic are not compiled. After MAX_REFUSED candidates that do not fit, only those with the last one's policy
    are.

    Args:
        compile: compiles the step of a configuration. OutOfMemory means that it does not fit.
        count_peak: returns the bytes of a device that the result of `compile` needs.
        agree: returns the largest peak of all processes.
        say: gets a line for each candidate that is refused.

    Raises:
        OutOfMemory: no memory to compile the last candidate.
    """

    def attempt(config: Config) -> tuple[T | None, int, str]:
        """Return the result of compiling, the largest peak of all processes, and why this one cannot compile, or ""."""
        try:
            compiled = compile(config)
        except OutOfMemory as found:
            return None, agree(NO_MEMORY), str(found)
        return compiled, agree(count_peak(compiled)), ""

    *faster, last = candidates
    refused, ratios, too_large = list[str](), dict[tuple[str, str], float](), 0
    for candidate in faster:
        like, problem = (candidate.config.training.unroll, candidate.config.pipeline.residuals), ""
        corrected = ratios.get(like, 0) * candidate.predicted
        if candidate.config.remat.policy != last.config.remat.policy:
            if too_large == MAX_REFUSED:
                problem = f"not compiled, because {MAX_REFUSED} others do not fit"
            elif corrected > candidate.limit:
                problem = f"not compiled, {_compare(corrected, candidate)} by corrected arithmetic"
        if not problem:
            compiled, peak, problem = attempt(candidate.config)
            if compiled is not None and peak <= candidate.limit:
                return Choice(candidate.config, compiled, tuple(refused))
            too_large += 1
            if peak < NO_MEMORY:
                ratios[like] = peak / candidate.predicted
                problem = _compare(peak, candidate)
        refused.append(f"{candidate}: {problem or 'another process has no memory to compile it'}")
        say(refused[-1])
    return Choice(last.config, compile(last.config), tuple(refused))


def _compare(peak: float, candidate: Candidate) -> str:
    return f"needs {peak / GIB:.2f} GiB per device, more than {candidate.limit / GIB:.2f}"


def keep_settings(config: Config, started: Config) -> Config:
    """Return the configuration with the choices of a run that continues in place of `auto`."""
    return fields.replace_fields(config, list_choices(config, started))


def list_choices(config: Config, chosen: Config) -> dict[str, Any]:
    """Return the settings that a configuration leaves open, with their values in another one."""
    settings = list_settings(config)
    return {name: value for name, value in list_settings(chosen).items() if settings[name] == AUTO != value}


def list_settings(config: Config) -> dict[str, Any]:
    """Return the settings that may be chosen, by name."""
    return {name: fields.get_field(config, name) for name in CHOSEN}


def format_choices(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {format_value(value)}" for name, value in values.items())


def _list_variants(config: Config, cluster: Cluster, on_gpu: bool) -> Iterator[Config]:
    """Yield the configuration with the possible policies and unrolling, fastest first."""
    own_remat = {"xla.own_remat": "off"} if config.xla.own_remat == AUTO else {}
    for residuals, policy in itertools.product(_list_residuals(config), _list_policies(config)):
        changes = {"pipeline.residuals": residuals, "remat.policy": policy} | own_remat
        with_policy: Config = fields.replace_fields(config, changes)
        for unroll in _list_unrolling(with_policy, cluster, on_gpu):
            yield fields.replace_fields(with_policy, {"training.unroll": unroll})


def _list_residuals(config: Config) -> Iterable[str]:
    chooses = config.mesh.pipeline > 1 and config.pipeline.residuals == AUTO
    return ["store", "recompute"] if chooses else [config.pipeline.residuals]


def _list_policies(config: Config) -> Iterable[Any]:
    remat = config.remat
    if remat.policy != AUTO:
        return [remat.policy]
    if config.training.unroll == "all":
        return ["none"]
    # With these settings the user trades time for memory.
    saves_memory = bool(remat.offload) or remat.every > 1 or config.optimizer.in_backward
    return ["full"] if saves_memory else _order_policies(config)


def _order_policies(config: Config) -> list[Any]:
    """Return the policies that differ for this model, those that compute least again first."""
    block = BlockCost.from_config(config)
    policies = [keep_existing(RematConfig(policy), config).policy for policy in POLICIES]

    def count_recomputed(policy: Any) -> tuple[bool, float]:
        remat = RematConfig(policy)
        return block.recomputes_attention(remat), block.count_recomputed(remat)

    different = {block.list_saved(RematConfig(policy)): policy for policy in reversed(policies)}
    return sorted(reversed(different.values()), key=count_recomputed)


def _list_unrolling(config: Config, cluster: Cluster, on_gpu: bool) -> Iterable[str]:
    if config.training.unroll != AUTO:
        return [config.training.unroll]
    # CPUs compile slowly, and so do experts and exchanges of attention over several GPUs: unrolled, deepseek_v2_lite.py
    # takes minutes. Long sequences gain little: 2% at 131,072 tokens on 8 GPUs, nothing at 1,048,576 on 64.
    exchanges = config.mesh.devices > 1 and (config.model.moe.experts > 0 or config.mesh.context > 1)
    if not on_gpu or exchanges or config.unroll_problems():
        return ["none"]
    steps = config.training.steps
    is_long = not steps or steps * predict_seconds(_resolve(config, cluster), cluster) >= UNROLLED_RUN_SECONDS
    return ["all", "none"] if is_long else ["none"]


def _choose_chunk(config: Config, cluster: Cluster, on_gpu: bool) -> Config:
    """Return the configuration with the largest chunk of the loss that does not raise the peak of memory."""
    if config.training.loss_chunk != AUTO:
        return config

    def with_chunk(chunk: int) -> Config:
        return fields.replace_fields(config, {"training.loss_chunk": chunk})

    smallest = with_chunk(MIN_LOSS_CHUNK)
    if not on_gpu:
        return smallest
    peak, tokens = _predict_peak(smallest, cluster), count_tokens(config)
    larger = (with_chunk(chunk) for chunk in LOSS_CHUNKS if chunk <= tokens)
    return next((each for each in larger if _predict_peak(each, cluster) <= peak), smallest)


def _predict_peak(config: Config, cluster: Cluster) -> float:
    return predict_footprint(_resolve(config, cluster)).peak


def _resolve(config: Config, cluster: Cluster) -> Config:
    return resolve_attention(config, cluster.chip.compute_capability)


# Settings that decide which candidates fit, in addition to the devices and the mesh, and that a resume may change.
DECIDING = (
    *("training.batch_size", "training.accumulation", "training.sequence_length", "training.attention"),
    *("remat.every", "remat.offload", "offload.optimizer", "offload.parameters", "optimizer.in_backward"),
    *("optimizer.name", "optimizer.state_dtype", "precision.compute_dtype", "precision.reduce_dtype"),
    *("precision.matmul", "precision.outlier_threshold", "sharding.zero_stage", "sharding.sequence_parallel"),
    *("sharding.optimizer_over_data", "sharding.int8_gathers", "sharding.data_gradients", "sharding.fsdp_gradients"),
    *(
        "sharding.expert_room",
        "sharding.context_exchange",
        "pipeline.schedule",
        "pipeline.virtual_stages",
        "pipeline.split",
        "lora.rank",
        "data.documents_per_row",
        "xla.options",
    ),
)

Compiled = tuple[Setup, Executables, Executables]  # the setup, and its programs lowered and compiled


def compile_fitting(setup: Setup, checkpoints: Checkpoints, say: Callable[[str], None]) -> Compiled:
    """Resolve the settings of `settings_choice.CHOSEN`, and compile the programs with them.

    A run that continues keeps its choice, unless something changed that decides it. Otherwise all processes compile the
    same candidates until one fits every process.

    Raises:
        OutOfMemory: the memory of a device does not suffice for compiling.
    """

    def compile_step(config: Config) -> tuple[Setup, Executables, jax.stages.Compiled]:
        candidate = setup.with_config(config)
        lowered = lower_programs(candidate)
        explainer = make_explainer(config, candidate.program, candidate.placement, checkpoints)
        with explainer.explain_oom(lambda: "compiling", lambda: lowered.step):
            return candidate, lowered, compile_program(candidate, lowered.step)

    started, device = setup.started, setup.placement.mesh.devices.flat[0]
    changes = find_deciding_changes(started, setup.config, device) if started else ""
    config = keep_settings(setup.config, started.config) if started and not changes else setup.config
    channel = setup.processes.channel("settings")
    copied = count_copied_bytes(setup.config.run.check_replicas, setup.program.state)
    limit = int(channel.exchange(str(count_usable_bytes(device)))[0])  # all processes need the same candidates
    limit = max(limit - copied, 0)
    where = describe_cluster(config.mesh.devices), limit, device.platform == "gpu"
    if device.platform == "gpu" and not chip_of(device.device_kind):
        say(f"{device.device_kind} has no figures in compiler/chips.py: `auto` is estimated with those of {STAND_IN}")
    candidates, left_out = list_candidates(config, *where)
    if left_out:
        say(left_out)
    choice = choose_settings(
        candidates,
        compile_step,
        count_peak=lambda compiled: hlo.read_memory(compiled[2]).peak,
        agree=lambda peak: max(map(int, channel.exchange(str(peak)))),
        say=say,
    )
    if chosen := list_choices(setup.config, choice.config):
        reason = f"; chosen anew because {changes}" if changes else ""
        say(f"chosen: {format_choices(chosen)}{reason}")
    for line in describe_newly_unread(choice.config, setup.config):
        say(line)
    candidate, lowered, step = choice.compiled
    held_out = lowered.held_out and compile_program(candidate, lowered.held_out)
    outer_step = lowered.outer_step and compile_program(candidate, lowered.outer_step)
    return candidate, lowered, Executables(step, held_out, outer_step)


def find_deciding_changes(started: Started, config: Config, device: jax.Device) -> str:
    """Return what changed since the start of a run, of all that decides the choice of settings; "" if nothing did."""
    given = [name for name, value in list_settings(config).items() if value != AUTO]
    changed = [
        name for name in (*DECIDING, *given) if fields.get_field(started.config, name) != fields.get_field(config, name)
    ]
    return find_changes(started, config, device) or (f"{', '.join(changed)} changed" if changed else "")
