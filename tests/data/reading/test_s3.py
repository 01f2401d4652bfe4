"""Data in buckets, read from a local server that speaks the protocol of S3."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import assert_one_line, start_training, train
from texts import write_jsonl

from jaxopt_llm.config import DataConfig
from jaxopt_llm.core.errors import InputError
from jaxopt_llm.data.reading.files import File, find_files

DOCUMENTS = [f"document {number} " * 9 for number in range(60)]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def client(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a client of a server with the bucket `bucket`. Commands use the server too."""
    import boto3

    environment = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key"}
    environment |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in {**environment, "JAXOPT_LLM_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for number in range(3):
        local = write_jsonl(tmp_path / f"{number}.jsonl", DOCUMENTS[number * 20 : (number + 1) * 20])
        client.put_object(Bucket="bucket", Key=f"corpus/{number}.jsonl", Body=local.read_bytes())
    client.put_object(Bucket="bucket", Key="corpus/more/", Body=b"")  # a folder as the console creates it
    client.put_object(Bucket="bucket", Key="corpus/more/x.txt", Body=b"text")
    return client


def names(files: list[File]) -> list[str]:
    return [file.name for file in files]


def test_files_folders_and_globs(client: Any, tmp_path: Path) -> None:
    config = DataConfig()
    assert names(find_files("s3://bucket/corpus", config)) == ["0.jsonl", "1.jsonl", "2.jsonl", "more/x.txt"]
    assert names(find_files("s3://bucket/corpus/[01].jsonl", config)) == ["0.jsonl", "1.jsonl"]
    assert names(find_files("s3://bucket/**/*.txt", config)) == ["x.txt"]
    (file,) = find_files("s3://bucket/corpus/1.jsonl", config)
    assert (file.name, str(file)) == ("1.jsonl", "s3://bucket/corpus/1.jsonl")
    assert file.path.read_bytes() == (tmp_path / "1.jsonl").read_bytes()


def test_one_object_has_one_copy_however_it_is_named(client: Any, capfd: pytest.CaptureFixture[str]) -> None:
    copies = {find_files("s3://bucket/corpus", DataConfig())[0].path}
    assert "downloading 4 files" in capfd.readouterr().err
    copies |= {find_files(f"s3://bucket/corpus/{name}", DataConfig())[0].path for name in ("*.jsonl", "0.jsonl")}
    assert len(copies) == 1
    assert "downloading" not in capfd.readouterr().err


def test_a_changed_object_is_downloaded_again(client: Any) -> None:
    (before,) = find_files("s3://bucket/corpus/more/x.txt", DataConfig())
    client.put_object(Bucket="bucket", Key="corpus/more/x.txt", Body=b"TEXT")
    (after,) = find_files("s3://bucket/corpus/more/x.txt", DataConfig())
    assert (before.path.read_bytes(), after.path.read_bytes()) == (b"text", b"TEXT")


def test_errors_are_one_line(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="^data.paths s3://none/x.txt: no such file or folder"):
        find_files("s3://none/x.txt", DataConfig())
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(InputError, match=r"cannot be read \(NoCredentialsError: .*\); check the address, the network"):
        find_files("s3://bucket/corpus", DataConfig())


@pytest.mark.slow
def test_a_run_on_a_bucket_equals_one_on_files(client: Any, tmp_path: Path) -> None:
    runs = {"s3": "s3://bucket/corpus/*.jsonl", "local": tmp_path / "*.jsonl"}
    hashes = []
    for name, path in runs.items():
        process = start_training(tmp_path / name, "--training.steps", 2, "--data.paths", path)
        _, errors = process.communicate(timeout=300)
        assert (process.returncode, "downloading 3 files" in errors) == (0, name == "s3"), errors
        hashes.append((tmp_path / name / "metrics.jsonl").read_text().split('"tokens_per_second"')[0])
    assert hashes[0] == hashes[1]
    done = train(tmp_path / "none", "--data.paths", "s3://bucket/none/*.jsonl")
    assert_one_line(done.stderr, "data.paths s3://bucket/none/*.jsonl: no such file or folder")
    assert done.returncode == 2
