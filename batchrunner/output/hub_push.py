"""Pushes merged results to a data set of the Hugging Face Hub, as one commit, by huggingface_hub."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential

from batchrunner.core.errors import PushError
from batchrunner.core.timing import TIMING
from batchrunner.job.hub import HubFolder

log = logging.getLogger(__name__)

_OURS = re.compile(r"merged-\d{6}\.parquet")
"""Names of merged files; those of an earlier push that are not among the new ones are deleted."""
_PASSING = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED}
_PASSING |= {HTTPStatus.TOO_MANY_REQUESTS}
"""Statuses that may be others in a moment, as all from 500 on: 412 says that another commit came first."""
_REFUSED = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
_RESET = re.compile(r";t=(\d+)")
"""Seconds until the Hub takes requests again, in its header `RateLimit`, which also says `;r=0`."""
_BACKOFF = wait_exponential(multiplier=1, max=60)


@dataclass(frozen=True, slots=True)
class PushedFiles:
    """What a push made of a data set."""

    address: str
    """`hf://datasets/OWNER/NAME/...`."""
    commit: str
    """URL of the commit, or of the one that the data set had already."""
    changed: bool
    """Whether the data set was changed: not where it had these files already."""

    def line(self) -> str:
        """Return it for a person."""
        return (
            f"pushed to {self.address}: {self.commit}" if self.changed else f"{self.address} has it already"
        )


def push_merged(merged: Path, target: HubFolder) -> PushedFiles:
    """Make the merged files of a run those of a folder of the Hub, in one commit; raises PushError.

    Other files of the folder stay. A push whose reply was lost is recognised: nothing is sent twice.
    """
    token = get_token()
    if token is None:
        raise _error(
            target, "there is no token", "export HF_TOKEN, a token that may write, or `hf auth login`"
        )
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token, library_name="batchrunner")
    again = Retrying(
        retry=retry_if_exception(_is_passing),
        stop=stop_after_delay(TIMING.hub_retries),
        wait=_pause,
        before_sleep=_tell,
        reraise=True,
    )
    try:
        with _quiet():
            return again(_commit, api, merged, target)
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as failure:
        raise _told(failure, target) from None


def _commit(api: HfApi, merged: Path, target: HubFolder) -> PushedFiles:
    """Send what is not there; raises httpx.HTTPError, OSError, ValueError or RuntimeError."""
    repo: dict[str, Any] = {"repo_id": target.repo, "repo_type": "dataset"}
    head = api.repo_info(**repo, revision=target.revision).sha
    files = sorted(merged.glob("*.parquet"))
    new = {target.file(file.name) for file in files}
    stale = sorted(_merged_before(api, target, head) - new)
    adds = [CommitOperationAdd(target.file(file.name), file) for file in files]
    deletes = [CommitOperationDelete(path, is_folder=False) for path in stale]
    done = api.create_commit(
        **repo,
        revision=target.revision,
        operations=[*adds, *deletes],
        commit_message=f"batchrunner: {len(files)} merged files",
        parent_commit=head,
    )
    return PushedFiles(str(target), done.commit_url, changed=done.oid != head)


def _merged_before(api: HfApi, target: HubFolder, head: str | None) -> set[str]:
    """Return the paths of merged files that the folder has."""
    try:
        found = api.list_repo_tree(
            target.repo, target.folder or None, repo_type="dataset", revision=head or target.revision
        )
        return {each.path for each in found if _OURS.fullmatch(each.path.rpartition("/")[2])}
    except hub_errors.EntryNotFoundError:
        return set()


def _status(failure: BaseException) -> int | None:
    answer = getattr(failure, "response", None)
    return None if answer is None else int(answer.status_code)


def _is_passing(failure: BaseException) -> bool:
    """Tell whether the same push may succeed in a moment; an upload's error is the cause of another one."""
    status = _status(failure)
    if status is not None:
        return status in _PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(failure, RuntimeError) and failure.__cause__ is not None:
        return _is_passing(failure.__cause__)
    return isinstance(failure, (httpx.TransportError, ConnectionError, TimeoutError))


def _failure(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def _pause(state: RetryCallState) -> float:
    """Return the pause in seconds: what the Hub asks for, else twice that of the last time."""
    answer = getattr(_failure(state), "response", None)
    headers = {} if answer is None else answer.headers
    asked = headers.get("Retry-After") or "".join(_RESET.findall(headers.get("RateLimit", "")))
    return float(asked) if asked.isdecimal() else TIMING.hub_first_retry * float(_BACKOFF(state))


def _tell(state: RetryCallState) -> None:
    failure = _failure(state)
    assert failure is not None
    log.warning("the Hub: %s: the push is tried again", _reason(failure))


def _told(failure: BaseException, target: HubFolder) -> PushError:
    """Return what an error of a push means, in one line."""
    status = _status(failure)
    if isinstance(failure, hub_errors.RevisionNotFoundError):
        return _error(
            target, f"there is no branch {target.revision}", "make it first, on the page of the data set"
        )
    if isinstance(failure, hub_errors.RepositoryNotFoundError) and status == HTTPStatus.NOT_FOUND:
        return _error(
            target,
            f"there is no data set {target.repo}, or the token may not see it",
            f"make it first: hf repo create {target.repo} --repo-type dataset",
        )
    if status in _REFUSED:
        return _error(
            target,
            f"the token may not write ({_reason(failure)})",
            f"export an HF_TOKEN with the right to write {target.repo}",
        )
    return _error(target, _reason(failure), "merge again once it works: nothing is sent twice")


def _reason(failure: BaseException) -> str:
    """Return what the Hub said, or why it said nothing, in a few words."""
    answer = getattr(failure, "response", None)
    if answer is not None:
        said = getattr(failure, "server_message", None) or ""
        words = " ".join(str(said).split())[:200]
        return f"it answered {answer.status_code}" + (f": {words}" if words else "")
    if isinstance(failure, RuntimeError) and failure.__cause__ is not None:
        return _reason(failure.__cause__)
    if isinstance(failure, httpx.TransportError):
        return f"it does not answer ({type(failure).__name__})"
    return " ".join(str(failure).split())[:200] or type(failure).__name__


def _error(target: HubFolder, what: str, hint: str) -> PushError:
    return PushError(f"{target}: not pushed: {what}", hint=hint, mark=";")


@contextmanager
def _quiet() -> Iterator[None]:
    """Let the package show no bars and no warnings of its own."""
    had_bars, level = not are_progress_bars_disabled(), hub_logging.get_verbosity()
    disable_progress_bars()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)
        if had_bars:
            enable_progress_bars()
