"""Uploads a run's merged results and a dataset card to an object store or the Hugging Face Hub."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchrunner.core.errors import OutputError, first_line, install_command
from batchrunner.core.files import known_format
from batchrunner.job.output import StorageSpec
from batchrunner.output.addresses import StoreAddress, check_client, store_address
from batchrunner.output.files import writing
from batchrunner.output.run_dir import RunDir
from batchrunner.output.run_json import require_run_json
from batchrunner.report.report import Report

HUB = "hf://datasets/"
"""Beginning of the URI of a dataset on the Hub, before OWNER/NAME."""
_HUB_DATASET = re.compile(rf"{HUB}[^/]+/[^/]+/?")
CARD = "README.md"
"""File name of the dataset card, which the Hub shows as the page of a dataset."""


def is_remote(destination: str) -> bool:
    """Tell whether a destination of `batchrun merge` is a dataset on the Hub or a directory in a store."""
    return destination.startswith("hf://") or store_address(destination) is not None


def check_destination(destination: str) -> None:
    """Check the form of a URI without a request. Raises OutputError if no dataset can be uploaded to it."""
    if known_format(destination) is not None:
        raise OutputError(
            f"{destination}: is a URI of a file, but results are uploaded as a directory",
            hint="give the URI of a directory, or merge to a file on this machine and copy it",
        )
    if destination.startswith("hf://") and not _HUB_DATASET.fullmatch(destination):
        raise OutputError(f"{destination}: not a dataset on the Hub", hint=f"give {HUB}OWNER/NAME")


def upload(run_dir: RunDir, report: Report, destination: str, *, force: bool) -> None:
    """Upload the merged results of a run, with a dataset card.

    With `force`, the dataset at the destination is replaced. Raises OutputError if the destination is not
    empty, is malformed or refuses the upload, and StorageError.
    """
    files = {f"data/{file.name}": file for file in sorted(run_dir.merged.glob("*.parquet"))}
    card = card_of(require_run_json(run_dir), report).encode()
    address = store_address(destination)
    if address is not None:
        _upload_to_store(address, files, card, force=force)
    else:
        _upload_to_hub(destination, files, card, force=force)


def card_of(content: Mapping[str, Any], report: Report) -> str:
    """Return a dataset card in Markdown, with model, prompt and settings from run.json (`content`)."""
    job, versions = content["job"], content["versions"]
    sections = {
        "Prompt": job.get("prompt", {}),
        "Sampling": job.get("sampling", {}),
        "Conditions on answers": job.get("accept", {}),
        "Versions": versions,
    }
    lines = [
        "---", "configs:", "- config_name: default", "  data_files: data/*.parquet", "---", "",
        "# Results of batch inference", "",
        f"- Model: {content['engine'].get('model')}",
        f"- Task: {report.task}",
        f"- Rows: {report.rows_ok:,} ok and {report.rows_failed:,} failed of {report.rows_total:,}",
    ]  # fmt: skip
    if report.simulated:
        lines.append("- The engine was simulated, so the answers are made up.")
    for title, values in sections.items():
        if values:
            # Each line is indented, so that no text of a prompt is taken for Markdown.
            code = json.dumps(values, indent=2, ensure_ascii=False).split("\n")
            lines += ["", f"## {title}", "", *(f"    {line}" for line in code)]
    return "\n".join(lines) + "\n"


def _upload_to_store(address: StoreAddress, files: Mapping[str, Path], card: bytes, *, force: bool) -> None:
    """Upload the merged files to a directory in an object store, and delete all other objects in it.

    An old dataset card (README.md) is deleted first and the new one is written last. So a card always
    describes the data beside it, and its presence shows a complete upload.
    """
    check_client(address, OutputError)
    from batchrunner.output.objects import RunObjects  # noqa: PLC0415 - imports obstore

    objects = RunObjects(address, StorageSpec())
    with writing(Path(str(address)), OutputError):
        # All objects count here, including those that the upload would replace.
        stored = {each.name for each in objects.below()}
        if stored and not force:
            raise OutputError(f"{address}: is not empty", hint="give --force to replace what is in it")
        objects.delete(stored & {CARD})
        for name, file in files.items():
            objects.put(name, file)
        objects.delete(stored - {CARD, *files})
        objects.put(CARD, card)


def _upload_to_hub(destination: str, files: Mapping[str, Path], card: bytes, *, force: bool) -> None:
    """Upload to a dataset on the Hub in one commit; a new dataset is private."""
    name = destination.removeprefix(HUB).strip("/")
    try:
        import huggingface_hub as hub  # noqa: PLC0415 - may be missing
    except ModuleNotFoundError:
        raise OutputError(
            f"{destination}: the Hub needs the package huggingface_hub", hint=install_command("hub")
        ) from None
    api = hub.HfApi()
    operations: list[Any] = [hub.CommitOperationAdd(path, str(file)) for path, file in files.items()]
    operations.append(hub.CommitOperationAdd(CARD, card))
    try:
        api.create_repo(name, repo_type="dataset", private=True, exist_ok=True)
        # The Hub puts .gitattributes into each new dataset.
        stored = {path for path in api.list_repo_files(name, repo_type="dataset") if path != ".gitattributes"}
        if stored and not force:
            raise OutputError(f"{destination}: is not empty", hint="give --force to replace what is in it")
        operations += [hub.CommitOperationDelete(path) for path in sorted(stored - {CARD, *files})]
        api.create_commit(
            name, operations, commit_message="Upload the results of batchrunner", repo_type="dataset"
        )
    except (hub.errors.HfHubHTTPError, OSError, ValueError) as failure:
        raise OutputError(f"{destination}: cannot be written: {first_line(failure)}") from None
