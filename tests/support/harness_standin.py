"""The part of the package lm_eval that `evaluate --tasks` uses, as small as it can be.

The package with all that it needs takes 280 MB, so that the tests do not install it. test_harness_lm_eval.py runs the
same model in the package itself where it is installed.
"""

import fnmatch
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


@dataclass(frozen=True)
class Instance:
    args: tuple[Any, ...]


class TemplateLM:
    def loglikelihood(self: Any, requests: list[Instance]) -> Any:
        found = []
        for context, continuation in (request.args for request in requests):
            if context:
                kept = context.rstrip()
                both, own = self.tok_encode(context + continuation), self.tok_encode(kept)
                found.append(((context, continuation), own, both[len(own) :]))
            else:
                ids = self.tok_encode(continuation, add_special_tokens=False)
                found.append(((context, continuation), [self.prefix_token_id], ids))
        return self._loglikelihood_tokens(found)


def normalize_gen_kwargs(settings: dict[str, Any], tokens: int) -> dict[str, Any]:
    found = {"do_sample": settings.get("temperature", 0.0) > 0, "temperature": 0.0, "max_gen_toks": tokens, **settings}
    until = found.get("until", [])
    return found | {"until": until if isinstance(until, list) else [until]}


def get_rolling_token_windows(
    ids: list[int], prefix: int, size: int, context_len: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield inputs and targets. All windows but the first end with their targets and have `size` inputs."""
    assert context_len == 1
    stream = [prefix, *ids]
    for begin in range(0, len(ids), size):
        end = min(begin + size, len(ids))
        yield stream[0 if begin == 0 else end - size : end], ids[begin:end]


def make_disjoint_window(window: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    inputs, targets = window
    return inputs[: len(inputs) - len(targets) + 1], targets


TASKS = {
    "choose": ("loglikelihood", [("one two", " three"), ("", "four"), ("a" * 99, " b")], False),
    "write": ("generate_until", [("one two", {"until": ["\n"], "max_gen_toks": 4})], False),
    "write_code": ("generate_until", [("def", {"until": "\n", "max_gen_toks": 4})], True),
    "measure": ("loglikelihood", [("one two", " three"), ("four", " five six")], False),
    "write_beams": ("generate_until", [("def", {"num_beams": 4})], False),
}


class TaskManager:
    def __init__(self, include_path: Any = None) -> None:
        self.all_tasks = sorted(TASKS)

    def match_tasks(self, patterns: list[str]) -> list[str]:
        return [name for name in self.all_tasks if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]

    def load(self, names: list[str]) -> dict[str, Any]:
        tasks = {name: SimpleNamespace(UNSAFE_CODE=TASKS[name][2]) for name in names}
        return {"tasks": tasks, "groups": {}, "group_map": {}}


def simple_evaluate(model: Any, tasks: list[str], task_manager: TaskManager, **options: Any) -> dict[str, Any]:
    print("the harness says something")
    results = {}
    for name in task_manager.load(tasks)["tasks"]:
        kind, requests, _ = TASKS[name]
        answers = getattr(model, kind)([Instance(each) for each in requests])
        value = np.float64(sum(each[0] for each in answers)) if name == "measure" else len(answers)
        results[name] = {"alias": name, "answers,none": value, "answers_stderr,none": 0.25}
    shots = dict.fromkeys(tasks, options["num_fewshot"] or 0)
    return {"results": results, "n-shot": shots, "group_subtasks": {name: [] for name in tasks}, "versions": {}}


def make_table(results: dict[str, Any], column: str) -> str:
    return "".join(f"|{name}|{values['answers,none']}|\n" for name, values in results[column].items())


def make_modules() -> dict[str, ModuleType]:
    """Return the modules of the package by name."""
    exported = {
        "lm_eval": (simple_evaluate,),
        "lm_eval.api": (),
        "lm_eval.api.instance": (Instance,),
        "lm_eval.api.model": (TemplateLM,),
        "lm_eval.models": (),
        "lm_eval.models.utils": (normalize_gen_kwargs,),
        "lm_eval.tasks": (TaskManager,),
        "lm_eval.utils": (get_rolling_token_windows, make_disjoint_window, make_table),
    }
    modules = {}
    for name, members in exported.items():
        modules[name] = ModuleType(name)
        for member in members:
            setattr(modules[name], member.__name__, member)
    modules["lm_eval.utils"].__dict__["handle_non_serializable"] = str
    return modules


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package be this module, until the end of the test."""
    for name, module in make_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    forget(monkeypatch)


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package be missing, until the end of the test."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next import of harness.py read it again, and the one after the test too."""
    from jaxopt_llm import inference

    name = f"{inference.__name__}.harness"
    monkeypatch.setitem(sys.modules, name, None)  # so that what the test imports is dropped at its end
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(inference, "harness", None, raising=False)
    monkeypatch.delattr(inference, "harness")
