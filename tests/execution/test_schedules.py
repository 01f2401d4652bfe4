"""The tables of a pipeline's schedules: their lengths, what waits in them, and that running one is right."""

import numpy as np
import pytest

from jaxopt_llm.execution.schedules import (
    PipelineConfig,
    Schedule,
    Table,
    forward_table,
    make_table,
    tabulate,
)

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
CASES: list[Case] = [
    *(("gpipe", stages, microbatches, 1) for stages, microbatches in SIZES),
    *(("1f1b", stages, microbatches, 1) for stages, microbatches in SIZES),
    *(("interleaved", stages, microbatches, chunks) for stages, microbatches in SIZES for chunks in (2, 3)),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))


def forward_ticks(stages: int, microbatches: int, chunks: int) -> int:
    """V·M + S - 1 where S divides M; else the last turn takes as long as a whole one, but for its last chunk."""
    whole_turns, rest = divmod(microbatches - 1, stages)
    return chunks * stages * whole_turns + (chunks - 1) * stages + rest + stages


def live_inputs(table: Table) -> int:
    """The most chunks of a stage that are between the beginning of their forward and the end of their backward."""
    most = 0
    for stage in range(table.stages):
        begun = np.cumsum(table.forward.microbatch[:, stage] >= 0)
        ended = np.cumsum(table.backward.microbatch[:, stage] >= 0)
        most = max(most, int(np.max(begun - np.concatenate([[0], ended[:-1]]))))
    return most


