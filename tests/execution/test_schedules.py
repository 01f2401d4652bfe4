"""The tables of a pipeline's schedules: number of ticks, buffers, and the results of running them."""

import numpy as np
import pytest

from jaxopt_llm.config import PipelineConfig, Schedule
from jaxopt_llm.execution.schedules import Table, make_forward_table, make_table, tabulate

pytestmark = pytest.mark.core

Case = tuple[Schedule, int, int, int]  # S stages, M microbatches, V chunks of a stage

SIZES = [
    (1, 3),
    (2, 1),
    (2, 2),
    (2, 7),
    (3, 2),
    (4, 1),
    (4, 3),
    (4, 4),
    (4, 6),
    (4, 7),
    (4, 8),
    (4, 40),
    (7, 5),
    (8, 24),
]
# The schedules whose numbers of ticks, buffers and phases have a formula below.
WITH_FORMULAS: list[Case] = [
    *(("gpipe", stages, microbatches, 1) for stages, microbatches in SIZES),
    *(("1f1b", stages, microbatches, 1) for stages, microbatches in SIZES),
    *(("interleaved", stages, microbatches, chunks) for stages, microbatches in SIZES for chunks in (2, 3)),
]
CASES: list[Case] = [*WITH_FORMULAS]
every_case, every_formula = (
    pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(map(str, case)))
    for cases in (CASES, WITH_FORMULAS)
)


@pytest.mark.parametrize("schedule", [*dict.fromkeys(case[0] for case in CASES)])
def test_the_setting_permits_the_chunks_of_the_cases(schedule: Schedule) -> None:
    """A schedule with several chunks of a stage is named in config.parallel.WITH_CHUNKS."""
    for name, _, _, chunks in CASES:
        assert name != schedule or PipelineConfig(schedule, chunks).problems() == []


def forward_ticks(stages: int, microbatches: int, chunks: int) -> int:
    """Return V·M + S - 1 if S divides M.

    Otherwise the last round takes as long as a full one, except for its last chunk.
    """
    full_rounds, rest = divmod(microbatches - 1, stages)
    return chunks * stages * full_rounds + (chunks - 1) * stages + rest + stages


def live_inputs(table: Table) -> int:
    """Return the most chunks of a stage that are between their forward and their backward at the end of a tick."""
    most = 0
    for stage in range(table.stages):
        begun = np.cumsum(table.forward.microbatch[:, stage] >= 0)
        ended = np.cumsum(table.backward.microbatch[:, stage] >= 0)
        most = max(most, int(np.max(begun - ended)))
    return most


