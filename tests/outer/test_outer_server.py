"""The outer server and its clients in one process, against DiLoCo in NumPy."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outer_groups import LAYOUT, MOMENTUM, PATIENCE, RATE, TOKEN, Group, Running, begin, draw, serve_quickly, together

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.outer import client, store
from jaxopt_llm.outer.client import ServerBusy, ServerLost
from jaxopt_llm.outer.server import OuterServer


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with serve_quickly(tmp_path) as start:
        yield start


def step_by_hand(masters: np.ndarray, momentum: np.ndarray, owns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    change = np.mean([masters - own for own in owns], axis=0)
    momentum = MOMENTUM * momentum + change
    return masters - RATE * (change + MOMENTUM * momentum), momentum


@pytest.mark.core
@pytest.mark.parametrize(("form", "tolerance"), [("exact", 1e-6), ("int8", 0.02), ("int4", 0.3)])
def test_rounds_are_those_of_diloco_and_all_groups_have_the_same_bits(
    form: str, tolerance: float, run: Callable[..., Running]
) -> None:
    running = run(3)
    groups = begin(running, form=form)
    masters, momentum = draw(1000), np.zeros(LAYOUT.size)
    for number in range(1, 4):
        for group in groups:
            group.train()
        masters, momentum = step_by_hand(masters, momentum, [group.own for group in groups])
        answers = together(groups)
        assert not any(answer.whole for answer in answers)
        assert [answer.base.round for answer in answers] == [number] * 3
        for group in groups:
            np.testing.assert_array_equal(group.own, groups[0].own)
        np.testing.assert_allclose(groups[0].own, masters, rtol=0, atol=tolerance)
        if form != "exact":
            assert np.abs(groups[0].own - masters).max() > 1e-6
    saved = store.load(running.directory, 0)
    assert saved is not None and (saved.state.round, saved.state.step) == (3, 9)
    np.testing.assert_array_equal(saved.state.masters, groups[0].own)
    sent = LAYOUT.count_bytes(form) * 6
    for number, line in enumerate(running.rounds(), 1):
        assert (line["round"], line["step"], line["bytes"]) == (number, 3 * number, sent)
        assert (line["contributed"], line["late"], line["absent"]) == ([0, 1, 2], [], [])


def test_a_round_does_not_wait_for_a_group_that_is_gone(run: Callable[..., Running]) -> None:
    running = run(2)
    stays, goes = begin(running)
    stays.train()
    goes.client.stop()
    clock = time.monotonic()
    answer = stays.exchange()
    assert not answer.whole and time.monotonic() - clock < PATIENCE / 2
    (line,) = running.rounds()
    assert (line["contributed"], line["late"], line["absent"]) == ([0], [], [1])
    masters, _ = step_by_hand(draw(1000), np.zeros(LAYOUT.size), [draw(1000) - 0.1 * draw(300)])
    np.testing.assert_allclose(answer.base.vector, masters, rtol=0, atol=1e-6)


def test_a_group_that_comes_back_takes_the_masters_and_the_step(run: Callable[..., Running]) -> None:
    running = run(2)
    stays, goes = begin(running)
    goes.client.stop()
    stays.train(30)
    stays.exchange()
    again = Group(running, 1)
    answer = again.exchange()
    assert answer.whole and (answer.base.round, answer.base.step) == (1, 30)
    np.testing.assert_array_equal(answer.base.vector, stays.own)
    stays.train()
    again.train()
    assert [each.base.round for each in together([stays, again])] == [2, 2]
    assert running.rounds()[-1]["contributed"] == [0, 1]


def test_a_change_that_is_one_round_late_counts_in_the_next_one(run: Callable[..., Running]) -> None:
    running = run(2, wait=0.2)
    fast, slow = begin(running)
    masters, momentum = draw(1000), np.zeros(LAYOUT.size)
    fast.train()
    slow.train()
    late = draw(1000) - slow.own
    masters, momentum = step_by_hand(masters, momentum, [fast.own])
    fast.exchange()
    assert running.rounds()[0]["late"] == [1]
    answer = slow.exchange()
    assert answer.whole and answer.counted and answer.base.round == 1
    np.testing.assert_allclose(slow.own, masters, rtol=0, atol=1e-6)
    fast.train()
    masters, momentum = step_by_hand(masters, momentum, [fast.own, masters - late])
    fast.exchange()
    np.testing.assert_allclose(fast.own, masters, rtol=0, atol=1e-5)
    assert (running.rounds()[1]["contributed"], running.rounds()[1]["counted_late"]) == ([0], [1])


def test_an_older_change_does_not_count(run: Callable[..., Running]) -> None:
    running = run(2, wait=0.2)
    fast, slow = begin(running)
    slow.train()
    for _ in range(2):
        fast.train()
        fast.exchange()
    answer = slow.exchange()
    assert answer.whole and not answer.counted and answer.base.round == 2
    np.testing.assert_array_equal(answer.base.vector, fast.own)
    fast.train()
    fast.exchange()
    assert running.rounds()[2]["counted_late"] == []


def test_two_rounds_wait_in_vain_for_a_group_that_is_silent_and_no_further_one(run: Callable[..., Running]) -> None:
    running = run(2, wait=1.0)
    fast, silent = begin(running)
    seconds = []
    for _ in range(4):
        fast.train()
        clock = time.monotonic()
        fast.exchange()
        seconds.append(time.monotonic() - clock)
    assert min(seconds[:2]) >= 1.0 > max(seconds[2:])
    assert [line["late"] for line in running.rounds()] == [[silent.index]] * 4
    silent.exchange()  # it takes the masters, and is in time once: then it is waited for again
    silent.train()
    fast.train()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(silent.exchange)
        while not running.server._lanes[0].rounds._fresh:
            time.sleep(0.01)
        fast.exchange()
        assert not answer.result().whole
    fast.train()
    clock = time.monotonic()
    fast.exchange()
    assert time.monotonic() - clock >= 1.0


def test_a_change_whose_answer_was_lost_does_not_count_twice(run: Callable[..., Running]) -> None:
    running = run(2)
    groups = begin(running)
    before = groups[0].base
    for group in groups:
        group.train()
    together(groups)
    groups[0].base = before  # as if the answer had not come
    groups[0].train()
    answer = groups[0].exchange()
    assert answer.whole and not answer.counted
    np.testing.assert_array_equal(answer.base.vector, groups[1].own)


def test_a_change_that_is_not_finite_is_left_out(run: Callable[..., Running]) -> None:
    running = run(2)
    good, bad = begin(running)
    good.train()
    bad.train()
    bad.own[3] = np.nan
    masters, _ = step_by_hand(draw(1000), np.zeros(LAYOUT.size), [good.own])
    first, second = together([good, bad])
    assert not first.whole and second.whole
    np.testing.assert_allclose(good.own, masters, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(good.own, bad.own)
    assert running.rounds()[0]["not_finite"] == [1]


def test_a_server_that_starts_again_goes_on_with_masters_and_momentum(run: Callable[..., Running]) -> None:
    running = run(2)
    groups = begin(running)
    masters, momentum = draw(1000), np.zeros(LAYOUT.size)
    for number in range(4):
        for group in groups:
            group.train()
        if number == 2:
            running.stop()
            with pytest.raises(ServerLost):
                groups[0].exchange()
            with pytest.raises(ServerLost):
                groups[1].exchange()
            running.start()
            continue  # the next change covers both rounds
        masters, momentum = step_by_hand(masters, momentum, [group.own for group in groups])
        assert not any(answer.whole for answer in together(groups))
        np.testing.assert_allclose(groups[0].own, masters, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(groups[0].own, groups[1].own)
    assert [(line["round"], line["step"]) for line in running.rounds()] == [(1, 3), (2, 6), (3, 12)]


def test_a_server_without_masters_gets_those_of_a_group_that_has_some(run: Callable[..., Running]) -> None:
    running = run(2)
    groups = begin(running)
    for group in groups:
        group.train()
    together(groups)
    outer = groups[0].own
    running.stop()
    store.path_of(running.directory, 0).unlink()
    running.start()
    for group in groups:
        group.train()
    masters, _ = step_by_hand(outer, np.zeros(LAYOUT.size), [group.own for group in groups])
    together(groups)
    np.testing.assert_allclose(groups[1].own, masters, rtol=0, atol=1e-6)


@pytest.mark.parametrize("damage", ["byte", "end", "line"])
def test_a_damaged_file_is_told(damage: str, run: Callable[..., Running]) -> None:
    running = run(1)
    begin(running)
    running.stop()
    path = store.path_of(running.directory, 0)
    content = bytearray(path.read_bytes())
    if damage == "byte":
        content[-5] ^= 1
    path.write_bytes({"byte": content, "end": content[:-1], "line": b"{]\n" + content}[damage])
    with pytest.raises(InputError, match=r"process-0\.masters: it is damaged"):
        OuterServer(socket.socket(), running.directory, 1, 1.0, TOKEN)
    path.unlink()
    running.start()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"groups": 3}, "groups.count is 3 here, and the outer server has --groups 2: make them equal"),
        ({"settings": {"run.seed": 1}}, "the same settings, mesh and data: run.seed is 1 here and None in the other"),
        ({"settings": {"run.seed": 1}, "segments": [[7, 0]], "hash": 3}, "data: run.seed is 1 here and None in the"),
        ({"segments": [[7, 0]]}, "have other pieces: use the model, the mesh"),
        ({"form": "int8"}, "form is int8 here and exact in the other groups; to change"),
        ({"token": b"other"}, "another token; give both the same file, with groups.token_file and --token-file"),
        ({"token": b""}, "this group has no token; give both the same file, with groups.token_file and --token-file"),
        ({"process": -1}, "a process out of range"),
        ({"form": []}, "no settings of an outer step"),
    ],
)
def test_a_group_that_does_not_fit_is_refused(options: dict[str, Any], says: str, run: Callable[..., Running]) -> None:
    running = run(2)
    first = Group(running, 0)
    first.exchange()
    with pytest.raises(InputError) as refused:
        running.client(1, **options).exchange(None, 0, draw(1000))
    assert says in str(refused.value) and "\n" not in str(refused.value)
    Group(running, 1).exchange()


@pytest.mark.parametrize("starts_again", [True, False])
def test_settings_are_those_of_the_masters_while_no_group_is_there(
    starts_again: bool, run: Callable[..., Running]
) -> None:
    """A group with a wrong setting that comes first does not take the masters from the right ones."""
    running = run(2)
    right = [Group(running, index, settings={"model.layers": 6}) for index in range(2)]
    for group in right:
        group.exchange()
        group.train()
    together(right)
    for group in right:
        group.client.stop()
    if starts_again:
        running.stop()
        running.start()
    wrong = running.client(0, settings={"model.layers": 4})
    while running.server._lanes and running.server._lanes[0].rounds.connected:
        time.sleep(0.01)
    with pytest.raises(InputError) as refused:
        wrong.exchange(None, 0, draw(1))
    assert "model.layers is 4 here and 6 in the other groups; to change the settings" in str(refused.value)
    assert str(refused.value).endswith("of all groups, start the outer server with --new-settings")
    again = Group(running, 0, settings={"model.layers": 6})
    assert again.exchange().base.round == 1


def test_new_settings_are_those_of_the_first_group_and_are_kept(
    run: Callable[..., Running], capfd: pytest.CaptureFixture[str]
) -> None:
    running = run(1)
    old, new = {"run.seed": 1}, {"run.seed": 2}
    (group,) = begin(running, settings=old)
    group.client.stop()
    running.stop()
    running.new_settings = True
    running.start()
    group = Group(running, 0, settings=new)
    assert group.exchange().whole
    group.train()
    group.exchange()
    group.client.stop()
    running.stop()
    running.new_settings = False
    capfd.readouterr()
    running.start()
    assert "continues from round 1, step 3\n" in capfd.readouterr().err
    with pytest.raises(InputError, match="run.seed is 1 here and 2 in the other groups"):
        running.client(0, settings=old).exchange(None, 0, draw(1))
    assert Group(running, 0, settings=new).exchange().base.round == 1


def test_two_groups_with_one_index_are_told(run: Callable[..., Running]) -> None:
    running = run(2)
    groups = begin(running)
    says = "another process uses --groups.index 1: give each group its own, or end that process"
    with pytest.raises(InputError, match=says):
        Group(running, 1).exchange()
    groups[1].client.stop()


def test_a_group_that_starts_waits_until_the_connection_of_the_lost_one_has_ended(run: Callable[..., Running]) -> None:
    """Later it does not: it trains meanwhile."""
    running = run(2)
    lost = begin(running)[1]
    again = Group(running, 1)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(again.exchange)
        time.sleep(1.3 * client.CONNECT_SECONDS)
        lost.client.stop()
        assert answer.result().whole
    again.client._close()
    lost = Group(running, 1)
    lost.exchange()
    clock = time.monotonic()
    with pytest.raises(ServerBusy, match="group 1 is there already: give each group its own --groups.index"):
        again.exchange()
    assert time.monotonic() - clock < client.BUSY_SECONDS


def test_a_server_that_goes_on_from_older_masters_takes_no_change_of_newer_ones(run: Callable[..., Running]) -> None:
    running = run(2)
    groups = begin(running)
    older = store.path_of(running.directory, 0).read_bytes()
    groups[0].train()
    groups[1].train()
    together(groups)
    running.stop()
    store.path_of(running.directory, 0).write_bytes(older)
    running.start()
    groups[1].client.stop()
    again = Group(running, 1)
    again.exchange()
    again.train()
    with ThreadPoolExecutor() as pool:  # the round 1 of the older masters, with another group
        closed = pool.submit(again.exchange)
        answer = groups[0].exchange()
        assert answer.whole and not answer.counted and answer.base.round in (0, 1)
        groups[0].exchange()
        assert not closed.result().whole
    np.testing.assert_array_equal(groups[0].own, again.own)
