"""Requests as tokens of a small tokenizer."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrunner.core.errors import RowRefusedError
from batchrunner.core.types import Request, RowRef
from batchrunner.input.tokenize.encoder import Encoder, TokenBudget


def request(prompt: Any, kind: Any = "messages", arguments: Any = None, **sampling: Any) -> Request:
    ref = RowRef(0, pa.record_batch({"a": [0]}), 0)
    return Request(ref, kind, prompt, sampling, chat_template_kwargs=arguments)


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def ids_of(directory: Path, one: Request) -> list[int] | RowRefusedError:
    """Return the ids of one request."""
    (found,) = Encoder(one.kind, directory, TokenBudget(None)).token_ids([one])
    return found
