"""The pages of docs/ as the site shows them."""

import itertools
import re
import shlex
from typing import get_args

import pytest
from commands import ROOT
from guides import WIDTH

from jaxopt_llm import plan
from jaxopt_llm.config import cli
from jaxopt_llm.config.training import Objective
from jaxopt_llm.step.validation import validate

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
# Their blocks are lines of the package, which have up to 120 columns: tests/test_extending.py applies them.
QUOTE_THE_PACKAGE = ("docs/extending.md", "docs/extending_kernels.md")


def wide_lines(text: str) -> list[str]:
    """Return the lines of blocks of code, fenced or indented, that a page cuts off."""
    found, fenced, in_list, in_code, before = [], False, False, False, ""
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            if re.match(r"\s*([-*]|\d+\.) ", line):
                in_list = True
            elif line and not line.startswith(" "):
                in_list = False
            in_code = line.startswith("    ") and not in_list and (in_code or not before.strip())
        if len(line) > WIDTH and (in_code or fenced):
            found.append(line)
        before = line
    return found


def test_code_fits_the_column_of_the_page() -> None:
    wide = {page: wide_lines((ROOT / page).read_text()) for page in PAGES if page not in QUOTE_THE_PACKAGE}
    assert {page: lines for page, lines in wide.items() if lines} == {}


def test_which_lines_are_code() -> None:
    wide = "x" * (WIDTH + 1)
    assert wide_lines(f"```text\n{wide}\n```\n") == [wide]
    assert wide_lines(f"Text\n\n    {wide}\n") == [f"    {wide}"]
    assert not wide_lines(f"{wide}\n\n- a list\n\n    {wide}\n")


PLANS = [
    command
    for page in PAGES
    for command in re.findall(r"(?:jaxopt-llm |jaxopt_llm\.)plan (.*)", (ROOT / page).read_text().replace("\\\n", " "))
    if (recipe := re.search(r"--config (\S+\.py)", command)) and (ROOT / "configs" / recipe[1]).is_file()
]


@pytest.mark.parametrize("command", PLANS)
def test_every_plan_of_a_page_has_settings_that_go_together(command: str) -> None:
    words = shlex.split(command, comments=True)
    typed = itertools.takewhile(lambda word: word != "..." and word[0] not in "[`>", words)
    _, arguments = plan.make_parser().parse_known_args([*typed])
    validate(cli.parse_recipe(arguments, plan.PROGRAM).config)


def test_every_objective_has_a_line_and_a_test() -> None:
    lines = re.findall(r"^\| `(\w+)` .*\| `(tests/\S+)` \|$", (ROOT / "docs/objectives.md").read_text(), re.MULTILINE)
    assert [name for name, _ in lines] == [*get_args(Objective)]
    assert all((ROOT / file).is_file() for _, file in lines)


def test_every_page_is_in_the_sidebar_and_fine_tuning_on_several_gpus_is_first() -> None:
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(named) == len(set(named)) and set(named) == pages
    assert named[:2] == ["index.md", "guides/several_gpus.md"]
