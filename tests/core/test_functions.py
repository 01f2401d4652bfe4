"""Functions that settings name: what of their files belongs to them."""

from pathlib import Path

import pytest

from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.functions import hash_sources

FILE = """
import math
from helpers import clean
LIMIT: float = 3
TABLE = {}
TABLE["a"] = 1
TABLE.update(b=2)
STEPS = 100

def shorten(text):
    return clean(text)[:LIMIT]

def cached(function):
    return function

def listed(function):
    TABLE[function.__name__] = function
    return function

@listed
def shortest(text):
    return min(text.split())

@cached
def reward(completions, **columns):
    return [float(TABLE.get(shorten(text), 0)) for text in completions]  # zero

@cached
def other(completions, **columns):
    return [math.pi * STEPS for _ in completions]
"""


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("# zero", "# nought", False),
        ("STEPS = 100", "STEPS = 200", False),
        ("math.pi", "math.e", False),
        ("import math", "import math, os", False),
        ("0)) for", "1)) for", True),
        ("LIMIT: float = 3", "LIMIT: float = 4", True),
        ("[:LIMIT]", "[LIMIT:]", True),
        ('TABLE["a"] = 1', 'TABLE["a"] = 2', True),
        ("b=2", "b=3", True),
        ("import clean", "import tidy as clean", True),
        ("@cached\ndef reward", "def reward", True),
        ("min(text", "max(text", True),
        ("return function\n\ndef listed", "return lambda *each: function(*each)\n\ndef listed", True),
        ("import math", "from helpers import *", True),
    ],
)
def test_a_function_is_what_it_uses_of_its_file(tmp_path: Path, old: str, new: str, changes: bool) -> None:
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
