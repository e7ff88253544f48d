"""Data sets of the Hugging Face Hub as input: they are read as of one commit."""

from __future__ import annotations

import re

import pyarrow.fs as pafs

_COMMIT = re.compile(r"@[0-9a-f]{40}(?=/|$)")


def at_commit(fs: pafs.FileSystem, path: str) -> str:
    """Return a path with the commit that its branch has now, so that a later one does not change the input.

    `fs` is that of `hf://`, by huggingface_hub, which is imported by then. Raises what it does, also where
    there is no such data set, or the token may not see it.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - an extra

    hub = fs.handler.fs
    found = hub.resolve_path(path)
    if not getattr(found, "revision", None):  # a bucket has no commits
        return path
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    commit = api.repo_info(found.repo_id, repo_type=found.repo_type, revision=found.revision).sha
    kind = "" if found.repo_type == "model" else f"{found.repo_type}s/"
    return f"{kind}{found.repo_id}@{commit}/{found.path_in_repo}".rstrip("/")


def without_commit(path: str) -> str:
    """Return the path of a file of the Hub without its commit, and any other as it is."""
    return _COMMIT.sub("", path, count=1)
