"""Data files on remote file systems, and the cache that they are downloaded into."""

import fcntl
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from commands import assert_one_line, command, train
from fsspec.implementations.memory import MemoryFileSystem
from texts import write_jsonl, write_megatron, write_parquet, write_saved_dataset, write_text

from jaxopt_llm import prepare
from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading import storage
from jaxopt_llm.data.reading.files import find_corpus_files, find_files
from jaxopt_llm.data.tokens.corpus import Corpus, open_corpus
from jaxopt_llm.data.tokens.tokenizer import load_tokenizer
from jaxopt_llm.distributed import activity
from jaxopt_llm.distributed.activity import Activity

pytestmark = pytest.mark.core
DOCUMENTS = [f"document {number} " * (number % 7 + 1) for number in range(60)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAXOPT_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory(cache: Path) -> Iterator[MemoryFileSystem]:
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same documents in every format."""
    folder = tmp_path_factory.mktemp("corpus")
    write_text(folder / "text", DOCUMENTS[:20])
    (folder / "lines" / "more").mkdir(parents=True)
    write_jsonl(folder / "lines" / "a.jsonl", DOCUMENTS[:40])
    write_jsonl(folder / "lines" / "more" / "b.jsonl.gz", DOCUMENTS[40:])
    (folder / "lines" / ".hidden").mkdir()
    write_jsonl(folder / "lines" / ".hidden" / "c.jsonl", ["never read"])
    write_parquet(folder / "a.parquet", DOCUMENTS)
    for split in ("train", "test"):
        write_saved_dataset(folder / "saved" / split, [DOCUMENTS[:40], DOCUMENTS[40:]])
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    arrays = [np.frombuffer(f"{text}\0".encode(), np.uint8).astype(np.uint16) for text in DOCUMENTS]
    write_megatron(folder / "pair_document", arrays)
    np.save(folder / "a.npy", np.where(np.concatenate(arrays) == 0, 257, np.concatenate(arrays)))
    prepare.prepare(DataConfig((str(folder / "a.parquet"),), tokenizer="bytes"), folder / "prepared", 1)
    return folder


def open_paths(*paths: object, **settings: Any) -> Corpus:
    config = DataConfig(tuple(map(str, paths)), held_out=0.2, **settings)
    return open_corpus(config, load_tokenizer(config))


def tokens(corpus: Corpus) -> list[int]:
    streams = [*(source.training for source in corpus.sources), corpus.held_out]
    return [token for stream in streams if stream is not None for token in stream.read(0, stream.size).tolist()]


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name != "lock") if cache.exists() else []


PATHS = (
    *("text", "lines", "lines/**/*.jsonl*", "lines/a.jsonl", "a.parquet", "a.npy", "*.parquet"),
    *("pair_document", "pair_document.bin", "*.idx", "prepared", "prep*"),
    *("saved", "saved/test", "saved/train/data*.arrow"),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_remote_corpus_equals_the_local_one(
    protocol: str, path: str, corpus: Path, memory: MemoryFileSystem, capfd: pytest.CaptureFixture[str]
) -> None:
    local = open_paths(corpus / path)
    root = f"file://{corpus}"
    if protocol == "memory":
        root = "memory://bucket"
        memory.put(str(corpus), "/bucket", recursive=True)
    found = open_paths(f"{root}/{path}")
    assert (found.sha256, tokens(found)) == (local.sha256, tokens(local))
    assert found.name == f"{root}/{path}"
    assert "downloading" in capfd.readouterr().err
    again = open_paths(f"{root}/{path}")
    assert (again.sha256, capfd.readouterr().err) == (local.sha256, "")


def test_a_whole_folder_is_read_as_a_local_one(corpus: Path, memory: MemoryFileSystem) -> None:
    memory.put(str(corpus), "/bucket", recursive=True)
    config = DataConfig()
    found, local = find_files("memory://bucket", config), find_files(str(corpus), config)
    assert [(file.name, file.format) for file in found] == [(file.name, file.format) for file in local]


def test_what_is_downloaded_is_said(memory: MemoryFileSystem, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    memory.pipe({"/b/1.txt": b"x" * 1500, "/b/2.txt": b"y" * 1000, "/b/3.unknown": b"z" * 9000})
    open_paths("memory://b")
    assert capfd.readouterr().err == f"data.paths memory://b: downloading 2 files, 2.5 kB, into {cache}\n"


def test_a_changed_file_is_downloaded_again(memory: MemoryFileSystem) -> None:
    memory.pipe({"/b/1.txt": b"first", "/b/2.txt": b"other"})
    first = open_paths("memory://b/*.txt")
    memory.pipe("/b/1.txt", b"later")
    assert open_paths("memory://b/*.txt").sha256 != first.sha256


@pytest.mark.parametrize("failure", ["raises", "is cut off"])
def test_a_failed_download_leaves_nothing(
    failure: str, memory: MemoryFileSystem, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe({f"/b/{number}.txt": b"content %d" % number for number in range(20)})

    def get_file(self: MemoryFileSystem, key: str, target: str) -> None:
        content = self.cat_file(key)
        Path(target).write_bytes(content if key != "/b/7.txt" else content[:4])
        if key == "/b/7.txt" and failure == "raises":
            raise RuntimeError("connection\nreset")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", get_file)
        with pytest.raises(InputError, match=r"^data.paths memory://b: the download of /b/7.txt (failed|has 4 bytes)"):
            open_paths("memory://b")
    assert len(entries(cache)) < 20
    assert not any(name.endswith(".tmp") for name in entries(cache))
    assert len(find_files("memory://b", DataConfig())) == len(entries(cache)) == 20
    for file in find_files("memory://b", DataConfig()):
        assert file.path.read_bytes() == memory.cat_file(file.url.removeprefix("memory://"))


def test_a_pair_appears_complete_or_not_at_all(
    corpus: Path, memory: MemoryFileSystem, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.put(str(corpus), "/bucket", recursive=True)

    def get_file(self: MemoryFileSystem, key: str, target: str) -> None:
        if key.endswith(".bin"):
            raise KeyboardInterrupt
        Path(target).write_bytes(self.cat_file(key))

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", get_file)
        with pytest.raises(KeyboardInterrupt):
            find_files("memory://bucket/pair_document", DataConfig())
    assert entries(cache) == []


def test_only_one_process_downloads(memory: MemoryFileSystem, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    memory.pipe("/b/1.txt", b"content")
    cache.mkdir()
    (cache / "0.1.tmp").mkdir()  # of a process that was killed
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other = threading.Thread(target=find_files, args=("memory://b/1.txt", DataConfig()))
        other.start()
        other.join(0.5)
        assert other.is_alive() and entries(cache) == ["0.1.tmp"]
        assert capfd.readouterr().err == f"waiting for another process that downloads into {cache}\n"
    other.join(30)
    assert len(entries(cache)) == 1 and entries(cache) != ["0.1.tmp"]


def append_until_beat(path: Path, main: Activity) -> None:
    """Let a file grow until that counts as progress."""
    assert main.progress is not None
    before, deadline = main.progress.beats, time.monotonic() + 60
    while main.progress is not None and main.progress.beats == before:
        assert time.monotonic() < deadline
        with path.open("ab") as file:
            file.write(b"x")
        time.sleep(0.01)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Activity:
    monkeypatch.setattr(activity, "LOOK_SECONDS", 0.01)
    main = Activity()
    main.enter("prepare", 0)
    return main


def test_a_download_that_advances_makes_progress(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch, main: Activity
) -> None:
    memory.pipe("/b/1.txt", b"content")

    def get_file(self: MemoryFileSystem, key: str, target: str) -> None:
        append_until_beat(Path(target), main)
        Path(target).write_bytes(self.cat_file(key))

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    (file,) = find_files("memory://b/1.txt", DataConfig(), pulse=main)
    assert file.path.read_bytes() == b"content"


def test_a_wait_for_a_download_that_advances_makes_progress(
    memory: MemoryFileSystem, cache: Path, main: Activity
) -> None:
    memory.pipe("/b/1.txt", b"content")
    part = cache / "0.1.tmp"
    part.mkdir(parents=True)
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = threading.Thread(target=find_files, args=("memory://b/1.txt", DataConfig(), "data.paths", main))
        waiting.start()
        append_until_beat(part / "1.txt", main)
        assert main.progress is not None and main.progress.waiting and main.progress.marks == 1
    waiting.join(30)
    assert not part.exists() and not main.progress.waiting


def test_without_locks_the_faster_process_wins(memory: MemoryFileSystem, cache: Path) -> None:
    memory.pipe("/b/1.txt", b"content")
    (file,) = find_files("memory://b/1.txt", DataConfig())
    (entry,) = [storage.CacheEntry(file.url, "1.txt", (storage.RemoteFile("/b/1.txt", "1.txt", 7, "v"),))]
    for _ in range(2):
        storage._download(entry, memory, cache, "data.paths")
    assert (cache / entry.digest / "1.txt").read_bytes() == b"content"
    assert len(entries(cache)) == 2


def test_a_full_disk_is_reported_before_the_download(
    memory: MemoryFileSystem, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/b/1.txt", b"x" * 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10_000, 8_000, 2_000))
    with pytest.raises(InputError, match=r"5.0 kB to download, but the disk of .* has only 2.0 kB free; set JAXOPT"):
        open_paths("memory://b/1.txt")
    assert entries(cache) == []


def test_messages_name_the_url(corpus: Path, memory: MemoryFileSystem, cache: Path) -> None:
    memory.pipe("/b/a.jsonl", b'{"text": "x"}\n{"text": 1}\n')
    with pytest.raises(InputError, match=r"^memory:///b/a.jsonl, line 2: without text"):
        open_paths("memory://b/a.jsonl")
    memory.put(str(corpus / "prepared"), "/p", recursive=True)
    memory.pipe("/p/tokens.bin", b"short")
    with pytest.raises(InputError, match=r"^memory:///p/tokens.bin is truncated") as raised:
        open_paths("memory://p")
    assert str(cache) not in str(raised.value)
    memory.pipe({"/m/a.idx": b"nonsense", "/m/a.bin": b""})
    with pytest.raises(InputError, match=r"memory:///m/a\.") as raised:
        open_paths("memory://m/a")
    assert str(cache) not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://b/none.jsonl", "no such file or folder"),
        ("memory://b/*.jsonl", "no such file or folder"),
        ("memory://b", r"such as memory:///b/info.json, are read only if they are named"),
        ("memory://b/x.unknown", "/b/x.unknown: the suffix does not tell the format"),
        ("memory://b/half.idx", "there is no memory:///b/half.bin"),
        ("memory:///", "it names no file or folder"),
        ("nowhere://b/x.txt", "nowhere:// is no protocol that fsspec knows; correct it, such as s3://"),
        (
            "absent://b/x.txt",
            "absent:// needs the package no_such_package, which is not installed; run pip install no_",
        ),
    ],
)
def test_bad_urls(path: str, message: str, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    implementation = {"class": "no_such_package.System", "err": "Install no_such_package"}
    monkeypatch.setitem(storage.known_implementations, "absent", implementation)
    memory.pipe({"/b/info.json": b"{}", "/b/x.unknown": b"x"})
    if "half" in path:
        memory.pipe("/b/half.idx", b"x")
    with pytest.raises(InputError, match=f"^data.paths {path.split('://')[0]}://.*{message}"):
        find_files(path, DataConfig())


def test_a_missing_package_is_reported_before_any_download(memory: MemoryFileSystem, cache: Path) -> None:
    memory.pipe("/b/1.txt", b"content")
    with pytest.raises(InputError, match="nowhere:// is no protocol"):
        find_corpus_files(DataConfig(("memory://b/1.txt", "nowhere://x/y.txt")))
    assert entries(cache) == []


def test_two_paths_with_the_same_file(memory: MemoryFileSystem) -> None:
    memory.pipe("/b/1.txt", b"content")
    with pytest.raises(InputError, match="memory://b and memory://b/1.txt both read memory:///b/1.txt"):
        find_corpus_files(DataConfig(("memory://b", "memory://b/1.txt")))


def test_a_failing_network_is_one_line(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("timed\nout")

    memory.pipe("/b/1.txt", b"content")
    for method, path in (("info", "memory://b/1.txt"), ("find", "memory://b"), ("glob", "memory://b/*.txt")):
        with monkeypatch.context() as patch:
            patch.setattr(MemoryFileSystem, method, fail)
            with pytest.raises(
                InputError, match=r"cannot be (read|listed) \(RuntimeError: timed out\); check the addr"
            ):
                find_files(path, DataConfig())


def test_commands_refuse_what_they_cannot_read(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    for arguments in (("--input", source, "--output", "s3://bucket/out"), ("--verify", "s3://bucket/out")):
        done = command("prepare", *arguments)
        assert_one_line(done.stderr, f"{arguments[-2]} s3://bucket/out: must be a local folder")
        assert done.returncode == 2
    done = train(tmp_path / "run", "--data.paths", source, "nowhere://x/y.jsonl")
    assert_one_line(done.stderr, "data.paths nowhere://x/y.jsonl: nowhere:// is no protocol")
    assert done.returncode == 2
    assert not (tmp_path / "run").exists()


def test_prepare_reads_urls(corpus: Path, tmp_path: Path, cache: Path) -> None:
    done = command("prepare", "--input", f"file://{corpus}/a.parquet", "--output", tmp_path / "out")
    assert (done.returncode, "downloading 1 file" in done.stderr) == (0, True)
    assert open_paths(tmp_path / "out").sha256 == open_paths(corpus / "prepared").sha256
