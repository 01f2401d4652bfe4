"""Command `outer_server`: its arguments."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxopt_llm import outer_server
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.outer import server


def make_run(folder: Path) -> Path:
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "config.json").touch()
    return folder / "run"


def make_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def call(monkeypatch: pytest.MonkeyPatch, directory: Path, listen: str, *more: str) -> None:
    monkeypatch.setattr(sys, "argv", ["", "--listen", listen, "--directory", str(directory), *more])
    outer_server.main()


@pytest.mark.parametrize(
    ("make", "listen", "says"),
    [
        (make_file, "127.0.0.1:7000", "file is a file; give a directory"),
        (make_run, "127.0.0.1:7000", "run holds a run; give the outer server a directory of its own"),
        (lambda folder: folder, "127.0.0.1:70000", "--listen 127.0.0.1:70000: the port must be 1 to 65535"),
        (lambda folder: folder, "127.0.0.1:0", "--listen 127.0.0.1:0: the port must be 1 to 65535"),
        (lambda folder: folder, "here", "--listen here: must be host:port"),
    ],
)
def test_wrong_arguments_are_one_line(
    make: Callable[[Path], Path], listen: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError) as refused:
        call(monkeypatch, make(tmp_path), listen, "--groups", "2")
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("groups", "says"), [("1", "for 1 group\n"), ("2", "for 2 groups\n")])
def test_a_server_says_for_how_many_groups_it_listens_and_takes_new_settings(
    groups: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    open_listener = server.open_listener
    monkeypatch.setattr(server, "open_listener", lambda _: open_listener(("127.0.0.1", 0)))
    served: list[bool] = []
    monkeypatch.setattr(server.OuterServer, "serve", lambda self, _: served.append(self._new_settings))
    call(monkeypatch, tmp_path / "new", "127.0.0.1:7000", "--groups", groups, "--new-settings")
    assert served == [True] and says in capfd.readouterr().err