def run(table: Table, weights: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run the model x -> tanh(w x), w along `weights` [V·S], on `inputs` [M], by stages.

    A stage reads only the table and what its neighbours send. All stages run and send in every tick, even without
    work: a value that nobody wrote is NaN. Returns the outputs [M], and the gradients of their sum by weights and by
    inputs.
    """
    stages, last = table.stages, len(weights) - 1
    activations, gradients = np.full(stages, np.nan), np.full(stages, np.nan)  # from the neighbours
    waiting = np.full((stages, table.buffers), np.nan)
    outputs, by_weight, by_input = np.full(len(inputs), np.nan), np.zeros(len(weights)), np.full(len(inputs), np.nan)
    for tick in range(len(table.forward.active)):
        sent, sent_back = np.full(stages, np.nan), np.full(stages, np.nan)
        for stage in range(stages):
            microbatch, chunk, buffer = (
                each[tick, stage] for each in (table.backward.microbatch, table.backward.chunk, table.backward.buffer)
            )
            number = chunk * stages + stage
            if microbatch >= 0:
                x = waiting[stage, buffer]
                inner = (1.0 if number == last else gradients[stage]) * (1 - np.tanh(weights[number] * x) ** 2)
                by_weight[number] += inner * x
                sent_back[stage] = inner * weights[number]
                if number == 0:
                    by_input[microbatch] = sent_back[stage]
        for stage in range(stages):
            microbatch, chunk, buffer = (
                each[tick, stage] for each in (table.forward.microbatch, table.forward.chunk, table.forward.buffer)
            )
            number = chunk * stages + stage
            if table.forward.active[tick]:
                waiting[stage, buffer] = np.nan  # what a stage without work writes
            if microbatch >= 0:
                waiting[stage, buffer] = inputs[microbatch] if number == 0 else activations[stage]
                sent[stage] = np.tanh(weights[number] * waiting[stage, buffer])
                if number == last:
                    outputs[microbatch] = sent[stage]
        activations, gradients = np.roll(sent, 1), np.roll(sent_back, -1)
    return outputs, by_weight, by_input


def expected(weights: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the results of `run` computed without stages."""
    x = [inputs]
    for weight in weights:
        x.append(np.tanh(weight * x[-1]))
    gradient, by_weight = np.ones_like(inputs), np.zeros_like(weights)
    for number in reversed(range(len(weights))):
        inner = gradient * (1 - x[number + 1] ** 2)
        by_weight[number] = np.sum(inner * x[number])
        gradient = inner * weights[number]
    return x[-1], by_weight, gradient


@every_case
def test_stages_that_follow_the_table_compute_the_model_and_its_gradients(case: Case) -> None:
    _, stages, microbatches, chunks = case
    random = np.random.default_rng(0)
    weights, inputs = random.uniform(0.5, 1.5, stages * chunks), random.normal(size=microbatches)
    for found, right in zip(run(make_table(*case), weights, inputs), expected(weights, inputs), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-12)


@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_one_buffer_less_is_too_few(schedule: Schedule, chunks: int) -> None:
    table = make_table(schedule, 4, 8, chunks)
    for half in (table.forward, table.backward):
        half.buffer[:] %= table.buffers - 1
    weights, inputs = np.linspace(0.5, 1.5, 4 * chunks), np.linspace(-1, 1, 8)
    assert not np.allclose(run(table, weights, inputs)[1], expected(weights, inputs)[1])


@every_case
def test_the_program_has_three_loops_at_most(case: Case) -> None:
    """For each phase there is a loop: warm-up, steady state, cool-down, for any number of microbatches."""
    _, stages, _, _ = case
    assert stages == 1 or len(make_table(*case).phases) <= 3


@every_case
def test_each_chunk_runs_once_for_each_microbatch_in_each_direction(case: Case) -> None:
    _, stages, microbatches, chunks = case
    table = make_table(*case)
    assert (table.stages, table.chunks) == (stages, chunks)
    for half in (table.forward, table.backward):
        assert np.sum(half.microbatch >= 0) == stages * chunks * microbatches
        for stage in range(stages):
            for chunk in range(chunks):
                ran = half.microbatches_of(stage, chunk)
                assert ran[ran >= 0].tolist() == list(range(microbatches)), "in order, so that rounding is the same"


@every_case
def test_each_microbatch_is_once_at_each_end_of_the_model(case: Case) -> None:
    """There all stages work together, in ticks that are the same for all."""
    _, stages, microbatches, chunks = case
    ends = make_table(*case).ends
    tick_of = [[int(np.flatnonzero(end == microbatch)[0]) for microbatch in range(microbatches)] for end in ends]
    assert [int(np.sum(end >= 0)) for end in ends] == [microbatches] * 4
    embed, loss, loss_backward, embed_backward = np.array(tick_of)
    assert set(loss - embed) == set(embed_backward - loss_backward) == {stages * chunks - 1}
    assert np.all(loss_backward >= loss)


@every_formula
def test_the_number_of_ticks_is_the_formulas(case: Case) -> None:
    schedule, stages, microbatches, chunks = case
    table = make_table(*case)
    one_way = forward_ticks(stages, microbatches, chunks)
    if chunks == 1 or microbatches % stages == 0:
        assert one_way == chunks * microbatches + stages - 1
    assert np.sum(table.forward.active) == np.sum(table.backward.active) == one_way
    before_backward = one_way if schedule == "gpipe" else chunks * stages
    assert len(table.forward.active) == len(table.backward.active) == before_backward + one_way
    assert not np.any(table.forward.active[one_way:]) and not np.any(table.backward.active[:before_backward])


@every_formula
def test_the_idle_share_is_the_formulas(case: Case) -> None:
    _, stages, microbatches, chunks = case
    busy = chunks * microbatches
    assert make_table(*case).idle_share == pytest.approx(1 - busy / forward_ticks(stages, microbatches, chunks))
    if microbatches % stages == 0:
        assert make_table(*case).idle_share == pytest.approx((stages - 1) / (busy + stages - 1))


@every_formula
def test_the_number_of_buffers_is_the_formulas(case: Case) -> None:
    """Check also that few microbatches need one more, which a stage writes while it has no work."""
    schedule, stages, microbatches, chunks = case
    round_size = min(microbatches, stages)
    waiting = microbatches if schedule == "gpipe" else (chunks - 1) * round_size + min(microbatches, 2 * stages - 1)
    table = make_table(*case)
    assert live_inputs(table) == waiting
    spare = stages > 1 and (schedule == "gpipe" or microbatches < 2 * stages - 1)
    assert table.buffers in {waiting, waiting + spare}
    if schedule == "interleaved":
        assert waiting <= (chunks + 1) * stages - 1


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_buffers_do_not_grow_with_the_microbatches(schedule: Schedule, chunks: int) -> None:
    assert {make_table(schedule, 4, microbatches, chunks).buffers for microbatches in (7, 8, 64)} == {4 * chunks + 3}


@every_formula
def test_phases_are_consecutive_ticks_that_are_alike(case: Case) -> None:
    """The executor makes a loop of each phase: they are few for any number of microbatches."""
    schedule, _, microbatches, _ = case
    table = make_table(*case)
    phases = table.phases
    assert [tick for phase in phases for tick in phase] == list(range(len(table.forward.active)))
    kinds = [
        {(bool(table.forward.active[tick]), bool(table.backward.active[tick])) for tick in phase} for phase in phases
    ]
    both = [] if schedule == "gpipe" or microbatches == 1 else [{(True, True)}]
    assert kinds == [{(True, False)}, *both, {(False, True)}]


@pytest.mark.parametrize("stages, microbatches, chunks", [(4, 8, 1), (4, 6, 2), (3, 1, 3)])
def test_a_forward_table_needs_no_buffers(stages: int, microbatches: int, chunks: int) -> None:
    alone, whole = make_forward_table(stages, microbatches, chunks), make_table("gpipe", stages, microbatches, chunks)
    count = forward_ticks(stages, microbatches, chunks)
    assert alone.buffers == 0 and not np.any(alone.backward.active) and alone.phases == [range(count)]
    np.testing.assert_array_equal(alone.forward.microbatch, whole.forward.microbatch[:count])
    np.testing.assert_array_equal(alone.forward.chunk, whole.forward.chunk[:count])
    assert alone.idle_share == pytest.approx(1 - chunks * microbatches / count)


def ticks(rows: list[list[list[int]]]) -> np.ndarray:
    return np.array(rows)


# Two stages of one chunk, two microbatches: int [V, S, M].
FORWARD, BACKWARD = ticks([[[0, 1], [1, 2]]]), ticks([[[3, 4], [2, 3]]])


REFUSED = {
    "late": (ticks([[[0, 1], [1, 3]]]), BACKWARD + 2, "does not run one tick after"),
    "early": (ticks([[[0, 1], [0, 1]]]), BACKWARD, "does not run one tick after"),
    "late backward": (FORWARD, ticks([[[4, 4], [2, 3]]]), "does not run one tick after"),
    "backward in the forward's order": (FORWARD, FORWARD + 3, "does not run one tick after"),
    "two microbatches in a tick": (ticks([[[0, 0], [1, 1]]]), BACKWARD + 1, "microbatches in order"),
    "backwards in reverse": (FORWARD, ticks([[[4, 3], [3, 2]]]), "microbatches in order"),
    "two chunks in a tick": (ticks([[[0, 2], [1, 3]], [[2, 4], [3, 5]]]), FORWARD, "two chunks in a tick"),
    "backward first": (FORWARD + 1, BACKWARD, "after its forward"),
    "before the first tick": (FORWARD - 1, BACKWARD, "before the first tick"),
}


@pytest.mark.parametrize("forward, backward, message", REFUSED.values(), ids=REFUSED)
def test_impossible_schedules_are_refused(forward: np.ndarray, backward: np.ndarray, message: str) -> None:
    assert tabulate(FORWARD, BACKWARD).stages == 2
    with pytest.raises(AssertionError, match=message):
        tabulate(forward, backward)


@pytest.mark.parametrize(
    "config, message",
    [
        (PipelineConfig(), []),
        (PipelineConfig("gpipe", split=(2, 3)), []),
        (PipelineConfig("interleaved", 2), []),
        (PipelineConfig("interleaved"), ["pipeline.virtual_stages=1", "set --pipeline.virtual-stages to at least 2"]),
        (
            PipelineConfig("1f1b", 2),
            ["pipeline.virtual_stages=2", "--pipeline.schedule interleaved, or --pipeline.virtual-stages 1"],
        ),
        (PipelineConfig("gpipe", 0), ["pipeline.virtual_stages=0: must be at least 1"]),
        (PipelineConfig(split=(4, 0)), ["pipeline.split=(4, 0)", "at least 1 layer"]),
    ],
)
def test_settings_that_contradict_each_other(config: PipelineConfig, message: list[str]) -> None:
    problems = config.problems()
    assert len(problems) == bool(message)
    assert all(each in problems[0] for each in message)
