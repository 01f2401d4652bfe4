"""Functions that reward answers: what they are given, and how a run ends that cannot reward."""

import re
import time
from pathlib import Path

import pytest

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.run.rewards import Rewards

FUNCTIONS = """
import os, time
def length(prompts, completions, **columns):
    print("this goes to the screen")
    return [len(text) for text in completions]
def is_right(completions, answer, **columns):
    return [None if a is None else text == a for text, a in zip(completions, answer)]
def too_few(completions, **columns):
    return [1.0]
def not_finite(completions, **columns):
    return [float("nan")] * len(completions)
def std(completions, **columns):
    return [0.0] * len(completions)
def none(completions, **columns):
    return [None] * len(completions)
def text(completions, **columns):
    return completions
def broken(completions, **columns):
    return [len(text) / 0 for text in completions]
def hangs(completions, **columns):
    time.sleep(60)
def dies(completions, **columns):
    os._exit(7)
"""
PROMPTS, ANSWERS = ["1+1=", "1+2="], ["2", "44"]


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def test_functions_get_prompts_answers_and_columns(functions: Path) -> None:
    rewards = Rewards([f"{functions}:length", f"{functions}:is_right"], 20)
    assert rewards.names == ["length", "is_right"]
    for last in ("3", None):  # the process stays for the next step
        found = rewards.compute(PROMPTS, ANSWERS, answer=["2", last], self=["a", "b"])
        assert found == {"length": [1.0, 2.0], "is_right": [1.0, last and 0.0]}
    rewards.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "too_few returned 1 rewards for 2 answers$"),
        ("not_finite", "not_finite returned a reward that is not finite: nan$"),
        ("none", "no function rewards the answer to .1.1=.$"),
        ("text", "text returned no list of numbers"),
        ("broken", r"failed: \S+mine.py, line 19: ZeroDivisionError: division by zero$"),
        ("hangs", "took longer than 0.5 s; make them faster, or set a larger --rollouts.reward-seconds$"),
        ("dies", r"ended their process \(exit code 7\)$"),
    ],
)
def test_a_reward_that_cannot_be_computed_ends_the_run(functions: Path, name: str, message: str) -> None:
    """No such answer has reward 0 instead."""
    rewards = Rewards([f"{functions}:{name}"], 0.5 if name == "hangs" else 20)
    clock = time.monotonic()
    with pytest.raises(InputError) as raised:
        rewards.compute(PROMPTS, ["a", "b"] if name == "text" else ANSWERS)
    assert re.search(message, str(raised.value)), raised.value
    assert "\n" not in str(raised.value) and time.monotonic() - clock < 15
    assert rewards._process.poll() is not None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent.py:is_right", "absent.py:is_right: no such file .*absent.py; the form is FILE:FUNCTION$"),
        ("{}:absent", "the file defines no function absent$"),
        ("{}:length {}:length", "another function has the same name; rename the function$"),
        ("{}:std", "std: a metric of all rewards has the same name; rename the function$"),
    ],
)
def test_functions_that_do_not_exist_are_refused_at_the_start(functions: Path, function: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Rewards(function.format(functions, functions).split(), 20)
