"""Choice of the settings that exchange memory for time, where the configuration leaves it open with `auto`.

These are `remat.policy`, `training.unroll`, `training.loss_chunk` and `xla.own_remat`. Candidates are compiled in the
order of their speed, and the first that fits is taken. Arithmetic leaves out those that cannot fit, so that most runs
compile one candidate: the program that they run.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jaxopt_llm.config import Config, Intermediate, fields
from jaxopt_llm.config.memory import Policy
from jaxopt_llm.config.metadata import AUTO
from jaxopt_llm.config.training import MIN_LOSS_CHUNK
from jaxopt_llm.planning.memory import GIB
from jaxopt_llm.planning.prediction import predict_footprint, predict_seconds
from jaxopt_llm.planning.search.attention_cost import resolve_attention
from jaxopt_llm.planning.search.microbatch import count_tokens
from jaxopt_llm.planning.search.ranking import FREE
from jaxopt_llm.planning.search.roofline import Cluster

T = TypeVar("T")

CHOSEN = ("remat.policy", "training.unroll", "training.loss_chunk", "xla.own_remat")
SLACK = 0.03  # error of the arithmetic: a candidate is compiled if it would fit with this much less
SEARCH_SECONDS = 60.0  # after this time, no candidate other than the last is compiled
# Shortest run, by arithmetic, whose layers are unrolled: compiling them takes half a minute more, and a step 4 to 7%
# less.
UNROLLED_RUN_SECONDS = 600.0
# Policies in the order of what they compute again, least first.
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


@dataclass(frozen=True)
class Candidate:
    """Configuration without `auto`, and the bytes of a device that its step may need."""

    config: Config
    limit: int


@dataclass(frozen=True)
class Choice(Generic[T]):
    """The chosen candidate, what compiling it returned, and a line for each candidate that was compiled before."""

    config: Config
    compiled: T
    rejected: tuple[str, ...]


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
    agree: Callable[[str], str] = lambda verdict: verdict,
) -> Choice[T]:
    """Compile candidates until one fits.

    Args:
        compile: compiles the step of a configuration.
        count_peak: returns the bytes of a device that the result of `compile` needs.
        agree: returns the verdict of process 0 to all processes.
    """
    clock, remaining = time.monotonic(), list(candidates)
    rejected: list[str] = []
    while True:
        candidate = remaining.pop(0)
        compiled = compile(candidate.config)
        if not remaining:
            return Choice(candidate.config, compiled, tuple(rejected))
        peak = count_peak(compiled)
        late = time.monotonic() - clock > SEARCH_SECONDS
        verdict = agree("fits" if peak <= candidate.limit else "too large, late" if late else "too large")
        if verdict == "fits":
            return Choice(candidate.config, compiled, tuple(rejected))
        settings = format_choices(list_settings(candidate.config))
        rejected.append(f"{settings}: {peak / GIB:.2f} GiB per device, more than {candidate.limit / GIB:.2f}")
        if verdict == "too large, late":
            del remaining[:-1]


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
    return ["full"] if saves_memory else POLICIES


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
