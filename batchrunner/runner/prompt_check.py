"""Tries prompts on a model's own files: a chat template may fail on them, a token may begin them twice."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from batchrunner.core.console import counted
from batchrunner.core.errors import CannotTokenizeError, RowRefusedError
from batchrunner.engines.http.server_info import OWN_CHAT_MODELS
from batchrunner.input.tokenize.chat_template import (
    ChatTemplate,
    added_twice,
    has_chat_template,
    load_chat_template,
    load_tokenizer,
)
from batchrunner.job.engine import ServerEngine, SimulatedEngine
from batchrunner.job.spec import Job
from batchrunner.sglang.flags import name_in
from batchrunner.sglang.model_files import model_directory, read_config

CHAT_ARGUMENTS = ("chat-template", "hf-chat-template-name", "default-chat-template-kwargs", "tokenizer-path")
"""Arguments of a server that decide how it makes prompts of chats."""
_OWN_RULES = ("DeepseekV4", "KimiK3", "Inkling")
"""Beginnings of the architectures whose chats SGLang 0.5.23 writes without their template
(`resolve_chat_encoding_spec`)."""


class PromptCheck:
    """Tries the prompts of a job on the files of the model, where the run loads that."""

    def __init__(self, job: Job) -> None:
        """Find the model's files."""
        self.engine = job.engine.kind
        """Kind of the engine."""
        self.unknown: str | None = None
        """What only a start can tell; None for nothing."""
        self._directory: Path | None = None
        self._chat: ChatTemplate | None = None
        self._chat_problem: str | None = None
        """Why the template makes a prompt of no chat."""
        self._begins_twice = Counter[str]()
        """Number of prompts that begin with a token which the tokenizer adds too."""
        if isinstance(job.engine, ServerEngine):
            has_chats = job.prompt.is_batch or (job.prompt.is_chat and job.prompt.rollout is None)
            self._find_files(job.engine, has_chats=has_chats)
        elif not isinstance(job.engine, SimulatedEngine):
            self.unknown = "the servers"

    def _find_files(self, engine: ServerEngine, *, has_chats: bool) -> None:
        directory = model_directory(engine.model, engine.args.get("revision"))
        if not directory.exists():
            self.unknown = f"engine.model {engine.model}: no files of it are here"
            return
        self._directory = directory
        if not has_chats:
            return
        self.unknown = _why_unknown(engine, directory)
        if self.unknown is None:
            try:
                self._chat = load_chat_template(directory)
            except CannotTokenizeError as failure:
                self._chat_problem = str(failure)

    @cached_property
    def _tokenizer(self) -> Any:
        """The model's tokenizer; None where there is none that can be read."""
        if self._directory is None:
            return None
        try:
            return load_tokenizer(self._directory)
        except CannotTokenizeError:
            return None

    def refuse_failing_chat(self, body: Mapping[str, Any]) -> None:
        """Raise RowRefusedError for the body of a chat of which the model's template makes no prompt."""
        if self._chat_problem is not None:
            raise RowRefusedError(self._chat_problem)
        if self._chat is not None:
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
                self._chat.refuse_failing(body)  # what is no chat at all is refused by the server

    def look_at_text(self, prompt: object) -> None:
        """Count a prompt that begins with a token which the tokenizer adds too."""
        if isinstance(prompt, str) and self._tokenizer is not None:
            token = added_twice(self._tokenizer, prompt)
            if token is not None:
                self._begins_twice[token] += 1

    def warnings(self) -> list[str]:
        """Return what may be wrong with the answers though the rows can be sent."""
        return [
            f"{counted(count, 'prompt')} begin with {token}, which the tokenizer adds too, so that the model "
            "gets it twice: leave it out of the prompt"
            for token, count in self._begins_twice.items()
        ]


def _why_unknown(engine: ServerEngine, directory: Path) -> str | None:
    """Say why the model's own chat template does not tell the prompts of chats; None where it does."""
    for name in CHAT_ARGUMENTS:
        if name_in(engine.args, name) in engine.args:
            return f"how engine.args.{name} makes prompts of chats"
    config = read_config(engine.model, engine.args.get("revision"))
    kind, architectures = config.get("model_type"), config.get("architectures") or ()
    if kind in OWN_CHAT_MODELS or any(str(name).startswith(_OWN_RULES) for name in architectures):
        return f"prompts of chats, for which SGLang has rules of its own for {kind}"
    if not has_chat_template(directory):
        return f"prompts of chats: there is no chat template among the files of {engine.model}"
    return None
