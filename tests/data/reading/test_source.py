"""The default corpus: its contents, its split and its hash."""

import sysconfig
from pathlib import Path

import pytest

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.tokens.corpus import Corpus, open_corpus
from jaxopt_llm.data.tokens.tokenizer import ByteTokenizer


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the interpreter's standard library by a small one."""
    root = tmp_path / "python"
    for i in range(40):
        write(root / f"package{i % 4}" / f"module{i}.py", f"VALUE = {i}\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root) if name == "stdlib" else None)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read(held_out: float = 0.25) -> Corpus:
    return open_corpus(DataConfig(held_out=held_out), ByteTokenizer())


def splits(corpus: Corpus) -> tuple[list[str], list[str]]:
    """Return the names of the files of both splits, in order."""
    streams = (corpus.sources[0].training, corpus.held_out)
    return tuple(
        [s.describe_position(int(at)).removesuffix(", document 0") for at in s.document_starts(0, s.size)]
        for s in streams
    )


def names(corpus: Corpus) -> tuple[set[str], set[str]]:
    training, held_out = splits(corpus)
    return set(training), set(held_out)


def test_the_interpreter_carries_a_corpus_of_useful_size() -> None:
    corpus = read(0.05)
    sizes = [stream.size for stream in (corpus.sources[0].training, corpus.held_out)]
    assert sizes[0] > 5_000_000
    assert 0.01 < sizes[1] / sum(sizes) < 0.15
    training, held_out = names(corpus)
    assert "inspect.py" in training | held_out
    assert not any(part in {"test", "tests", "site-packages"} for n in training | held_out for part in n.split("/"))


def test_splits_are_disjoint_complete_and_sorted(library: Path) -> None:
    corpus = read()
    training, held_out = names(corpus)
    assert training and held_out and not training & held_out
    assert training | held_out == {p.relative_to(library).as_posix() for p in library.rglob("*.py")}
    assert all(split == sorted(split) for split in splits(corpus))
    for stream, split in zip((corpus.sources[0].training, corpus.held_out), splits(corpus), strict=True):
        content = b"".join(b"\xff%s\xfe" % (library / name).read_bytes() for name in split)
        assert bytes(min(token, 511 - token) for token in stream.read(0, stream.size)) == content


def test_tests_packages_local_files_and_empty_files_are_left_out(library: Path) -> None:
    expected = read().sha256
    for name in (
        "site-packages/numpy/core.py",
        "dist-packages/apt.py",
        "test/test_os.py",
        "unittest/test/case.py",
        "lib2to3/tests/data/py3.py",
        "idlelib/idle_test/mock.py",
        "pydoc_data/topics.py",
        "config-3.12-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
        "LICENSE.txt",
        "__pycache__/os.pyc",
    ):
        write(library / name, "x = 1\n")
    write(library / "empty.py", "")
    assert read().sha256 == expected


def test_adding_a_file_moves_no_other(library: Path) -> None:
    training, held_out = names(read())
    for i in range(20):
        write(library / f"added{i}.py", "x = 1\n")
    more_training, more_held_out = names(read())
    assert training < more_training and held_out < more_held_out


def test_the_split_depends_on_the_path_alone(library: Path) -> None:
    before = names(read())
    for path in library.rglob("*.py"):
        path.write_text("changed")
    assert names(read()) == before


def test_the_split_of_known_paths_never_changes() -> None:
    training, held_out = names(read(0.05))
    assert {"traceback.py", "token.py", "xml/sax/xmlreader.py"} <= held_out
    assert {"inspect.py", "typing.py", "json/decoder.py"} <= training


def test_a_larger_share_only_adds_to_the_held_out_split(library: Path) -> None:
    held_out = [names(read(share))[1] for share in (0.1, 0.25, 0.5)]
    assert held_out[0] < held_out[1] < held_out[2]


def test_the_hash_covers_every_byte_of_both_splits_and_not_the_share(library: Path) -> None:
    original = read().sha256
    assert read(held_out=0.5).sha256 == original
    for split in splits(read()):
        for name in (split[0], split[-1]):
            content = (library / name).read_bytes()
            (library / name).write_bytes(content[:-1] + b" ")
            assert read().sha256 != original
            (library / name).write_bytes(content)
    assert read().sha256 == original


def test_the_hash_covers_names(library: Path) -> None:
    write(library / "aa.py", "x = 1\n")
    before = read().sha256
    (library / "aa.py").rename(library / "ab.py")
    assert read().sha256 != before


@pytest.mark.parametrize("joined", ["123", "12b.py3", "12b.py\0" + "3"])
def test_the_hash_sees_where_one_file_ends(library: Path, joined: str) -> None:
    write(library / "a.py", "12")
    write(library / "b.py", "3")
    apart = read().sha256
    write(library / "a.py", joined)
    (library / "b.py").unlink()
    assert read().sha256 != apart


def test_an_interpreter_without_sources_is_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python312.zip"))
    with pytest.raises(InputError, match="python312.zip"):
        read()


@pytest.mark.parametrize("held_out", [-0.1, 0.0, 1.0, float("nan")])
def test_a_share_outside_its_range_is_a_problem(held_out: float) -> None:
    (problem,) = DataConfig(held_out=held_out).problems()
    assert problem.startswith(f"data.held_out={held_out}")
    assert DataConfig().problems() == []
