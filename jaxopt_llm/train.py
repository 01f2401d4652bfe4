"""python -m jaxopt_llm.train --config FILE [--section.field VALUE ...] [--print-config]"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxopt_llm import config as configuration
from jaxopt_llm import errors, run
from jaxopt_llm.checkpoint.huggingface import Folder
from jaxopt_llm.checkpoint.lock import sole_owner
from jaxopt_llm.checkpoint.native import Checkpoints
from jaxopt_llm.checkpoint.weights import RunWeights
from jaxopt_llm.config import TrainConfig
from jaxopt_llm.data.corpus import Corpus, open_corpus
from jaxopt_llm.data.loader import Loader, held_out_batches, read_ahead
from jaxopt_llm.data.packing import PackedRows
from jaxopt_llm.data.tokenizer import Tokenizer, load_tokenizer
from jaxopt_llm.data.tokens import TokenStream
from jaxopt_llm.errors import InputError, Preempted, TrainingDiverged
from jaxopt_llm.execution import stages
from jaxopt_llm.files import replace_durably
from jaxopt_llm.model import exchange, flops, leaves, param
from jaxopt_llm.observe.dashboards import Dashboards
from jaxopt_llm.observe.meter import Meter
from jaxopt_llm.observe.metrics import MetricsLog
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.observe.profile import ProfileConfig, Profiler
from jaxopt_llm.observe.progress import ProgressLine
from jaxopt_llm.oom import Explainer
from jaxopt_llm.parallel import distributed, hlo, launchers, runtime
from jaxopt_llm.parallel.distributed import ALONE, Processes
from jaxopt_llm.parallel.mesh import make_mesh
from jaxopt_llm.parallel.rows import OwnRows
from jaxopt_llm.parallel.runtime import repeatable
from jaxopt_llm.parallel.sharding import Placement
from jaxopt_llm.training import moments, pretrained
from jaxopt_llm.training import state as training_state
from jaxopt_llm.training.evaluation import evaluate, make_held_out
from jaxopt_llm.training.program import make_program
from jaxopt_llm.training.state import TrainState
from jaxopt_llm.training.step import Metrics
from jaxopt_llm.utilisation import utilisation
from jaxopt_llm.validation import validate

PRINT_CONFIG = "--print-config"  # prints what would be trained, checked, and stops


def train(config: TrainConfig, preemption: Preemption, processes: Processes = ALONE) -> None:
    """Trains from the run directory's last checkpoint, or from the start, to `training.steps`.

    Raises Preempted, after the step and its checkpoint, where a signal to any process asks for a stop before the last
    step.
    """
    directory = Path(config.run.directory)
    processes.check_shared(directory)
    tokenizer = load_tokenizer(config.data)
    if tokenizer.vocabulary_size > config.model.vocabulary_size:
        raise InputError(
            f"model.vocabulary_size={config.model.vocabulary_size}: the tokenizer {config.data.tokenizer} has "
            f"{tokenizer.vocabulary_size} tokens"
        )
    corpus = open_corpus(config.data, tokenizer)
    processes.check_same("data.paths", corpus.sha256)
    _check_directory(directory, config, corpus)

    def rows(stream: TokenStream, name: str) -> PackedRows:
        model, length = config.model, config.training.sequence_length
        return PackedRows(stream, length, model.vocabulary_size, name, config.data.long_documents)

    sources = [rows(source.training, source.name) for source in corpus.sources]
    weights = [source.weight for source in corpus.sources]
    placement = Placement(make_mesh(config.mesh), config.sharding, config.precision, config.offload)
    program = make_program(
        config.model,
        config.training,
        config.optimizer,
        config.schedule,
        config.remat,
        config.lora,
        placement,
        config.run.seed,
        keep_frozen=run.keeps_frozen(config),
        pipelined=config.pipeline,
        xla=config.xla,
    )
    processes.check_same("training.attention", program.attention.name, "all must have the same packages, or name it")
    own = OwnRows(program.batch.tokens.shape, program.rows)
    loader = Loader(sources, weights, config.training.batch_size, config.run.seed, own.numbers)
    held_out_split = rows(corpus.held_out, "the held-out split")
    held_out_rows = held_out_batches(
        held_out_split,
        config.training.batch_size,
        config.evaluation.batches,
        own.numbers,
    )

    with (
        ProgressLine(config.training.steps, processes.first) as progress,
        Checkpoints(directory / "checkpoints", config.checkpoint, progress.say, processes) as checkpoints,
        contextlib.ExitStack() as scope,
    ):
        start = checkpoints.latest_step() or 0
        progress.advance(start)
        if start >= config.training.steps:
            progress.say(f"{directory} is finished at step {start}; train longer with --training.steps N")
            return
        weights_from: Folder | RunWeights | None = None
        if config.model.pretrained and not start:
            weights_from = run.initial_weights(config, progress.say, processes)
        elif start and jax.tree.leaves(program.specs.frozen) and not program.specs.keep_frozen:
            weights_from = run.open_base(directory, config)
        base = weights_from if isinstance(weights_from, Folder) else None
        began_from = run.base_digest(directory) if start else base.sha256 if base else None
        adapter = configuration.open_adapter(config) if config.lora.pretrained and not start else None
        if adapter is not None:
            adapter.check_base(base)
        specs, partly = program.parts.specs, jax.tree.leaves(program.specs.frozen)
        parameters = flops.in_words(leaves.count(specs), flops.active(config.model, specs))
        trained = f", of which {param.count(program.specs.masters):,} are trained," if partly else ""
        progress.say(
            f"{parameters}{trained} on {placement.mesh.size} "
            f"{jax.devices()[0].device_kind} device(s){processes}, run directory {directory}"
        )
        if program.attention.reason:
            progress.say(f"attention: {program.attention}")
        if experts := exchange.said(config.model, placement):
            progress.say(f"experts' tokens: {experts}")
        progress.say(f"data: {corpus}")
        for each in (*sources, held_out_split):
            if each.packing:
                progress.say(each.packing)
        if config.precision.compute_dtype == "float16" and not config.precision.scales_loss and processes.first:
            print(
                "warning: float16 without loss scaling rounds small gradients to zero; set --precision.loss-scaling "
                "dynamic",
                file=sys.stderr,
            )
        if config.mesh.pipeline > 1:
            microbatches = config.training.accumulation
            waste = stages.waste(program.parts.layout, config.mesh.pipeline, microbatches, config.pipeline)
            if microbatches >= config.mesh.pipeline:
                progress.say(f"pipeline: {waste}")
            elif processes.first:
                print(f"warning: fewer microbatches than stages: {waste}", file=sys.stderr)
        divided = program.parts.specs if config.sharding.zero_stage == 3 else program.specs.masters
        for path in placement.undivided(divided):
            progress.say(f"ZeRO leaves {path} whole: no dimension of it divides")
        wide = moments.in_no_blocks(program.specs.masters) if config.optimizer.state_dtype == "int8" else []
        if wide:
            progress.say(
                f"optimizer.state_dtype: the moments of {len(wide)} matrices stay in 32 bits, {wide[0]} first: no "
                f"block of {moments.BLOCKS[-1]} to {moments.BLOCKS[0]} values divides their last dimension"
            )
        ends = config.schedule.ends_at
        if ends is not None and ends < config.training.steps:
            progress.say(f"the learning rate has its final value from step {ends} on: see --schedule.decay-steps")
        clock = time.perf_counter()
        explainer = Explainer(config, program, placement, checkpoints)
        lowered_step = program.step.lower(program.state, program.batch)

        def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
            repeats = config.run.deterministic and jax.default_backend() == "gpu"
            options = repeatable(lowered, directory, processes.first) if repeats else None
            return lowered.compile(compiler_options=options)

        with explainer.during(lambda: "compiling", lowered_step):
            run_step = compiled(lowered_step)
            lowered = make_held_out(program.parts, program.executor, placement, config.xla).lower(
                program.state, program.batch
            )
            held_out = compiled(lowered)
        needed = [hlo.memory(each) for each in (run_step, held_out)]
        peak, on_host = max(each.peak for each in needed), max(each.host for each in needed)
        beside = f" and {on_host / 2**30:.2f} GiB of the host" if on_host else ""
        progress.say(
            f"compiled in {time.perf_counter() - clock:.1f} s; {peak / 2**30:.2f} GiB per device{beside} while it runs"
        )
        explainer.check({"the step": (lowered_step, run_step), "an evaluation": (lowered, held_out)})
        with explainer.during(lambda: f"bringing the state of step {start} onto the devices", lowered_step):
            if start:
                saved = placement.abstract(training_state.checkpoint_specs(program.specs))
                restored = checkpoints.restore(start, **saved)
                if weights_from is not None:
                    restored["frozen"] = pretrained.read_frozen(weights_from, program.specs.frozen, placement)
                state = training_state.resume(program.specs, start, placement, **restored)
                progress.say(f"continues from step {start}")
            else:
                given = None
                if weights_from is not None:
                    given = pretrained.read(weights_from, program.specs, placement)
                    progress.say(f"begins from the weights of {weights_from.path}")
                if adapter is not None:
                    given = pretrained.with_adapter(given, adapter, program.specs, placement)
                    progress.say(f"begins from the adapters of {adapter.path}")
                seed = config.run.seed
                state = training_state.initialize(program.specs, program.optimizers, seed, placement, given)
        log: MetricsLog | None = None
        recorders: list[Callable[[dict[str, Any]], None]] = []
        if processes.first:
            if not start:
                _set_aside(directory / "metrics.jsonl")
            log = MetricsLog(directory / "metrics.jsonl", start, progress.say)
            _record(directory, config, corpus, tokenizer, began_from)
            settings = dataclasses.asdict(config)
            dashboards = scope.enter_context(Dashboards(config.logging, directory, start, settings, progress.say))
            recorders = [log.write, dashboards.write, progress.show]
        profiler = scope.enter_context(Profiler(config.profile if processes.first else ProfileConfig(), directory))
        tokens = config.training.batch_size * config.training.sequence_length
        meter = Meter(tokens, utilisation(config, program, placement))
        vote = processes.vote()

        def conclude(step: int, metrics: Metrics, measured: TrainState | None = None) -> dict[str, float]:
            """Reads a step's numbers, which waits for it, and records them where they are due. measured: the state
            after it, where its held-out loss is due. Returns what a checkpoint of that step tells."""
            _check_skips(step, metrics, config, progress)
            told: dict[str, float] = {"tokens": step * tokens}
            if measured is None and step % config.logging.every:
                return told
            unsaid = {"skipped", "skipped_in_a_row", "overflow"}
            values = {name: _finite(value) for name, value in metrics.items() if name not in unsaid}
            record = meter.record(step, {**values, "skipped": int(metrics["skipped"])})
            if measured is not None:
                record["eval_loss"] = told["eval_loss"] = evaluate(held_out, measured, map(own.place, held_out_rows))
                _check_finite(directory, step, held_out_loss=told["eval_loss"])
                meter.restart(step)
            for write in recorders:
                write(record)
            return told

        if vote.now(preemption.requested()):
            raise Preempted(start)
        meter.restart(start)
        batches = scope.enter_context(
            contextlib.closing(read_ahead(loader, start, config.data.stall_seconds, preemption.requested))
        )
        latest: tuple[int, Metrics] | None = None  # the step that ran last,
        told: dict[str, float] | None = None  # and what its checkpoint tells, once its numbers are read
        postponed = False
        step = start
        # Numbers are read a step late, and an allocation that fails is told no earlier.
        scope.enter_context(explainer.during(lambda: f"in step {step} or the one before", lowered_step))
        for step in range(start + 1, config.training.steps + 1):
            profiler.before(step)
            try:
                batch, waited = next(batches)
            except (InputError, Preempted):
                if latest and processes.count == 1:  # of several, the others are in the next step already
                    told = told or conclude(*latest)
                    if log is not None:
                        log.sync()
                    if _sound(latest[1]):
                        checkpoints.save_last(latest[0], program.kept(state), told)
                raise
            meter.waited(waited)
            state, metrics = run_step(state, own.place(batch))
            profiler.after(step, metrics)
            progress.advance(step)
            if latest and told is None:
                conclude(*latest)  # a step late: the device already runs the next
            latest, told = (step, metrics), None

            last = step == config.training.steps
            measured = last or step % config.evaluation.every == 0
            asked, failed = vote.any(preemption.requested(), checkpoints.failed)
            saved = checkpoints.due(step, failed) or postponed
            stop = asked and not last
            if not (measured or saved or stop):
                continue
            told = conclude(step, metrics, state if measured else None)
            postponed = saved and not _sound(metrics)
            if log is not None:
                log.sync()
            if last or (stop and _sound(metrics)):
                checkpoints.save_last(step, program.kept(state), told)
            elif saved and not postponed:
                checkpoints.save(step, program.kept(state), told)
                meter.restart(step)
            if stop:
                raise Preempted(step)
        if log is not None:
            log.close()


def _sound(metrics: Metrics) -> bool:
    """Whether a step's parameters may take the place of older ones in a checkpoint: of a step that was skipped they may
    be what made its loss not finite."""
    return not int(metrics["skipped_in_a_row"]) and not int(metrics["overflow"])


def _finite(value: jax.Array) -> Any:
    """None, which JSON has, for what is not finite: a skipped step's loss. Of a vector a list."""
    if value.ndim:
        return [_finite(each) for each in jax.device_get(value)]
    return float(value) if math.isfinite(value) else None


