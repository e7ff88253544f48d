"""Input on an object store: found, read by ranges, checked by e_tag; what is wrong is said in one line."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap64

import batchrunner
from batchrunner.core.errors import InputChangedError, InputError
from batchrunner.input.dataset import Dataset
from batchrunner.job.spec import InputSpec
from tests.conftest import job_of, results_of, write_rows
from tests.support.refusals import refusal, told
from tests.support.store_server import StoreBucket


@pytest.fixture
def filled(store_bucket: StoreBucket, tmp_path: Path) -> StoreBucket:
    """A bucket with what a failed Spark job leaves behind beside what another wrote."""
    for number, name in enumerate(["in/year=1/a", "in/year=2/b", "in/_temporary/0/year=2/b", "other"]):
        file = write_rows(tmp_path / f"{number}.parquet", 1, first=number)
        store_bucket.put(f"{name}.parquet", file)
    store_bucket.put("in/_SUCCESS", b"")
    store_bucket.put("in/", b"")
    return store_bucket


@pytest.mark.parametrize(
    ("path", "ids"),
    [
        ("in/", [0, 1]),
        ("in/year=2/b.parquet", [1]),
        ("in/year=*/*.parquet", [0, 1]),
        ("**/b.parquet", [2, 1]),
        ("*.parquet", [3]),
    ],
)
def test_uris(tmp_path: Path, filled: StoreBucket, path: str, ids: list[int]) -> None:
    """A URI names a file, a directory, in which hidden ones do not count, or files by a pattern."""
    job = job_of(tmp_path, input={"path": f"{filled.uri}/{path}", "columns": ["id"]})
    batchrunner.run(job)
    assert [row["id"] for row in results_of(job)] == ids


@pytest.mark.parametrize("how", ["edited", "copied", "gone"])
def test_a_file_that_changes(tmp_path: Path, store_bucket: StoreBucket, how: str) -> None:
    """Bytes of another object are not read under the name of the first; a copy of itself is no change."""
    file = write_rows(tmp_path / "a.parquet", 300)
    store_bucket.put("a.parquet", file)
    dataset = Dataset(InputSpec(path=f"{store_bucket.uri}/a.parquet"))
    if how == "edited":
        store_bucket.put("a.parquet", write_rows(tmp_path / "b.parquet", 300, first=7))
    elif how == "copied":
        pq.write_table(pq.read_table(file), tmp_path / "again.parquet")
        store_bucket.put("a.parquet", file)
    else:
        store_bucket.delete("a.parquet")
    wanted = BitMap64(range(300))
    if how == "copied":
        assert sum(len(batch.rows) for batch in dataset.read(wanted, ["id"])) == 300
    else:
        expected = InputChangedError if how == "edited" else InputError
        with pytest.raises(expected, match="changed" if how == "edited" else "cannot be read"):
            list(dataset.read(wanted, ["id"]))


def test_storage_in_the_job(
    tmp_path: Path, store_bucket: StoreBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job says where the store is and which variables hold the secrets; run.json has no secret."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("MY_KEY", "key-of-mine")
    monkeypatch.setenv("MY_SECRET", "secret-of-mine")
    store_bucket.put("a.parquet", write_rows(tmp_path / "a.parquet", 3))
    secret = {"access_key_id": "MY_KEY", "secret_access_key": "MY_SECRET"}
    storage: dict[str, Any] = {"endpoint": store_bucket.endpoint, "region": "us-east-1", "secrets": secret}
    job = job_of(tmp_path, input={"path": f"{store_bucket.uri}/a.parquet"}, storage=storage)
    assert batchrunner.run(job).rows_ok == 3
    run = (tmp_path / "run" / "run.json").read_text()
    assert "MY_SECRET" in run
    assert "of-mine" not in run
    monkeypatch.delenv("MY_SECRET")
    told(
        refusal(job, tmp_path),
        "storage.secrets.secret_access_key",
        "the environment variable that it names is not set",
    )


@pytest.mark.parametrize(
    ("path", "storage", "problem"),
    [
        ("s3://not-a-bucket-of-anyone/in", {}, "there is no such bucket (NoSuchBucket)"),
        ("{uri}/nothing", {}, "found no Parquet, CSV, JSON Lines or Arrow file"),
        ("{uri}/in", {"endpoint": "127.0.0.1:9"}, "storage.endpoint: string should match pattern"),
        ("az://container/in", {}, "the account is missing: set storage.account"),
        (
            "http://host/in",
            {},
            "http://host/in: cannot be opened: Unrecognized filesystem type",
        ),
    ],
)
def test_what_is_wrong_with_a_store(
    tmp_path: Path, filled: StoreBucket, path: str, storage: dict[str, Any], problem: str
) -> None:
    """Each mistake is one line with exit code 2, and nothing is sent."""
    job = job_of(tmp_path, input={"path": path.format(uri=filled.uri)}, storage=storage)
    told(refusal(job, tmp_path), problem)


def test_no_credentials(tmp_path: Path, filled: StoreBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody's credentials are found, the line says what to set; a public bucket needs none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    job = job_of(tmp_path, input={"path": f"{filled.uri}/in"})
    told(refusal(job, tmp_path), "AWS credentials: none were found", "AWS_PROFILE", "storage.anonymous")
    public = {**job, "storage": {"anonymous": True}}
    told(refusal(public, tmp_path), "403")
    filled.make_public()
    assert batchrunner.run(public).rows_ok == 2
