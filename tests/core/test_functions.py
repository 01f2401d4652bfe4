"""Functions that settings name: what of their files belongs to them."""

from pathlib import Path

import pytest

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.functions import hash_sources

FILE = """
from helpers import clean
TABLE = {"a": 1}
if True:
    def shorten(text):
        return clean(text)

def reward(completions, **columns):
    return [float(TABLE.get(shorten(text), 0)) for text in completions]  # zero

def other(completions, **columns):
    return [0.0 for _ in completions]

def get_config():
    return Config(run=RunConfig(seed=0))
"""


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("# zero", "# nought", False),
        ("seed=0", "seed=1", False),
        ("0)) for", "1)) for", True),
        ('"a": 1', '"a": 2', True),
        ("clean(text)", "clean(text)[:3]", True),
        ("import clean", "import tidy as clean", True),
    ],
)
def test_a_function_belongs_to_its_file(tmp_path: Path, old: str, new: str, changes: bool) -> None:
    assert FILE.count(old) == 1
    file, moved = tmp_path / "mine.py", tmp_path / "moved.py"
    file.write_text(FILE)
    moved.write_text(FILE.replace(old, new))
    assert (hash_sources([f"{moved}:reward"]) != hash_sources([f"{file}:reward"])) is changes


def test_the_order_and_the_names_belong_to_several_functions(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    found = [[f"{file}:{name}" for name in names.split()] for names in ("reward other", "other reward", "reward")]
    assert len({hash_sources(each) for each in found}) == 3


@pytest.mark.parametrize(
    ("content", "message"), [("def (", "mine.py, line 1: SyntaxError"), (None, "there is no file")]
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, content: str | None, message: str) -> None:
    if content:
        (tmp_path / "mine.py").write_text(content)
    with pytest.raises(InputError, match=message):
        hash_sources([f"{tmp_path / 'mine.py'}:reward"])
