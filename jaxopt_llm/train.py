"""python -m jaxopt_llm.train --config FILE [--section.field VALUE ...]"""

import itertools
import json
import math
import os
import sys
import time
from pathlib import Path

import jax

from jaxopt_llm import config as configuration
from jaxopt_llm import errors
from jaxopt_llm.checkpoint.lock import sole_owner
from jaxopt_llm.checkpoint.native import Checkpoints
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.data.corpus import Corpus, open_corpus
from jaxopt_llm.data.loader import Loader, held_out_batches, read_ahead
from jaxopt_llm.data.packing import PackedRows
from jaxopt_llm.data.tokenizer import load_tokenizer
from jaxopt_llm.data.tokens import TokenStream
from jaxopt_llm.errors import InputError, Preempted, TrainingDiverged
from jaxopt_llm.model import leaves, param
from jaxopt_llm.model.batch import Batch
from jaxopt_llm.observe.metrics import MetricsLog, replace_text
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.observe.progress import ProgressLine
from jaxopt_llm.parallel import hlo
from jaxopt_llm.parallel.mesh import make_mesh, simulate_cpu_devices
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.evaluation import make_evaluate
from jaxopt_llm.training.program import make_program


def train(config: TrainConfig, preemption: Preemption) -> None:
    """Trains from the run directory's last checkpoint, or from the start, to `training.steps`.

    Raises Preempted, after the step and its checkpoint, where a signal asks for a stop before the last step.
    """
    directory = Path(config.run.directory)
    tokenizer = load_tokenizer(config.data)
    if tokenizer.vocabulary_size > config.model.vocabulary_size:
        raise InputError(
            f"model.vocabulary_size={config.model.vocabulary_size}: the tokenizer {config.data.tokenizer} has "
            f"{tokenizer.vocabulary_size} tokens"
        )
    corpus = open_corpus(config.data, tokenizer)
    _check_directory(directory, config, corpus)

    def rows(stream: TokenStream, name: str) -> PackedRows:
        return PackedRows(stream, config.training.sequence_length, config.model.vocabulary_size, name)

    sources = [rows(source.training, source.name) for source in corpus.sources]
    weights = [source.weight for source in corpus.sources]
    loader = Loader(sources, weights, config.training.batch_size, config.run.seed)
    held_out_rows = held_out_batches(
        rows(corpus.held_out, "the held-out split"), config.training.batch_size, config.evaluation.batches
    )

    placement = Placement(make_mesh(config.mesh), config.sharding.zero_stage, config.precision)
    program = make_program(
        config.model, config.training, config.optimizer, config.schedule, config.remat, config.lora, placement
    )
    evaluate = make_evaluate(program.parts, program.executor, placement)

    def on_devices(batch: Batch) -> Batch:
        """Fields [B, S] -> [M, B / M, S]."""
        microbatches = jax.tree.map(lambda x: x.reshape(config.training.accumulation, -1, x.shape[-1]), batch)
        return jax.device_put(microbatches, program.rows)

    held_out = [on_devices(batch) for batch in held_out_rows]

    with (
        Checkpoints(directory / "checkpoints", config.checkpoint.keep) as checkpoints,
        ProgressLine(config.training.steps, done=checkpoints.latest_step() or 0) as progress,
    ):
        start = checkpoints.latest_step() or 0
        if start >= config.training.steps:
            progress.say(f"{directory} is finished at step {start}; train longer with --training.steps N")
            return
        trained = f", of which {param.count(program.specs.masters):,} are trained," if config.lora.rank else ""
        progress.say(
            f"{leaves.count(program.parts.specs):,} parameters{trained} on {placement.mesh.size} "
            f"{jax.devices()[0].device_kind} device(s), run directory {directory}"
        )
        progress.say(f"data: {corpus}")
        if config.mesh.pipeline > 1:
            idle = (config.mesh.pipeline - 1) / (config.training.accumulation + config.mesh.pipeline - 1)
            progress.say(f"pipeline: {idle:.0%} of a step is idle; fewer with more --training.accumulation")
        divided = program.parts.specs if config.sharding.zero_stage == 3 else program.specs.masters
        for path in placement.undivided(divided):
            progress.say(f"ZeRO leaves {path} whole: no dimension of it divides")
        clock = time.perf_counter()
        compiled = program.step.lower(program.state, program.batch).compile()
        peak = hlo.memory(compiled).peak
        progress.say(
            f"compiled in {time.perf_counter() - clock:.1f} s; {peak / 2**30:.2f} GiB per device while it runs"
        )
        _check_host_memory(peak * placement.mesh.size)
        if start:
            saved = placement.abstract(training_state.checkpoint_specs(program.specs))
            restored = checkpoints.restore(start, **saved)
            state = training_state.resume(program.specs, start, placement, **restored)
            progress.say(f"continues from step {start}")
        else:
            state = training_state.initialize(program.specs, program.optimizers, config.run.seed, placement)
            _set_aside(directory / "metrics.jsonl")
        log = MetricsLog(directory / "metrics.jsonl", start)
        _record(directory, config, corpus)

        if preemption.requested():
            raise Preempted(start)
        metrics: dict[str, jax.Array] = {}
        batches = read_ahead(loader, start, config.data.stall_seconds)
        timed_from, clock, data_seconds = start, time.perf_counter(), 0.0
        for step in range(start + 1, config.training.steps + 1):
            batch, waited = next(batches)
            data_seconds += waited
            before, (state, metrics) = metrics, compiled(state, on_devices(batch))
            jax.block_until_ready(before)  # JAX would queue up to 32 steps, and a stop wait for them all
            progress.advance(step)

            last = step == config.training.steps
            measured = last or step % config.evaluation.every == 0
            saved = last or step % config.checkpoint.every == 0
            logged = measured or step % config.logging.every == 0
            if not (saved or logged or preemption.requested()):
                continue
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])  # waits for the device
            _check_finite(directory, step, loss=loss, gradient_norm=norm)
            seconds = (time.perf_counter() - clock) / (step - timed_from)
            if logged:
                tokens = config.training.batch_size * config.training.sequence_length
                record = {
                    "step": step,
                    "loss": loss,
                    "grad_norm": norm,
                    "learning_rate": float(metrics["learning_rate"]),
                    "tokens": step * tokens,
                    "tokens_per_second": tokens / seconds,
                    "step_seconds": seconds,
                    "data_seconds": data_seconds / (step - timed_from),  # of them, those that waited for data
                }
                if measured:
                    record["eval_loss"] = evaluate(state, held_out)
                    _check_finite(directory, step, held_out_loss=record["eval_loss"])
                log.write(record)
                progress.show(record)
            preempted = preemption.requested() and not last
            if saved or preempted:
                checkpoints.save(step, **program.kept(state))
            if preempted:
                raise Preempted(step)
            timed_from, clock, data_seconds = step, time.perf_counter(), 0.0
        log.close()


