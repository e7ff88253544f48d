"""Checks prompts with a model's own files: the chat template may fail, or the first token may come twice."""

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
"""Arguments of a server that change how it converts a chat to a prompt."""
_OWN_RULES = ("DeepseekV4", "KimiK3", "Inkling")
"""Prefixes of architectures whose chats SGLang 0.5.23 encodes by its own rules, without a chat template
(`resolve_chat_encoding_spec`)."""


class PromptCheck:
    """Checks a job's prompts with the model's files, as far as they are on this machine."""

    def __init__(self, job: Job) -> None:
        """Find the model's files, if the job starts the server itself."""
        self.engine = job.engine.kind
        self.unknown: str | None = None
        """What only a start of the run can check, in words; None if there is nothing."""
        self._directory: Path | None = None
        """Directory of the model's files; None if they are not on this machine."""
        self._chat: ChatTemplate | None = None
        """Chat template of the model; None if chats are not checked."""
        self._chat_problem: str | None = None
        """Why the chat template cannot be loaded; None if it can."""
        self._begins_twice = Counter[str]()
        """For each special token that the tokenizer adds, the number of prompts that already begin with it.
        """
        if isinstance(job.engine, ServerEngine):
            has_chats = job.prompt.is_batch or (job.prompt.is_chat and job.prompt.rollout is None)
            self._find_files(job.engine, has_chats=has_chats)
        elif not isinstance(job.engine, SimulatedEngine):
            self.unknown = "the servers"

    def _find_files(self, engine: ServerEngine, *, has_chats: bool) -> None:
        """Find the model's directory. For a job with chats, load the chat template too."""
        directory = model_directory(engine.model, engine.args.get("revision"))
        if not directory.exists():
            self.unknown = f"engine.model {engine.model}: its files are not on this machine"
            return
        self._directory = directory
        if not has_chats:
            return
        # Chats can be checked only if the model's chat template alone determines their prompts.
        self.unknown = _why_unknown(engine, directory)
        if self.unknown is None:
            try:
                self._chat = load_chat_template(directory)
            except CannotTokenizeError as failure:
                # This is a fault and not unknown: `refuse_failing_chat` then refuses every chat.
                self._chat_problem = str(failure)

    @cached_property
    def _tokenizer(self) -> Any:
        """The model's tokenizer; None if it cannot be loaded."""
        if self._directory is None:
            return None
        try:
            return load_tokenizer(self._directory)
        except CannotTokenizeError:
            return None

    def refuse_failing_chat(self, body: Mapping[str, Any]) -> None:
        """Raise RowRefusedError if the model's chat template fails on the body of a chat."""
        if self._chat_problem is not None:
            raise RowRefusedError(self._chat_problem)
        if self._chat is not None:
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
                # These errors come from a body that is not a valid chat. They are ignored, because the server
                # has a better message for it.
                self._chat.refuse_failing(body)

    def look_at_text(self, prompt: object) -> None:
        """Count the prompt if it begins with a token that the tokenizer adds as well."""
        if isinstance(prompt, str) and self._tokenizer is not None:
            token = added_twice(self._tokenizer, prompt)
            if token is not None:
                self._begins_twice[token] += 1

    def warnings(self) -> list[str]:
        """Return warnings about prompts that can be sent, but may give worse answers."""
        return [
            f"{counted(count, 'prompt')} begin with {token}, which the tokenizer adds as well, so that the "
            "model gets this token twice: leave the token out of the prompt"
            for token, count in self._begins_twice.items()
        ]


def _why_unknown(engine: ServerEngine, directory: Path) -> str | None:
    """Return why chat prompts are not checked; None if the model's chat template determines them."""
    for name in CHAT_ARGUMENTS:
        if name_in(engine.args, name) in engine.args:
            return f"chat prompts, because engine.args.{name} changes how SGLang builds them"
    config = read_config(engine.model, engine.args.get("revision"))
    kind, architectures = config.get("model_type"), config.get("architectures") or ()
    if kind in OWN_CHAT_MODELS or any(str(name).startswith(_OWN_RULES) for name in architectures):
        return f"chat prompts, because SGLang has its own rules for the chat prompts of {kind}"
    if not has_chat_template(directory):
        return f"chat prompts, because there is no chat template among the files of {engine.model}"
    return None
