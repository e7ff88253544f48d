"""Run a job with its input and results on a local S3 server (moto): `make run-s3`.

Usage: python jobs/on_s3.py JOB.yaml FILE [--set A.B=VALUE ...]

FILE is the job's input, which is uploaded first.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import boto3

BUCKET = "batchrunner"
BATCHRUN = [sys.executable, "-m", "batchrunner"]


def main() -> int:
    """Return the exit code of the first command that fails, else 0."""
    job, file, *options = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            return run(job, Path(file), options, port)
        finally:
            process.kill()


def run(job: str, file: Path, options: list[str], port: int) -> int:
    """Upload the input, run the job, merge its results, and list what is in the store."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    wait_for(port)
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    client.upload_file(str(file), BUCKET, f"in/{file.name}")
    results = f"s3://{BUCKET}/run"
    paths = ["--set", f"input.path=s3://{BUCKET}/in", "--set", f"output.path={results}", "--fresh"]
    for command in (["run", job, *paths, *options], ["merge", results], ["status", results]):
        code = subprocess.run([*BATCHRUN, *command], check=False).returncode
        if code:
            return code
    for item in client.list_objects_v2(Bucket=BUCKET)["Contents"]:
        print(f"{item['Size']:>10,} s3://{BUCKET}/{item['Key']}")
    return 0


def wait_for(port: int) -> None:
    """Return when the server takes connections."""
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