def _check_finite(directory: Path, step: int, **values: float) -> None:
    if not all(map(math.isfinite, values.values())):
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
        raise TrainingDiverged(
            f"step {step}: {told}; {directory} keeps the checkpoints before it; try a lower "
            "--optimizer.learning-rate or a longer --schedule.warmup-steps"
        )


def _check_host_memory(needed: int) -> None:
    """Simulated devices share the host's memory, which the system would give out until it kills the process."""
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if jax.default_backend() == "cpu" and needed > has:
        raise InputError(
            f"the step needs {needed / 2**30:,.1f} GiB on the simulated devices together, this host has "
            f"{has / 2**30:,.1f} GiB; make the model, training.batch_size or training.sequence_length smaller"
        )


def _check_directory(directory: Path, config: TrainConfig, corpus: Corpus) -> None:
    """Raises InputError where the run directory holds a run that this one does not continue."""
    checkpoints = directory / "checkpoints"
    if not checkpoints.exists() or not any(checkpoints.iterdir()):
        return  # nothing to continue: whatever began here has left nothing but its log
    try:
        old = configuration.from_json((directory / "config.json").read_text())
        old_corpus = json.loads((directory / "corpus.json").read_text())["sha256"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(f"{directory} holds no run that can be continued ({error}); choose another") from error
    found = configuration.differences(old, config)
    if found:
        raise InputError(
            f"{directory} is another run: {'; '.join(found)}; choose another --run.directory, or allow the change of a "
            "field with --run.allow-change NAME"
        )
    if old_corpus != corpus.sha256:
        raise InputError(
            f"{directory} learnt from another corpus than {corpus.name} now holds: bring that one back (the standard "
            "library is that of the Python it began with), or choose another --run.directory"
        )


def _set_aside(log: Path) -> None:
    """Keeps the log of a run that left no checkpoint to continue from."""
    if log.exists():
        free = (log.with_name(f"metrics.{number}.jsonl") for number in itertools.count(1))
        log.rename(next(path for path in free if not path.exists()))


def _record(directory: Path, config: TrainConfig, corpus: Corpus) -> None:
    """Makes the run directory this configuration's, before there is a checkpoint that says whose it is."""
    replace_text(
        directory / "corpus.json", json.dumps({"name": corpus.name, "summary": str(corpus), "sha256": corpus.sha256})
    )
    replace_text(directory / "config.json", configuration.to_json(config))


def main() -> int:
    config = configuration.parse(sys.argv[1:], "python -m jaxopt_llm.train")
    configuration.validate(config)
    simulate_cpu_devices(config.mesh)
    with sole_owner(Path(config.run.directory)), Preemption() as preemption:
        train(config, preemption)
    return 0


if __name__ == "__main__":
    errors.run(main)
