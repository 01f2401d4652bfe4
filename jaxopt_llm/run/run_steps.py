"""The steps of a run, one after the other: what `train` and an engine's `fit` do with a `Loop`."""

from jaxopt_llm.core.errors import Preempted
from jaxopt_llm.observe.preemption import Preemption
from jaxopt_llm.run.loop import Loop
from jaxopt_llm.run.records import Records
from jaxopt_llm.run.workload import Workload


def train_workload(workload: Workload, records: Records, preemption: Preemption) -> None:
    """Train from the step that the records say to `training.steps`.

    Raises:
        OutOfMemory: the memory of the devices does not suffice.
        Preempted: a signal to any process asked for a stop before the last step. It is raised after the current step
            and its checkpoint; a skipped step has no checkpoint.
    """
    start, config = records.start, workload.config
    with Loop(workload, records, preemption) as loop:
        with workload.explain_oom(lambda: f"bringing the state of step {start} onto the devices"):
            loop.restore(start)
        try:
            if not records.end:
                loop.hold(start)
                loop.start(start)
                # Metrics are read one step late, and JAX reports a failed allocation only then.
                with workload.explain_oom(lambda: f"in step {loop.current} or the one before"):
                    run_steps(loop, start, config.training.steps, config.evaluation.every)
                records.progress.end()
                path = records.checkpoints.directory / str(loop.current)
                records.progress.say(f"the checkpoint of step {loop.current} is {path}")
        finally:
            workload.keep(loop.release_state(), records.checkpoints.identity)


def run_steps(loop: Loop, start: int, steps: int, evaluate_every: int) -> None:
    """Run the steps after `start`, up to `steps` or to the end that `evaluation.patience` sets.

    evaluate_every: steps between two evaluations; 0 for none.

    Raises:
        Preempted: a process was told to stop; the state of the step is saved.
    """
    step = start
    while True:
        step += 1
        loop.step(step)
        last = step == steps
        stop, checkpoint_due = loop.poll(step)
        evaluates = evaluate_every > 0 and (last or step % evaluate_every == 0)
        exits = last or stop
        if evaluates or checkpoint_due or exits:
            loop.record(evaluates)
        if (back := loop.roll_back()) is not None:
            step = back
            continue
        if evaluates and not last and loop.ends_early(step):
            last = exits = True
        if evaluates or checkpoint_due or exits:
            loop.save(checkpoint_due, exits, last)
        if last:
            return
        if stop:
            raise Preempted(step)
        loop.replicate(step)
