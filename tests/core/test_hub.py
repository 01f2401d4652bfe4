"""Models by the id of the Hugging Face hub: from its cache, and from a local server that speaks its protocol."""

import hashlib
import http.server
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import folders
import huggingface_hub
import numpy as np
import pytest
from commands import TINY, assert_one_line, metrics, start, train
from huggingface_hub import constants
from texts import write_jsonl

import jaxopt_llm
from jaxopt_llm.checkpoint.pretrained import find_source_folder, resolve_pretrained
from jaxopt_llm.config import Config, DataConfig, LoraConfig, ModelConfig
from jaxopt_llm.core import hub
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.core.pulse import UNWATCHED
from jaxopt_llm.distributed import activity
from jaxopt_llm.distributed.activity import Activity
from jaxopt_llm.distributed.process_group import Processes
from jaxopt_llm.run.setup import check_hub_commits

pytestmark = pytest.mark.core
NAME, COMMIT = "org/tiny", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.folder_with_tokenizer(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty home of the hub's library."""
    home = tmp_path / "home"
    monkeypatch.setenv("HF_HOME", str(home))  # for commands
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub._download.cache_clear()
    yield home
    hub._download.cache_clear()


@pytest.fixture
def offline(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return home


def fill_cache(home: Path, model: Path, name: str = NAME, ignored: str = "") -> Path:
    """Put a folder into the cache as the hub's library does, and return its snapshot."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(model, repository / "snapshots" / COMMIT, ignore=shutil.ignore_patterns(ignored))
    return repository / "snapshots" / COMMIT


def test_what_is_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "meta-llama/Llama-3.2-1B", "org/name@refs/pr/1", "0x/a_b@v1.0"):
        assert hub.is_hub_id(name) and hub.absolute_name(name) == name, name
    for name in ("name", "/org/name", "./org/name", "a/b/c", "org/tokenizer.json", "org/", "~/name", "org/name@"):
        assert not hub.is_hub_id(name), name
    assert hub.repository("org/name@main") == "org/name"
    names = ("org/name", "org/name@main", "/models/name", "/hub/models--org--name/snapshots/0123456789abcdef")
    assert {hub.model_name(name) for name in names} == {"name"}
    Path("org/name").mkdir(parents=True)
    assert not hub.is_hub_id("org/name")
    assert hub.absolute_name("org/name") == str(tmp_path / "org" / "name")
    assert hub.find_folder("org/name", "") == Path("org/name")
    with pytest.raises(
        InputError, match="^--base org/nam: no such folder in org; correct the name, or .* org/nam@main"
    ):
        hub.find_folder("org/nam", "--base ")


def test_settings_of_a_cached_model(offline: Path, model: Path) -> None:
    snapshot = fill_cache(offline, model)
    config = Config(model=ModelConfig(pretrained=NAME), data=DataConfig(paths=("x",)))
    found, local = (
        resolve_pretrained(Config(model=ModelConfig(pretrained=str(name)), data=config.data)) for name in (NAME, model)
    )
    assert (found.model.pretrained, found.data.tokenizer) == (NAME, NAME)
    assert found.model.width == local.model.width
    assert find_source_folder(found) == snapshot
    for name in (f"{NAME}@main", f"{NAME}@{COMMIT}"):
        assert hub.find_folder(name, "") == snapshot


def test_which_files_are_downloaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the subfolders, only templates are needed."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **options: asked.update(options) or str(home))
    hub._download(NAME, None, weights=True)
    needed = ["config.json", "tokenizer.model", "a.safetensors", "x.jinja", "additional_chat_templates/tool_use.jinja"]
    others = ["onnx/config.json", "original/tokenizer.model", "fp32/a.safetensors", "consolidated.safetensors", "a.bin"]
    patterns = {"allow_patterns": asked["allow_patterns"], "ignore_patterns": asked["ignore_patterns"]}
    assert [*huggingface_hub.utils.filter_repo_objects([*needed, *others], **patterns)] == needed


def test_a_download_of_weights_that_advances_makes_progress(
    offline: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, main = fill_cache(offline, model), Activity()
    blob = snapshot.parent.parent / "blobs" / "0123.4567.incomplete"
    blob.parent.mkdir()
    monkeypatch.setattr(activity, "LOOK_SECONDS", 0.01)
    main.enter("prepare", 0)

    def download(repository: str, revision: str | None, weights: bool = False) -> Path:
        deadline = time.monotonic() + 60
        while weights and main.progress is not None and not main.progress.beats:
            assert time.monotonic() < deadline
            with blob.open("ab") as file:
                file.write(b"x")
            time.sleep(0.01)
        return snapshot

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_download", download)
        assert hub.find_folder(NAME, "", pulse=main) == snapshot
    assert main.progress is not None and main.progress.beats


def test_a_loaded_model_equals_its_folder(offline: Path, model: Path) -> None:
    fill_cache(offline, model)
    ids = [[1, 2, 3, 4]]
    found, local = jaxopt_llm.load_pretrained(NAME), jaxopt_llm.load_pretrained(model)
    assert np.array_equal(found.logits(ids), local.logits(ids))


@pytest.mark.slow
def test_commands_take_an_id(offline: Path, model: Path, tmp_path: Path) -> None:
    fill_cache(offline, model)
    data = ("--data.paths", write_jsonl(tmp_path / "a.jsonl", [f"document {i} " * 9 for i in range(40)]))
    sizes = [f"--{key}={value}" for key, value in TINY.items() if not key.startswith("model.")]
    for directory, name in ((tmp_path / "hub", NAME), (tmp_path / "folder", model)):
        flags = ("--config", "pretrain.py", "--run.directory", directory, "--training.steps", 2, *sizes, *data)
        flags = (*flags, "--training.accumulation", 1)
        process = start("train", *flags, "--model.pretrained", name)
        assert process.communicate(timeout=300)[1] == "" and process.returncode == 0
    losses = [[record["loss"] for record in metrics(tmp_path / name)] for name in ("hub", "folder")]
    assert losses[0] == losses[1]
    stored = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert (stored["model"]["pretrained"], stored["data"]["tokenizer"]) == (NAME, NAME)
    for module, *arguments in (
        ("convert", "export", "--checkpoint", tmp_path / "hub", "--to", tmp_path / "exported"),
        ("generate", "--checkpoint", NAME, "--prompt", "x", "--tokens", 2),
    ):
        process = start(module, *arguments)
        assert process.communicate(timeout=300)[1] == "" and process.returncode == 0, arguments
    assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_processes_compare_the_commits(offline: Path, model: Path) -> None:
    """A branch can change between the downloads of two hosts."""
    fill_cache(offline, model)

    class Recorder:
        compared: list[tuple[str, str, str]] = []  # noqa: RUF012
        main = UNWATCHED

        def check_same(self, *given: str) -> None:
            self.compared.append(given)

    config = Config(model=ModelConfig(pretrained=NAME), lora=LoraConfig(pretrained="a/folder/of/adapters"))
    check_hub_commits(config, cast(Processes, Recorder()))
    assert Recorder.compared == [("model.pretrained", COMMIT, f"name a commit: {NAME}@{COMMIT}")]


def test_a_missing_model_is_one_line(offline: Path, model: Path, tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--model.pretrained", "org/none", "--data.paths", model)
    remedy = "run hf download org/none where there is a network, or name a folder"
    assert_one_line(done.stderr, "model.pretrained=org/none: neither a folder here nor complete in the Hugg", remedy)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="lora.pretrained=org/adapter: neither a folder here"):
        fill_cache(offline, model)
        resolve_pretrained(Config(model=ModelConfig(pretrained=NAME), lora=LoraConfig(pretrained="org/adapter")))
    with pytest.raises(InputError, match=r"data.tokenizer=s3://bucket/t: models and tokenizers are not read from"):
        hub.find_folder(hub.absolute_name("s3://bucket/t"), "data.tokenizer=")


def test_a_cached_model_without_weights(offline: Path, model: Path) -> None:
    snapshot = fill_cache(offline, model, ignored="*.safetensors")
    assert hub.find_folder(NAME, "", weights=False) == snapshot
    with pytest.raises(InputError, match=f"^--checkpoint {NAME}: its files in .* have no weights in safetensors; run "):
        hub.find_folder(NAME, "--checkpoint ")


class Hub(http.server.ThreadingHTTPServer):
    """Server with one model.

    Attributes:
        files: contents by name.
        commit: the commit of main.
        error: value of X-Error-Code of all answers; empty for good answers.
        requests: names of the files that were downloaded.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.commit, self.error, self.downloads = COMMIT, "", list[str]()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        status, headers, body = 200, {"X-Repo-Commit": self.server.commit}, b""
        if self.server.error:
            status, headers = 404, {"X-Error-Code": self.server.error, "X-Error-Message": "no"}
        elif found := re.fullmatch(rf"/api/models/{NAME}(/revision/main)?", self.path):
            body = json.dumps({"id": NAME, "sha": self.server.commit}).encode()
        elif self.path.startswith(f"/api/models/{NAME}/tree/{self.server.commit}"):
            files = self.server.files.items()
            rows = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files
            ]
            body = json.dumps(rows).encode()
        elif (found := re.fullmatch(rf"/{NAME}/resolve/(\w+)/(.+)", self.path)) and found[2] in self.server.files:
            headers["X-Repo-Commit"], body = found[1], self.server.files[found[2]]
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
            if self.command == "GET":
                self.server.downloads.append(found[2])
        else:
            status, headers = 404, {"X-Error-Code": "EntryNotFound"}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        url = f"http://127.0.0.1:{server.server_port}"
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        server.files = {path.name: path.read_bytes() for path in model.iterdir()}
        server.files |= {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"copy", "onnx/config.json": b"{}"}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_only_what_is_needed_is_downloaded(server: Hub, model: Path) -> None:
    settings = {path.name for path in model.iterdir() if path.suffix != ".safetensors"}
    folder = hub.find_folder(NAME, "", weights=False)
    assert sorted(server.downloads) == sorted(settings)
    assert hub.find_folder(NAME, "") == folder
    assert sorted(server.downloads) == sorted(path.name for path in model.iterdir())
    for path in model.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()


def test_a_process_keeps_to_one_revision(server: Hub) -> None:
    folder = hub.find_folder(NAME, "", weights=False)
    server.commit = COMMIT[::-1]
    assert hub.find_folder(NAME, "") == folder
    hub._download.cache_clear()
    assert hub.find_folder(NAME, "").name == COMMIT[::-1]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepo", f"{NAME}: access to this model must be granted; request it at HUB/{NAME}, then run"),
        ("RepoNotFound", f"{NAME}: neither a folder here nor a model on the Hugging Face hub that you may read; corre"),
        (
            "RevisionNotFound",
            f"{NAME}: the model has no such revision; choose a branch, tag or commit of HUB/{NAME}/tree/main",
        ),
    ],
)
def test_an_answer_of_the_hub_is_one_line(error: str, message: str, server: Hub) -> None:
    server.error = error
    with pytest.raises(InputError) as raised:
        hub.find_folder(NAME, "model.pretrained=")
    assert str(raised.value).replace(constants.ENDPOINT, "HUB").startswith(f"model.pretrained={message}")
    assert "\n" not in str(raised.value)


def test_an_unreachable_hub_is_one_line(server: Hub, home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.shutdown()
    server.server_close()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the library waits 23 s between its attempts
    with pytest.raises(
        InputError, match="neither a folder here nor complete in the Hugging Face cache, and the hub does not send it"
    ):
        hub.find_folder(NAME, "model.pretrained=")
    fill_cache(home, model)
    assert hub.find_folder(NAME, "").name == COMMIT
