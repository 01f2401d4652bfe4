"""Which tests run: by default, with --slow, with a share of the slow ones, and with --quick."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import selection
from selection import ROOT

HEAVY = "tests/test_bytes.py"  # a file with slow tests and others


def collected(*options: str) -> list[str]:
    """Node ids that pytest would run."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_each_slow_test_is_in_one_share() -> None:
    """Eight commits after each other run all of them, wherever the changed files are."""
    slow = [SimpleNamespace(path=ROOT / HEAVY, name=number) for number in range(21)]
    shares: list[Any] = [selection.share_of(slow, part, 8, ()) for part in range(8)]  # type: ignore[arg-type]
    assert sorted(each.name for share in shares for each in share) == list(range(21))
    assert {len(share) for share in shares} == {2, 3}


@pytest.mark.parametrize("changed", [HEAVY, "jaxopt_llm/model/router.py"])
def test_a_change_brings_the_slow_tests_of_its_files(changed: str) -> None:
    paths = (ROOT / HEAVY, ROOT / "tests/model/test_router_hf_torch.py", ROOT / "tests/test_plan.py")
    slow: list[Any] = [SimpleNamespace(path=path) for path in paths for _ in range(8)]
    touched = ROOT / HEAVY if changed == HEAVY else ROOT / "tests/model/test_router_hf_torch.py"
    share = selection.share_of(slow, 0, 8, [ROOT / changed])
    assert [each.path for each in share].count(touched) == 8 and len(share) == 10


def test_options_select() -> None:
    """One command for each option, on one file."""
    normal, slow = collected(HEAVY), collected(HEAVY, "--slow")
    assert normal and slow and not set(normal) & set(slow)
    one = slow[0]
    assert collected(one) == [one], "a test that is named runs, whatever its mark"
    with_share = collected(HEAVY, "--slow-share", "0/8")
    assert set(normal) < set(with_share) and set(with_share) - set(normal) <= set(slow)


def test_tests_are_ordered_by_their_distance_from_a_change() -> None:
    names = ("tests/data/test_packing.py", "tests/data/test_loader.py", "tests/parallel/test_links.py")
    paths = [ROOT / name for name in names]
    found = selection.distances(paths, [ROOT / "jaxopt_llm/data/packing.py"])
    own, near, unrelated = (found[path] for path in paths)
    assert own == 0 < near < unrelated


@pytest.mark.parametrize("test", ["test_experts_benchmark.py", "test_recipes.py"])
def test_a_changed_recipe_brings_the_tests_that_name_it_or_its_folder(test: str) -> None:
    path = ROOT / "tests" / test
    assert selection.distances([path], [ROOT / "configs/mixtral_8x7b.py"]) == {path: 1}


def test_a_change_that_nothing_imports_is_far(tmp_path: Path) -> None:
    test = ROOT / "tests/parallel/test_links.py"
    assert selection.distances([test], [tmp_path / "other.py"]) == {test: selection.FAR}


@pytest.mark.parametrize(
    ("test", "modules"),
    [
        ("tests/kernels/test_attention_xla.py", {"attention", "attention_xla"}),
        ("tests/model/test_router_hf_torch.py", {"router"}),
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