def run(table: Table, weights: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The model x -> tanh(w x), w along `weights` [V·S], on `inputs` [M], as stages would run it that know the table
    and their neighbours alone. Gives its outputs [M], and of their sum the gradients by weights and by inputs.

    All stages run in every tick, and send what they have, also where it is of no use: what nobody wrote is NaN.
    """
    stages, last = table.stages, len(weights) - 1
    activations, gradients = np.full(stages, np.nan), np.full(stages, np.nan)  # from the neighbours
    waiting = np.full((stages, table.slots), np.nan)
    outputs, by_weight, by_input = np.full(len(inputs), np.nan), np.zeros(len(weights)), np.full(len(inputs), np.nan)
    for tick in range(len(table.forward.runs)):
        sent, sent_back = np.full(stages, np.nan), np.full(stages, np.nan)
        for stage in range(stages):
            microbatch, chunk, slot = (
                each[tick, stage] for each in (table.forward.microbatch, table.forward.chunk, table.forward.slot)
            )
            number = chunk * stages + stage
            if microbatch >= 0:
                waiting[stage, slot] = inputs[microbatch] if number == 0 else activations[stage]
                sent[stage] = np.tanh(weights[number] * waiting[stage, slot])
                if number == last:
                    outputs[microbatch] = sent[stage]
        for stage in range(stages):
            microbatch, chunk, slot = (
                each[tick, stage] for each in (table.backward.microbatch, table.backward.chunk, table.backward.slot)
            )
            number = chunk * stages + stage
            if microbatch >= 0:
                x = waiting[stage, slot]
                inner = (1.0 if number == last else gradients[stage]) * (1 - np.tanh(weights[number] * x) ** 2)
                by_weight[number] += inner * x
                sent_back[stage] = inner * weights[number]
                if number == 0:
                    by_input[microbatch] = sent_back[stage]
        activations, gradients = np.roll(sent, 1), np.roll(sent_back, -1)
    return outputs, by_weight, by_input


def expected(weights: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `run` gives, without stages."""
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
def test_a_place_less_is_too_few(schedule: Schedule, chunks: int) -> None:
    table = make_table(schedule, 4, 8, chunks)
    for half in (table.forward, table.backward):
        half.slot[:] %= table.slots - 1
    weights, inputs = np.linspace(0.5, 1.5, 4 * chunks), np.linspace(-1, 1, 8)
    assert not np.allclose(run(table, weights, inputs)[1], expected(weights, inputs)[1])


@every_case
def test_each_stage_runs_each_of_its_chunks_once_for_each_microbatch_each_way(case: Case) -> None:
    _, stages, microbatches, chunks = case
    table = make_table(*case)
    assert (table.stages, table.chunks) == (stages, chunks)
    for half in (table.forward, table.backward):
        assert np.sum(half.microbatch >= 0) == stages * chunks * microbatches
        for stage in range(stages):
            for chunk in range(chunks):
                ran = half.of(stage, chunk)
                assert ran[ran >= 0].tolist() == list(range(microbatches)), "in their order, which fixes rounding"


@every_case
def test_each_microbatch_is_once_at_each_end_of_the_model(case: Case) -> None:
    """There all stages work together, in ticks that one array says for all."""
    _, stages, microbatches, chunks = case
    ends = make_table(*case).ends
    ticks = [[int(np.flatnonzero(end == microbatch)[0]) for microbatch in range(microbatches)] for end in ends]
    assert [int(np.sum(end >= 0)) for end in ends] == [microbatches] * 4
    enters, leaves, turns, through = np.array(ticks)
    assert set(leaves - enters) == set(through - turns) == {stages * chunks - 1}
    assert np.all(turns >= leaves)


@every_case
def test_its_length_is_the_formulas(case: Case) -> None:
    schedule, stages, microbatches, chunks = case
    table = make_table(*case)
    one_way = forward_ticks(stages, microbatches, chunks)
    if chunks == 1 or microbatches % stages == 0:
        assert one_way == chunks * microbatches + stages - 1
    assert np.sum(table.forward.runs) == np.sum(table.backward.runs) == one_way
    before_backward = one_way if schedule == "gpipe" else chunks * stages - 1
    assert len(table.forward.runs) == len(table.backward.runs) == before_backward + one_way
    assert not np.any(table.forward.runs[one_way:]) and not np.any(table.backward.runs[:before_backward])


@every_case
def test_its_idle_share_is_the_formulas(case: Case) -> None:
    _, stages, microbatches, chunks = case
    busy = chunks * microbatches
    assert make_table(*case).idle == pytest.approx(1 - busy / forward_ticks(stages, microbatches, chunks))
    if microbatches % stages == 0:
        assert make_table(*case).idle == pytest.approx((stages - 1) / (busy + stages - 1))


@every_case
def test_what_waits_is_the_formulas_and_no_place_is_spare(case: Case) -> None:
    schedule, stages, microbatches, chunks = case
    turn = min(microbatches, stages)
    waiting = microbatches if schedule == "gpipe" else (chunks - 1) * turn + min(microbatches, 2 * stages - 1)
    table = make_table(*case)
    assert table.slots == live_inputs(table) == waiting
    if schedule == "interleaved":
        assert waiting <= (chunks + 1) * stages - 1


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_what_waits_does_not_grow_with_the_microbatches(schedule: Schedule, chunks: int) -> None:
    assert {make_table(schedule, 4, microbatches, chunks).slots for microbatches in (7, 8, 64)} == {4 * chunks + 3}


@every_case
def test_its_phases_are_runs_of_like_ticks(case: Case) -> None:
    """What an executor makes a loop each of: few, whatever the microbatches."""
    schedule, stages, _, chunks = case
    table = make_table(*case)
    phases = table.phases
    assert [tick for phase in phases for tick in phase] == list(range(len(table.forward.runs)))
    kinds = [{(bool(table.forward.runs[tick]), bool(table.backward.runs[tick])) for tick in phase} for phase in phases]
    if schedule == "gpipe":
        assert kinds == [{(True, False)}, {(False, True)}]
    elif stages == chunks == 1:
        assert kinds == [{(True, True)}]
    else:
        assert kinds == [{(True, False)}, {(True, True)}, {(False, True)}]


@pytest.mark.parametrize("stages, microbatches, chunks", [(4, 8, 1), (4, 6, 2), (3, 1, 3)])
def test_forward_alone_keeps_nothing(stages: int, microbatches: int, chunks: int) -> None:
    alone, whole = forward_table(stages, microbatches, chunks), make_table("gpipe", stages, microbatches, chunks)
    ticks = forward_ticks(stages, microbatches, chunks)
    assert alone.slots == 0 and not np.any(alone.backward.runs) and alone.phases == [range(ticks)]
    np.testing.assert_array_equal(alone.forward.microbatch, whole.forward.microbatch[:ticks])
    np.testing.assert_array_equal(alone.forward.chunk, whole.forward.chunk[:ticks])
    assert alone.idle == pytest.approx(1 - chunks * microbatches / ticks)


def ticks_of(rows: list[list[list[int]]]) -> np.ndarray:
    return np.array(rows)


# Two stages of one chunk, two microbatches: int [V, S, M].
FORWARD, BACKWARD = ticks_of([[[0, 1], [1, 2]]]), ticks_of([[[2, 3], [1, 2]]])


REFUSED = {
    "late": (ticks_of([[[0, 1], [1, 3]]]), BACKWARD + 2, "does not follow"),
    "early": (ticks_of([[[0, 1], [0, 1]]]), BACKWARD, "does not follow"),
    "late backward": (FORWARD, ticks_of([[[3, 3], [1, 2]]]), "does not follow"),
    "backward in the forward's order": (FORWARD, FORWARD + 3, "does not follow"),
    "two microbatches in a tick": (ticks_of([[[0, 0], [1, 1]]]), BACKWARD + 1, "two chunks in a tick"),
    "two chunks in a tick": (ticks_of([[[0, 2], [1, 3]], [[2, 4], [3, 5]]]), FORWARD, "two chunks in a tick"),
    "backward first": (FORWARD + 1, BACKWARD, "before its forward"),
    "before the first tick": (FORWARD - 1, BACKWARD, "before the first tick"),
}


@pytest.mark.parametrize("forward, backward, said", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_run_is_no_table(forward: np.ndarray, backward: np.ndarray, said: str) -> None:
    assert tabulate(FORWARD, BACKWARD).slots == 2
    with pytest.raises(AssertionError, match=said):
        tabulate(forward, backward)


@pytest.mark.parametrize(
    "config, said",
    [
        (PipelineConfig(), []),
        (PipelineConfig("gpipe", split=(2, 3)), []),
        (PipelineConfig("interleaved", 2), []),
        (PipelineConfig("interleaved"), ["pipeline.virtual_stages=1", "set at least 2"]),
        (PipelineConfig("1f1b", 2), ["pipeline.virtual_stages=2", "--pipeline.schedule interleaved, or 1"]),
        (PipelineConfig("gpipe", 0), ["pipeline.virtual_stages=0", "or 1"]),
        (PipelineConfig(split=(4, 0)), ["pipeline.split=(4, 0)", "at least 1 layer"]),
    ],
)
def test_settings_that_contradict_each_other(config: PipelineConfig, said: list[str]) -> None:
    problems = config.problems()
    assert len(problems) == bool(said)
    assert all(each in problems[0] for each in said)
