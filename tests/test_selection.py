"""Which tests run: by default, with --slow, with a share of the slow ones, and with --quick."""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
import selection
from selection import ROOT

HEAVY = "tests/bytes/test_bytes.py"  # a file with slow tests and others


def collected(*options: str) -> list[str]:
    """Node ids that pytest would run."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


class Item:
    """As much of a test as its selection looks at."""

    def __init__(self, path: str, number: int) -> None:
        self.path, self.nodeid = ROOT / path, f"{path}::{number}"

    def get_closest_marker(self, name: str) -> None:
        return None


def slow_tests(*paths: str, each: int) -> list[Any]:
    return [Item(path, number) for path in paths for number in range(each)]


def names(items: list[Any]) -> list[str]:
    return sorted(item.nodeid for item in items)


def test_each_slow_test_is_in_one_share() -> None:
    """Eight commits after each other run all of them, wherever the changed files are and whatever tests are added."""
    slow = slow_tests(HEAVY, each=400)
    shares: list[Any] = [selection.share_of(slow, part, 8, ())[0] for part in range(8)]
    assert names([each for share in shares for each in share]) == names(slow)
    assert {30 < len(share) < 70 for share in shares} == {True}
    fewer, _ = selection.share_of(slow[1:], 0, 8, ())
    assert names(fewer) == [each for each in names(shares[0]) if each != slow[0].nodeid]


@pytest.mark.parametrize("changed", [HEAVY, "jaxopt_llm/model/moe/experts.py"])
def test_a_change_brings_the_slow_tests_of_its_files(changed: str) -> None:
    touched = slow_tests(HEAVY if changed == HEAVY else "tests/model/moe/test_experts_router_hf_torch.py", each=8)
    others = slow_tests("tests/test_plan.py", each=592)
    share, left = selection.share_of(touched + others, 0, 16, [ROOT / changed])
    own, _ = selection.share_of(touched + others, 0, 16, ())
    assert set(names(share)) == {*names(own), *names(touched)} and not left


def test_a_change_of_everything_brings_one_in_48() -> None:
    slow = slow_tests(HEAVY, "tests/test_plan.py", each=240)
    own, _ = selection.share_of(slow, 0, 8, ())
    share, left = selection.share_of(slow, 0, 8, [ROOT / HEAVY, ROOT / "tests/test_plan.py"])
    assert len(share) == len(own) + 10 and names(share + left) == names(slow)
    assert {each.path for each in share} == {each.path for each in slow} == {each.path for each in left}


def test_expensive_tests_exist(request: pytest.FixtureRequest) -> None:
    """A test that was renamed runs with the fast ones until it is measured again."""
    collected_now = request.config.stash[conftest.COLLECTED]
    files = {each.partition("::")[0] for each in collected_now}
    expected = {each for each in selection.read_expensive() if each.partition("::")[0] in files}
    named = [each for each in request.config.args if "::" in each]
    assert named or not expected - collected_now


@pytest.mark.parametrize("name", sorted(selection.NEVER_SLOW))
def test_what_is_never_slow_is_in_each_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _, function = name.partition("::")
    monkeypatch.syspath_prepend((ROOT / file).parent)
    marks = getattr(getattr(importlib.import_module(Path(file).stem), function), "pytestmark", [])
    assert "slow" not in [mark.name for mark in marks] and name not in selection.read_expensive()


def test_measured_tests_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "EXPENSIVE", tmp_path / "expensive.txt")
    never_slow = dict.fromkeys(selection.NEVER_SLOW, 60.0)
    selection.write_expensive({"tests/a.py::test[x y]": 1.5, "tests/a.py::test[z]": 0.9, **never_slow})
    assert selection.read_expensive() == {"tests/a.py::test[x y]"}


@pytest.mark.slow
def test_options_select() -> None:
    """One command for each option, on one file."""
    normal, slow = collected(HEAVY), collected(HEAVY, "--slow")
    assert normal and slow and not set(normal) & set(slow)
    one = slow[0]
    assert collected(one) == [one], "a test that is named runs, whatever its mark"
    with_share = collected(HEAVY, "--slow-share", "0/8")
    assert set(normal) < set(with_share) and set(with_share) - set(normal) <= set(slow)


def collection(config: Any, items: list[Any]) -> list[str]:
    """Node ids that run, in their order."""
    conftest.pytest_collection_modifyitems(config, items)
    return [item.nodeid for item in items]


def test_quick_runs_the_nearest_first_and_none_that_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    far, near, own = "tests/planning/test_links.py", "tests/data/rows/test_loader.py", "tests/data/rows/test_packing.py"
    items = slow_tests(far, near, own, each=1)
    option = SimpleNamespace(slow=False, slow_share=None, measure=False, quick=True, gpu_tests_on_cpu=False)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config = SimpleNamespace(args=["tests"], option=option, hook=hook, stash=pytest.Stash())
    monkeypatch.setattr(selection, "changed_files", lambda: [ROOT / "jaxopt_llm/data/rows/packing.py"])
    assert collection(config, items) == [f"{own}::0", f"{near}::0"]
    assert f"{far}::0" in config.stash[conftest.COLLECTED]
    option.quick = False
    assert len(collection(config, slow_tests(far, near, own, each=1))) == 3


def test_quick_starts_no_test_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    item: Any = SimpleNamespace(config=SimpleNamespace(option=SimpleNamespace(quick=True)))
    monkeypatch.setattr(conftest, "STARTED", time.monotonic())
    conftest.pytest_runtest_setup(item)
    monkeypatch.setattr(conftest, "STARTED", time.monotonic() - selection.QUICK_SECONDS)
    with pytest.raises(pytest.skip.Exception, match="has run for its time"):
        conftest.pytest_runtest_setup(item)
    item.config.option.quick = False
    conftest.pytest_runtest_setup(item)


def test_the_summary_counts_skips_by_reason_and_names_the_command_for_a_failure() -> None:
    lines: list[str] = []
    skipped = [SimpleNamespace(longrepr=("file", 1, f"Skipped: {reason}")) for reason in ("a", "b", "b")]
    stats = {"skipped": skipped, "failed": [SimpleNamespace(nodeid="tests/test_a.py::test_b[x y]")]}
    reporter: Any = SimpleNamespace(
        stats=stats, write_line=lines.append, section=lines.append, config=SimpleNamespace(stash=pytest.Stash())
    )
    conftest.pytest_terminal_summary(reporter)
    told = "\n".join(lines)
    assert "    2  b\n    1  a" in told and "scripts/test --numprocesses 0 'tests/test_a.py::test_b[x y]'" in told


def test_tests_are_ordered_by_their_distance_from_a_change() -> None:
    names = ("tests/data/rows/test_packing.py", "tests/data/rows/test_loader.py", "tests/planning/test_links.py")
    paths = [ROOT / name for name in names]
    found = selection.distances(paths, [ROOT / "jaxopt_llm/data/rows/packing.py"])
    own, near, unrelated = (found[path] for path in paths)
    assert own == 0 < near < unrelated


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("jaxopt_llm/train.py", "tests/runs/test_death.py"),  # a command, which tests start and do not import
        ("jaxopt_llm/distributed/rendezvous.py", "tests/runs/test_processes.py"),  # in a program that is a string
        ("jaxopt_llm/kernels/attention_measured.json", "tests/kernels/test_attention_auto.py"),
        ("tests/mutants/model.toml", "tests/test_mutants.py"),
        ("tests/conftest.py", "tests/planning/test_links.py"),
        ("tests/support/remembered.py", "tests/planning/test_links.py"),
        ("scripts/local-processes", "tests/runs/test_processes.py"),
    ],
)
def test_a_change_is_near_to_what_runs_or_reads_it(changed: str, test: str) -> None:
    assert selection.distances([ROOT / test], [ROOT / changed])[ROOT / test] <= 2


def test_a_script_is_not_near_to_tests_that_have_its_name_as_a_word() -> None:
    tests = list((ROOT / "tests").rglob("test_*.py"))
    found = selection.distances(tests, [ROOT / "scripts/test"])
    assert [path for path in tests if found[path] < selection.FAR] != [] and list(found.values()).count(1) < 9


@pytest.mark.parametrize("test", ["benchmarks/test_experts_benchmark.py", "test_recipes.py"])
def test_a_changed_recipe_brings_the_tests_that_name_it_or_its_folder(test: str) -> None:
    path = ROOT / "tests" / test
    assert selection.distances([path], [ROOT / "configs/mixtral_8x7b.py"]) == {path: 1}


def test_a_change_that_nothing_imports_is_far(tmp_path: Path) -> None:
    test = ROOT / "tests/planning/test_links.py"
    assert selection.distances([test], [tmp_path / "other.py"]) == {test: selection.FAR}


@pytest.mark.parametrize(
    ("test", "modules"),
    [
        ("tests/kernels/test_attention_xla.py", {"attention", "attention_xla"}),
        ("tests/model/moe/test_experts_router_hf_torch.py", {"experts"}),
        ("tests/test_matrix.py", set()),
    ],
)
def test_a_test_is_named_after_a_module(test: str, modules: set[str]) -> None:
    assert {path.stem for path in selection.tested_by_name(ROOT / test)} == modules


def test_changed_files_are_those_of_the_tree_or_of_the_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*command: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *author, *command], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(selection, "ROOT", tmp_path)
    git("init")
    for name in ("first.py", "second.py"):
        (tmp_path / name).touch()
        git("add", name)
        git("commit", "-m", name)
    assert selection.changed_files() == [tmp_path / "second.py"]
    (tmp_path / "first.py").write_text("changed")
    (tmp_path / "third.py").touch()
    assert selection.changed_files() == [tmp_path / "first.py", tmp_path / "third.py"]