def _check_skips(step: int, metrics: Metrics, config: TrainConfig, progress: ProgressLine) -> None:
    """Reports a skipped step. Raises TrainingDiverged at training.skip_limit of them in a row, and where overflows have
    brought the loss scale below precision.min_loss_scale."""
    if _sound(metrics):
        return
    told = f"loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm'])}"
    mend = (
        f"{config.run.directory} keeps the checkpoints before them; try a lower --optimizer.learning-rate or a longer "
        "--schedule.warmup-steps"
    )
    if int(metrics["overflow"]):
        scale = float(metrics["loss_scale"])
        told += f", loss scale now {scale:g}"
        if scale < config.precision.min_loss_scale:
            raise TrainingDiverged(
                f"step {step}: {told}, below precision.min_loss_scale={config.precision.min_loss_scale:g}: overflows "
                f"that no scale prevents; {mend}, or --precision.compute-dtype bfloat16"
            )
    elif (in_a_row := int(metrics["skipped_in_a_row"])) >= config.training.skip_limit:
        skipped = f"{in_a_row} steps in a row were skipped; " if in_a_row > 1 else ""
        raise TrainingDiverged(f"step {step}: {told}; {skipped}{mend}")
    progress.say(f"step {step:>6}  skipped: {told}")


def _check_finite(directory: Path, step: int, **values: float) -> None:
    if not all(map(math.isfinite, values.values())):
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
        raise TrainingDiverged(
            f"step {step}: {told}; {directory} keeps the checkpoints before it; try a lower "
            "--optimizer.learning-rate or a longer --schedule.warmup-steps"
        )


