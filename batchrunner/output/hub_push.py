"""Pushes merged results to a data set of the Hugging Face Hub, as one commit, by huggingface_hub."""

from __future__ import annotations

import os
import re
from http import HTTPStatus
from pathlib import Path

import httpx
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub import errors as hub_errors

from batchrunner.core.errors import PushError
from batchrunner.job.output import HubFolder

_OURS = re.compile(r"merged-\d{6}\.parquet")
"""Names of merged files; those of an earlier push that are not among the new ones are deleted."""


def push_merged(merged: Path, target: HubFolder) -> str:
    """Make the merged files of a run those of a folder of the Hub, in one commit; raises PushError.

    Return the URL of the commit, or of the last one where the Hub has these files. Other files stay.
    """
    token = get_token()
    if token is None:
        raise _error(
            target, "there is no token", "export HF_TOKEN, a token that may write, or `hf auth login`"
        )
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token, library_name="batchrunner")
    try:
        return _commit(api, merged, target)
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as failure:
        raise _told(failure, target) from None


def _commit(api: HfApi, merged: Path, target: HubFolder) -> str:
    """Send what is not there; raises httpx.HTTPError, OSError, ValueError or RuntimeError."""
    adds = [CommitOperationAdd(target.file(file.name), file) for file in sorted(merged.glob("*.parquet"))]
    new = {each.path_in_repo for each in adds}
    stale = [
        CommitOperationDelete(path, is_folder=False)
        for path in _merged_before(api, target)
        if path not in new
    ]
    done = api.create_commit(
        target.repo,
        repo_type="dataset",
        revision=target.revision,
        operations=[*adds, *stale],
        commit_message=f"batchrunner: {len(adds)} merged files",
    )
    return str(done.commit_url)


def _merged_before(api: HfApi, target: HubFolder) -> list[str]:
    """Return the paths of merged files that the folder has."""
    try:
        found = api.list_repo_tree(
            target.repo, target.folder or None, repo_type="dataset", revision=target.revision
        )
        return [each.path for each in found if _OURS.fullmatch(each.path.rpartition("/")[2])]
    except hub_errors.EntryNotFoundError:
        return []


def _told(failure: BaseException, target: HubFolder) -> PushError:
    """Return what an error of a push means, in one line."""
    if isinstance(failure, RuntimeError) and failure.__cause__ is not None:  # an upload's error
        failure = failure.__cause__
    status = getattr(getattr(failure, "response", None), "status_code", None)
    why = getattr(failure, "server_message", None) or str(failure) or type(failure).__name__
    told = "" if status is None else f"it answered {status}: "
    hint = "merge again once it works: nothing is sent twice"
    if isinstance(failure, hub_errors.RevisionNotFoundError):
        return _error(target, f"there is no branch {target.revision}", "make it first, on its page")
    if isinstance(failure, hub_errors.RepositoryNotFoundError) and status == HTTPStatus.NOT_FOUND:
        told, why = "", f"there is no data set {target.repo}, or the token may not see it"
        hint = f"make it first: hf repo create {target.repo} --repo-type dataset"
    elif status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        told = f"the token may not write: {told}"
        hint = f"export an HF_TOKEN with the right to write {target.repo}"
    return _error(target, told + " ".join(str(why).split())[:200], hint)


def _error(target: HubFolder, what: str, hint: str) -> PushError:
    return PushError(f"{target}: not pushed: {what}", hint=hint, mark=";")
