"""Choice of the settings that exchange memory for time, where the configuration leaves it open with `auto`.

These are `remat.policy`, `training.unroll`, `training.loss_chunk` and `xla.own_remat`. Candidates are compiled in the
order of their speed, and the first that fits is taken. Arithmetic leaves out those that cannot fit, so that most runs
compile one candidate: the program that they run.
"""

import enum
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jaxopt_llm.config import Config, Intermediate, RematConfig, fields
from jaxopt_llm.config.memory import Policy
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.training import MIN_LOSS_CHUNK
from jaxopt_llm.core.errors import OutOfMemory
from jaxopt_llm.planning.prediction import predict_footprint, predict_seconds
from jaxopt_llm.planning.search.attention_cost import resolve_attention
from jaxopt_llm.planning.search.block_cost import BlockCost, list_recomputed, list_saved
from jaxopt_llm.planning.search.microbatch import count_tokens
from jaxopt_llm.planning.search.ranking import FREE
from jaxopt_llm.planning.search.roofline import Cluster
from jaxopt_llm.planning.units import GIB

T = TypeVar("T")

CHOSEN = ("remat.policy", "training.unroll", "training.loss_chunk", "xla.own_remat")
SLACK = 0.03  # error of the arithmetic: a candidate is compiled if it would fit with this much less
SEARCH_SECONDS = 60.0  # after this time, only the last two candidates are compiled, which differ in xla.own_remat
# Shortest run, by arithmetic, whose layers are unrolled: compiling them takes half a minute more, and a step 4 to 7%
# less.
UNROLLED_RUN_SECONDS = 600.0
# Policies to choose from. Which of them compute least again depends on the model.
POLICIES: tuple[Policy | tuple[Intermediate, ...], ...] = (
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


class Verdict(enum.Enum):
    """Verdict on a compiled candidate. TOO_LATE: it is too large, and there is no time to compile many others."""

    FITS = "fits"
    TOO_LARGE = "too large"
    TOO_LATE = "too late"


@dataclass(frozen=True)
class Candidate:
    """Configuration without `auto`, and the bytes of a device that its step may need."""

    config: Config
    limit: int


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The configuration of the chosen candidate, and what compiling it returned."""

    config: Config
    compiled: T


def list_candidates(config: Config, cluster: Cluster, limit: int, on_gpu: bool = True) -> list[Candidate]:
    """Return the candidates in the order of their speed; the last one is taken even if it does not fit.

    Args:
        cluster: the GPUs; without `on_gpu`, those by whose rates a step is estimated.
        limit: bytes of a device that XLA may use.
        on_gpu: False for CPUs, where only arithmetic decides: there is one candidate.
    """
    roomy = int((1 - FREE) * limit)
    found = [_choose_chunk(each, cluster, on_gpu) for each in _list_variants(config, cluster, on_gpu)]
    fitting = [each for each in found[:-1] if _predict_peak(each, cluster) <= (1 + SLACK) * roomy]
    candidates = [*(Candidate(each, roomy) for each in fitting), Candidate(found[-1], limit)]
    if not on_gpu:
        return candidates[:1]
    if config.xla.own_remat == AUTO:
        candidates.append(Candidate(fields.replace_fields(found[-1], {"xla.own_remat": "on"}), limit))
    return candidates


def choose_settings(
    candidates: Sequence[Candidate],
    compile: Callable[[Config], T],
    count_peak: Callable[[T], int],
    agree: Callable[[Verdict], Verdict] = lambda verdict: verdict,
    say: Callable[[str], None] = lambda line: None,
) -> Choice[T]:
    """Compile candidates until one fits.

    Args:
        compile: compiles the step of a configuration. OutOfMemory means that it does not fit.
        count_peak: returns the bytes of a device that the result of `compile` needs.
        agree: returns the verdict of all processes.
        say: gets a line for each candidate that does not fit.

    Raises:
        OutOfMemory: no memory to compile the last candidate.
    """
    clock, remaining = time.monotonic(), list(candidates)
    while len(remaining) > 1:
        candidate = remaining.pop(0)
        try:
            compiled = compile(candidate.config)
            peak = count_peak(compiled)
            problem = f"needs {peak / GIB:.2f} GiB per device, more than {candidate.limit / GIB:.2f}"
            fits = peak <= candidate.limit
        except OutOfMemory as error:
            problem, fits = str(error), False
        late = time.monotonic() - clock > SEARCH_SECONDS
        verdict = agree(Verdict.FITS if fits else Verdict.TOO_LATE if late else Verdict.TOO_LARGE)
        if verdict is Verdict.FITS:
            return Choice(candidate.config, compiled)
        say(f"{format_choices(list_settings(candidate.config))}: {problem}")
        if verdict is Verdict.TOO_LATE:
            del remaining[:-2]  # the last two differ in xla.own_remat
    return Choice(remaining[0].config, compile(remaining[0].config))


def find_common_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of all processes: a candidate fits if it fits each, and process 0 decides what is late."""
    if all(verdict is Verdict.FITS for verdict in verdicts):
        return Verdict.FITS
    return Verdict.TOO_LATE if verdicts[0] is Verdict.TOO_LATE else Verdict.TOO_LARGE


def keep_settings(config: Config, started: Config) -> Config:
    """Return the configuration with the choices of a run that continues in place of `auto`."""
    return fields.replace_fields(config, list_choices(config, started))


def list_choices(config: Config, chosen: Config) -> dict[str, Any]:
    """Return the settings that a configuration leaves open, with their values in another one."""
    settings = list_settings(config)
    return {name: value for name, value in list_settings(chosen).items() if settings[name] == AUTO}


def list_settings(config: Config) -> dict[str, Any]:
    """Return the settings that may be chosen, by name."""
    return {name: fields.get_field(config, name) for name in CHOSEN}


def format_choices(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {' '.join(value) if isinstance(value, tuple) else value}" for name, value in values.items()
    )


def _list_variants(config: Config, cluster: Cluster, on_gpu: bool) -> Iterator[Config]:
    """Yield the configuration with the possible policies and unrolling, fastest first."""
    own_remat = {"xla.own_remat": "off"} if config.xla.own_remat == AUTO else {}
    for policy in _list_policies(config):
        with_policy: Config = fields.replace_fields(config, {"remat.policy": policy} | own_remat)
        for unroll in _list_unrolling(with_policy, cluster, on_gpu):
            yield fields.replace_fields(with_policy, {"training.unroll": unroll})


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

    def count_recomputed(policy: Any) -> tuple[bool, float]:
        recomputed = list_recomputed(RematConfig(policy), config.model)
        return "attention" in recomputed, sum(block.weights.get(name, 0.0) for name in recomputed)

    def find_saved(policy: Any) -> frozenset[str]:
        saved = list_saved(RematConfig(policy), config.model)
        return frozenset(name for name in saved if block.elements[name])

    different = {find_saved(policy): policy for policy in reversed(POLICIES)}
    return sorted(reversed(different.values()), key=count_recomputed)


def _list_unrolling(config: Config, cluster: Cluster, on_gpu: bool) -> Iterable[str]:
    if config.training.unroll != AUTO:
        return [config.training.unroll]
    # Over several GPUs XLA would schedule the collectives of all layers at once, and hold more than the stacks. CPUs
    # compile slowly.
    if not on_gpu or config.mesh.devices > 1 or config.unroll_problems():
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