def _check_directory(directory: Path, config: TrainConfig, corpus: Corpus) -> None:
    """Raises InputError where the run directory holds a run that this one does not continue."""
    if config.model.pretrained and directory.absolute() == Path(config.model.pretrained):
        raise InputError(
            f"model.pretrained={config.model.pretrained} is run.directory, which a run cannot begin from: choose "
            "another --run.directory, or give what this run began with to continue it"
        )
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
        fixed = any(change.split()[0] in configuration.CHECKPOINT_IS_SHAPED_BY for change in found)
        allow = "" if fixed else ", or allow the change of a field with --run.allow-change NAME"
        raise InputError(f"{directory} is another run: {'; '.join(found)}; choose another --run.directory{allow}")
    if (run.base_digest(directory) is None) != run.keeps_frozen(config):
        raise InputError(
            f"{directory} began from {'a' if run.keeps_frozen(config) else 'no'} Hugging Face folder: name as "
            "model.pretrained what it began from"
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


def _record(directory: Path, config: TrainConfig, corpus: Corpus, tokenizer: Tokenizer, began_from: str | None) -> None:
    """Makes the run directory this configuration's, before there is a checkpoint that says whose it is."""
    told = {
        "name": corpus.name,
        "summary": str(corpus),
        "sha256": corpus.sha256,
        "tokenizer_sha256": tokenizer.sha256,
        "base_sha256": began_from,
    }
    replace_durably(directory / "corpus.json", json.dumps(told))
    replace_durably(directory / "config.json", configuration.to_json(config))


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != PRINT_CONFIG]
    config: TrainConfig = configuration.parse(arguments, "python -m jaxopt_llm.train")
    validate(config)
    if PRINT_CONFIG in sys.argv[1:]:
        print(configuration.to_json(config))
        return 0
    job = launchers.find(config.distributed, os.environ)
    distributed.check_divides(config.mesh.devices, job)
    runtime.start(config.mesh.devices, job.processes, cache=not config.run.deterministic)
    directory = Path(config.run.directory)
    with (
        distributed.joined(job, config.distributed, configuration.shared(config)) as processes,
        sole_owner(directory) if processes.first else contextlib.nullcontext(),
        Preemption() as preemption,
    ):
        train(config, preemption, processes)
    return 0


if __name__ == "__main__":
    errors.run(main)
