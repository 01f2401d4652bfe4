"""Workload of a decoder: its state, its batches of packed documents, its held-out loss and its samples."""

import contextlib
import functools
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from jaxopt_llm.checkpoint.native.checkpoints import Checkpoints
from jaxopt_llm.checkpoint.native.identity import Identity
from jaxopt_llm.config import Config
from jaxopt_llm.core import tree
from jaxopt_llm.data.rows.loader import read_ahead
from jaxopt_llm.data.tokens.prepared import Verification
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.training import pretrained_weights
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.compile import Executables
from jaxopt_llm.training.evaluation import LossSum, evaluate
from jaxopt_llm.training.initial_weights import InitialWeights
from jaxopt_llm.training.local_steps import count_groups, initialize_groups
from jaxopt_llm.training.restore import load_state
from jaxopt_llm.training.samples import Sampler
from jaxopt_llm.training.setup import Setup, write_run_files
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import Metrics
from jaxopt_llm.training.utilisation import utilisation_per_token

ExplainOom = Callable[[Callable[[], str]], contextlib.AbstractContextManager[None]]


class DecoderWorkload:
    """A decoder and its documents, with compiled programs."""

    def __init__(
        self,
        setup: Setup,
        programs: Executables,
        initial: InitialWeights,
        verification: Verification,
        explain_oom: ExplainOom,
    ) -> None:
        """Take over what a run prepared.

        Args:
            initial: the weights that the run starts from.
            verification: that of its prepared data.
            explain_oom: see Workload.
        """
        self._verification, self.explain_oom = verification, explain_oom
        self._setup, self._programs, self._initial = setup, programs, initial
        self._sampler = Sampler(setup)

    @property
    def config(self) -> Config:
        return self._setup.config

    @property
    def directory(self) -> Path:
        return self._setup.directory

    @property
    def processes(self) -> Processes:
        return self._setup.processes

    unit = "tokens"

    @property
    def units_per_step(self) -> int:
        return self.config.training.batch_size * self.config.training.sequence_length

    @functools.cached_property
    def utilisation(self) -> dict[str, float]:
        return utilisation_per_token(self.config, self._setup.program, self._setup.placement)

    def restore(self, checkpoints: Checkpoints, start: int, say: Callable[[str], None]) -> TrainState:
        """Return the state of step `start`; see Workload."""
        specs, placement, initial = self._setup.program.specs, self._setup.placement, self._initial
        weights = initial.weights
        if start:
            read_frozen = None
            if weights is not None:
                read_frozen = functools.partial(pretrained_weights.read_frozen, weights, specs.frozen, placement)
            saved = count_groups(checkpoints.read_record(start)["arrays"])
            groups = placement.size("data") if specs.groups else 0
            if saved != groups:
                say(
                    f"the checkpoint has {saved or 'no'} groups in one program, and this run {groups or 'none'}: see "
                    "training.local_steps in docs/slow_links.md"
                )
            return load_state(checkpoints, start, specs, placement, read_frozen)
        given = None
        if weights is not None:
            given = pretrained_weights.read_parameters(weights, specs, placement)
            say(f"starts from the weights of {weights.path}")
        if initial.adapter is not None:
            given = pretrained_weights.add_adapter(given, initial.adapter, specs, placement)
            say(f"starts from the adapters of {initial.adapter.path}")
        optimizers, seed = self._setup.program.optimizers, self.config.run.seed
        return initialize_groups(specs, optimizers, seed, placement, given)

    def read_batches(self, start: int, stopping: Callable[[], bool]) -> Generator[tuple[Any, float], None, None]:
        return read_ahead(self._setup.loader, start, self.config.data.stall_seconds, stopping)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        placed = self._setup.local_rows.make_global(batch)
        with self.processes.main.wait():  # on CPUs, the call returns when all processes have finished the step
            new: tuple[TrainState, Metrics] = self._programs.step(state, placed, self._setup.program.step.placed)
        return new

    def average_groups(self, state: TrainState) -> TrainState:
        with self.processes.main.wait():
            new: TrainState = self._programs.outer_step(state)
        return new

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Return the mean loss over all validation sets, `eval_loss`, and that of each of `evaluation.paths`.

        With `training.ema_decay`, they are those of the average.
        """
        total, losses = LossSum(), {}
        state = training_state.use_average(state, self._setup.program.specs, self._setup.placement)
        for name, batches in self._setup.validation.items():
            placed = map(self._setup.local_rows.make_global, batches)
            loss = evaluate(self._programs.held_out, state, placed, self.processes.main.wait)
            total += loss
            if self.config.evaluation.paths:
                losses[f"eval_loss/{name}"] = loss.mean
        return {"eval_loss": total.mean} | losses

    def sample(self, state: TrainState) -> list[dict[str, str]]:
        return self._sampler(state)

    def check_data(self, wait: bool) -> None:
        self._verification.check(wait, self.processes.main.beat)

    def to_checkpoint(self, state: TrainState) -> dict[str, tree.Tree]:
        return self._setup.program.to_checkpoint(state)

    def keep(self, state: TrainState, identity: Identity | None) -> None:
        """Keep nothing: the command ends with its run."""

    def write_files(self) -> None:
        write_run_files(self._setup, self._initial.base_sha256)
