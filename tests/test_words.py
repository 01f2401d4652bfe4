"""The first words of docstrings: a verb or a noun phrase, never a fragment."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "jaxopt_llm"
FRAGMENTS = ("Of", "That", "What", "Whether", "Which", "Where", "How", "Those", "Its")


def fragments(source: str) -> list[str]:
    """The docstrings of a module that begin as a fragment, by line."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {
        getattr(node, "lineno", 1): ast.get_docstring(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, nodes)
    }
    return [f"line {line}: {text}" for line, text in texts.items() if text and text.split()[0] in FRAGMENTS]


def test_no_docstring_begins_as_a_fragment() -> None:
    found = {str(path.relative_to(PACKAGE)): fragments(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path: texts for path, texts in found.items() if texts} == {}


def test_what_is_a_fragment() -> None:
    assert fragments('def f():\n    """Of their sum."""') == ["line 1: Of their sum."]
    assert fragments('def f():\n    """Sum of them."""') == []
