"""Preparation of requests: reads their files, and tokenizes their prompts.

The client tokenizes prompts only if its tokens are certain to equal the engine's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchrunner.core.engine_info import EngineInfo, TokenizerInfo
from batchrunner.core.errors import (
    AttemptFailedError,
    CannotTokenizeError,
    EngineBusyError,
    JobError,
    RequestError,
    RowRefusedError,
)
from batchrunner.core.files import read_json
from batchrunner.core.types import MEDIA, Outcome, PromptKind, Request
from batchrunner.engines.base import Engine
from batchrunner.job.spec import Job
from batchrunner.job.tasks import ChoiceTask, ClassifyTask, RerankTask, ScoreTask
from batchrunner.output.events import EventLog
from batchrunner.sglang.model_files import class_names, vocabulary_of

if TYPE_CHECKING:
    from batchrunner.core.hook_pool import HookPool
    from batchrunner.input.tokenize.encoder import Encoder

log = logging.getLogger(__name__)

ROWS_COMPARED = 4
"""Maximum number of rows of the first batch whose tokens are compared with the engine's."""
ATTEMPTS = 7
"""Maximum number of requests to the engine for the tokens of one prompt. The pauses between the requests last
16 s in all."""
CHARACTERS_COMPARED = 65_536
"""Prompts with at least this many characters are not compared with the engine's tokens, which come as long
JSON. Shorter prompts show a difference as well."""
PROBE = (
    "  Zürich, naïve Ελληνικά РУССКИЙ 日本語テスト 한국어 עברית العربية हिन्दी ไทย"
    " 👩\u200d👩\u200d👧 🇨🇭 e\u0301 \ufb01 \u00a0\u200b\ufeff … “quotes” --- ___ \\u0041 &amp; %20"
    "\t1234567890 3.14159\n\n    def f(x):\r\n\treturn {'a': x**2}  # it's WE'LL don't\n"
    "<s></s><|endoftext|><|im_end|>[INST]<bos></think> "
)
"""A text on which tokenizers are likely to differ: scripts, spaces, digits, code, special tokens, Unicode
normal forms."""
_SAMPLING = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
"""Sampling parameters that SGLang's chat endpoint takes from generation_config.json
(`get_default_sampling_params`)."""


def _field_needing_client(job: Job, kind: PromptKind, info: EngineInfo) -> str | None:
    """Return the job field that requires tokenization by the client; None if the engine may tokenize."""
    if job.tokenize == "client":
        return "tokenize"
    if job.prompt.truncate is not None:
        return "prompt.truncate"
    if kind == "messages" and "prompt_logprobs" in job.output.asked and not info.simulated:
        return "output.columns: prompt_logprobs"  # the chat endpoint returns no logprobs of the prompt
    return None


def make_encoder(job: Job, info: EngineInfo, kind: PromptKind) -> Encoder:
    """Return the encoder of a job's prompts.

    Raises CannotTokenizeError if its tokens could differ from the engine's.
    """
    if kind == "body":
        raise CannotTokenizeError("the requests of a batch file are sent unchanged")
    engine_tokenizer = info.tokenizing
    truncate = job.prompt.truncate
    if truncate is not None and info.context_length is None:
        raise CannotTokenizeError("the engine does not report its context length")
    # Prompts that are token ids already need no tokenizer.
    directory, chat_sampling = None, None
    if kind != "input_ids":
        usable = _usable_tokenizer(job, info, kind)
        directory = Path(usable.tokenizer).expanduser()
        chat_sampling = _chat_sampling(usable)
    from batchrunner.input.tokenize.encoder import (  # noqa: PLC0415 - the engine tokenises for most jobs
        Encoder,
        TokenBudget,
    )

    # If the engine truncates prompts itself, no prompt is too long.
    engine_truncates = truncate is None and engine_tokenizer is not None and engine_tokenizer.cuts
    context = None if engine_truncates else info.context_length
    budget = TokenBudget(context, engine_tokenizer.longest_prompt if engine_tokenizer else None)
    return Encoder(kind, directory, budget, truncate, chat_sampling=chat_sampling)


def _usable_tokenizer(job: Job, info: EngineInfo, kind: PromptKind) -> TokenizerInfo:
    """Return the engine's tokenizer; raises CannotTokenizeError if the client cannot use it."""
    tokenizer = info.tokenizing
    if tokenizer is None:
        raise CannotTokenizeError("the engine reports no tokenizer")
    reason = tokenizer.why_server or (_why_server_chat(job, tokenizer) if kind == "messages" else None)
    if reason is not None:
        raise CannotTokenizeError(reason)
    if not Path(tokenizer.tokenizer).expanduser().is_dir():
        raise CannotTokenizeError(f"the tokenizer's directory {tokenizer.tokenizer} is not on this machine")
    return tokenizer


def _why_server_chat(job: Job, tokenizer: TokenizerInfo) -> str | None:
    """Return the reason why only the server can tokenize this job's messages; None if the client can too."""
    if "tool_calls" in job.output.asked:
        return "output.columns: only the server can find tool_calls"
    if job.prompt.tools is not None or job.sampling.tool_choice is not None:
        return "only the server can write prompt.tools into the prompt"
    from batchrunner.input.tokenize.chat_template import RESERVED_ARGUMENTS  # noqa: PLC0415 - as above

    messages = job.prompt.messages
    if job.prompt.continue_ or (isinstance(messages, list) and messages[-1].role == "assistant"):
        return "only the server can put the beginning of an answer into the prompt"
    reserved = sorted(RESERVED_ARGUMENTS & set(job.prompt.chat_template_kwargs or {}))
    if reserved:
        return f"only the server can set prompt.chat_template_kwargs.{reserved[0]}"
    return tokenizer.why_server_chat


def _chat_sampling(tokenizer: TokenizerInfo) -> dict[str, Any]:
    """Return the sampling parameters that the chat endpoint adds.

    They are the model's defaults, and no limit of the output length.
    """
    config = read_json(Path(tokenizer.model) / "generation_config.json") if tokenizer.model_sampling else {}
    defaults = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
    return {"max_new_tokens": None, **defaults}


async def _compare_tokens(engine: Engine, encoder: Encoder, requests: Sequence[Request]) -> int:
    """Compare the client's tokens of some prompts with the engine's; return how many were compared.

    Raises CannotTokenizeError if tokens differ, or if no prompt could be compared.
    """
    # Compare some short prompts of the job, and a test text that tokenizers are likely to split differently.
    short = [request for request in requests if len(repr(request.prompt)) < CHARACTERS_COMPARED]
    rows = short[:ROWS_COMPARED]
    probe: Any = PROBE
    if requests[0].kind == "messages":
        probe = [{"role": "user", "content": PROBE}]
    samples = [*rows, requests[0]._replace(prompt=probe)]
    names = [*(f"row {request.ref.row}" for request in rows), "a test text"]
    client_tokens = await asyncio.to_thread(encoder.token_ids, samples)
    compared = 0
    for request, ours, name in zip(samples, client_tokens, names, strict=True):
        theirs = await engine_tokens(engine, request)
        # If both refuse a text, such as one that is too long, it is not compared.
        refusals = [str(tokens) for tokens in (ours, theirs) if isinstance(tokens, RowRefusedError)]
        if len(refusals) == 1:
            raise CannotTokenizeError(f"only one of engine and client can tokenize {name}: {refusals[0]}")
        if not refusals:
            if ours != theirs:
                raise CannotTokenizeError(f"the engine's tokenizer splits {name} into other tokens")
            compared += 1
    if not compared:
        raise CannotTokenizeError(f"no tokens could be compared: {client_tokens[0]}")
    return compared


async def engine_tokens(
    engine: Engine, request: Request, *, special: bool = True
) -> list[int] | RowRefusedError:
    """Ask the engine for the tokens of a prompt; raises CannotTokenizeError if it does not return them.

    If the engine refuses the prompt, return its error. With `special`, the tokens include the special tokens
    at the beginning and end of a prompt.
    """

    def is_transient(failure: BaseException) -> bool:
        return isinstance(failure, (AttemptFailedError, EngineBusyError))

    from tenacity import AsyncRetrying  # noqa: PLC0415 - few jobs ask

    from batchrunner.core.retry import backoff  # noqa: PLC0415

    retrying = AsyncRetrying(**backoff(is_transient, attempts=ATTEMPTS))
    try:
        tokens: list[int] | None = await retrying(engine.tokens_of, request, special=special)
    except RowRefusedError as refusal:
        return refusal
    except RequestError as failure:
        raise CannotTokenizeError(f"the engine failed to tokenize: {failure}") from None
    if tokens is None:
        raise CannotTokenizeError("the engine does not return tokens (no /v1/tokenize)")
    return tokens


ASKED_AT_ONCE = 16
"""Maximum number of simultaneous `/v1/tokenize` requests for texts that only the engine can tokenize."""
SIMULATED_TOKEN = 4
"""Number of characters per token of the simulated engine."""


class RowTokenizer:
    """Makes requests ready to send: reads their media files, and tokenizes prompts, labels and choices."""

    def __init__(
        self,
        job: Job,
        kind: PromptKind | None,
        engine: Engine,
        info: EngineInfo,
        events: EventLog,
        functions: HookPool | None,
    ) -> None:
        """Prepare prompts of one `kind`; None means prompts of any kind.

        `functions` are the Python functions of the job that prepare media files. Raises CannotTokenizeError
        if the client must tokenize the prompts but cannot do so.
        """
        self._functions = functions if job.prompt.media else None
        self._job, self._engine, self._info, self._events = job, engine, info, events
        self._task = job.forward
        if isinstance(self._task, ClassifyTask):
            self._task = dataclasses.replace(self._task, names=class_names(info.model))
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        """Limits the simultaneous requests to the engine's tokenizer."""
        self._choosing = asyncio.Lock()
        """Held while one batch decides whether client or engine tokenizes prompts of its kind."""
        self._encoders: dict[PromptKind, Encoder | None] = {}
        """Encoders by kind of prompt; None for kinds that the engine tokenizes."""
        self._compared: set[PromptKind] = set()
        """Kinds of prompts for which the client's tokens were already compared with the engine's."""
        if kind is not None and not isinstance(self._task, RerankTask):
            self._choose_place(kind)

    async def tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests, ready to send; an error (Outcome) replaces a request that cannot be sent.

        Raises HookLostError; the first call may raise JobError and CannotTokenizeError.
        """
        if self._functions is None:
            return await self._tokenize(requests)
        unread: list[int] = []
        for index, request in enumerate(requests):
            if any(file.ready is None for file in request.media):
                unread.append(index)
        items = await _replaced(requests, unread, self._with_files)
        readable = [index for index, item in enumerate(items) if isinstance(item, Request)]
        return await _replaced(items, readable, self._tokenize)

    async def _with_files(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests with prepared media files; an error replaces a request whose files fail."""
        assert self._functions is not None
        rows = [(request.media,) for request in requests]
        results = await asyncio.to_thread(self._functions.call_many, MEDIA, rows)
        if len(results) < len(rows):  # The pool has been closed, so the run is ending.
            raise asyncio.CancelledError
        items: list[Request | Outcome] = []
        for request, result in zip(requests, results, strict=True):
            # Without an error, `value` is either the prepared files or, as a text, the reason why there are
            # none.
            error = result.error if result.error is not None else result.value
            if isinstance(error, str):
                items.append(
                    Outcome(ref=request.ref, completion=None, error=error, latency_s=None, attempts=0)
                )
            else:
                files = zip(request.media, result.value, strict=True)
                media = tuple(
                    file._replace(content=b"", ready=content, tokens=tokens)
                    for file, (content, tokens) in files
                )
                items.append(request._replace(media=media))
        return items

    async def _tokenize(self, requests: list[Request]) -> list[Request | Outcome]:
        """Tokenize prompts, and also the labels or choices if the job's task has any.

        The media files of the requests must already be prepared.
        """
        # The engine tokenizes the query and the document together, as a pair.
        if isinstance(self._task, RerankTask):
            return [*requests]
        if isinstance(self._task, ChoiceTask):
            return await self._with_choices(requests)
        # The engine tokenizes the labels once, before the first prompts. A simulated engine has no
        # vocabulary, so its labels have no token ids.
        has_vocabulary = not self._info.simulated
        if isinstance(self._task, ScoreTask) and requests and has_vocabulary and not self._task.label_ids:
            self._task = await self._with_labels(self._task, requests[0])
        items = await self._prompts(requests)
        if not isinstance(self._task, (ClassifyTask, ScoreTask)):
            return items
        return [item if isinstance(item, Outcome) else item._replace(task=self._task) for item in items]

    async def _prompts(self, requests: list[Request]) -> list[Request | Outcome]:
        """Tokenize the prompts. Each kind of prompt (such as text or messages) has its own encoder."""
        items: list[Request | Outcome] = [*requests]
        for kind in {request.kind for request in requests}:
            indexes = [index for index, request in enumerate(requests) if request.kind == kind]
            items = await _replaced(items, indexes, self._encode)
        return items

    def _choose_place(self, kind: PromptKind) -> None:
        """Choose whether the client or the engine tokenizes prompts of a kind.

        Raises CannotTokenizeError if the client must tokenize the prompts but cannot do so.
        """
        self._encoders[kind] = None
        may_help = self._job.tokenize == "auto" and kind != "input_ids" and not self._info.simulated
        if may_help or _field_needing_client(self._job, kind, self._info) is not None:
            try:
                self._encoders[kind] = make_encoder(self._job, self._info, kind)
            except CannotTokenizeError as why:
                self._leave_to_engine(kind, why)

    async def _encode(self, requests: list[Request]) -> list[Request | Outcome]:
        """Tokenize requests of one kind in a thread; return them unchanged if the engine tokenizes them."""
        kind = requests[0].kind
        # The first batch decides whether client or engine tokenizes this kind of prompt. Other batches wait.
        async with self._choosing:
            if kind not in self._encoders:
                self._choose_place(kind)
            encoder = self._encoders[kind]
            if encoder is not None and kind not in self._compared:
                await self._compare(kind, encoder, requests)
                encoder = self._encoders[kind]  # None if client and engine compute different tokens
        if encoder is None:
            return [*requests]
        return await asyncio.to_thread(encoder.encode, requests)

    async def _compare(self, kind: PromptKind, encoder: Encoder, requests: Sequence[Request]) -> None:
        """Compare the client's tokens of the first rows, and of a test text, with the engine's.

        If they differ, or cannot be compared, the engine tokenizes all prompts of this kind.
        """
        encodable = [request for request in requests if encoder.can_encode(request)]
        if not encodable:
            return
        self._compared.add(kind)
        if kind != "input_ids":
            try:
                prompts = await _compare_tokens(self._engine, encoder, encodable)
            except CannotTokenizeError as why:
                self._leave_to_engine(kind, why)
                return
            log.debug(
                "batchrunner tokenizes the prompts itself: for %d prompts its tokens equal the engine's",
                prompts,
            )
        self._events.write("tokenize", where="client")

    def _leave_to_engine(self, kind: PromptKind, why: CannotTokenizeError) -> None:
        """Let the engine tokenize prompts of a kind; raises CannotTokenizeError if the client must do so."""
        field = _field_needing_client(self._job, kind, self._info)
        if field is not None:
            raise CannotTokenizeError(
                f"{field}: batchrunner cannot tokenize the prompts itself: {why}"
            ) from None
        self._encoders[kind] = None
        log.debug("the engine tokenizes the prompts: %s", why)
        self._events.write("tokenize", where="server", why=str(why))

    async def _with_choices(self, requests: list[Request]) -> list[Request | Outcome]:
        """Return the requests with the token ids of their prompts and choices."""
        if self._info.simulated:
            return [_simulated(request) for request in requests]
        # Tokenize the texts of all rows at once: for each row the prompt, then the prompt with each choice.
        texts = [
            request._replace(prompt=request.prompt + choice, items=())
            for request in requests
            for choice in ("", *request.items)
        ]
        token_ids = await asyncio.gather(*map(self._ids_of_text, await self._prompts(texts)))
        items: list[Request | Outcome] = []
        begin = 0
        for request in requests:
            end = begin + 1 + len(request.items)
            items.append(_split_choices(request, token_ids[begin:end]))
            begin = end
        return items

    async def _ids_of_text(self, item: Request | Outcome) -> list[int] | str:
        """Return the token ids of a choice of `prompt.choices`, or why it cannot be tokenized."""
        if isinstance(item, Outcome):
            return item.error or ""
        if item.kind == "input_ids":
            return list(item.prompt)
        if not item.prompt:
            return "the prompt is empty"
        async with self._asking:
            try:
                tokens = await engine_tokens(self._engine, item)
            except CannotTokenizeError as why:
                raise CannotTokenizeError(
                    f"prompt.choices: {why}",
                    hint="copy the model's tokenizer to this machine, to the path that the engine uses",
                ) from None
        return str(tokens) if isinstance(tokens, RowRefusedError) else tokens

    async def _with_labels(self, task: ScoreTask, request: Request) -> ScoreTask:
        """Return the task with the token ids of its labels; raises JobError if a label is not usable.

        Each label is sent to the engine's tokenizer in a copy of `request`.
        """
        vocabulary = vocabulary_of(self._info.model)
        labels: dict[int, str | int] = {}  # by token id
        for label in task.labels:
            token_id = await self._id_of(label, request)
            if token_id in labels:
                raise JobError(f"labels: {labels[token_id]!r} and {label!r} are the same token, {token_id}")
            if vocabulary is not None and token_id >= vocabulary:
                raise JobError(f"labels: {label!r}: the model's token ids are 0 to {vocabulary - 1}")
            labels[token_id] = label
        return dataclasses.replace(task, label_ids=tuple(labels))

    async def _id_of(self, label: str | int, request: Request) -> int:
        """Return the token id of a label; raises JobError if the label is not a single token."""
        if isinstance(label, int):
            return label
        probe = request._replace(kind="text", prompt=label, task=None)
        try:
            tokens = await engine_tokens(self._engine, probe, special=False)
        except CannotTokenizeError as why:
            raise CannotTokenizeError(f"labels: {why}", hint="give the token ids of the labels") from None
        if isinstance(tokens, RowRefusedError):
            raise JobError(f"labels: the engine's tokenizer refuses {label!r}: {tokens}")
        if len(tokens) != 1:
            raise JobError(
                f"labels: the model splits {label!r} into {len(tokens)} tokens "
                f"({', '.join(map(str, tokens))})",
                hint="a label must be a single token: use another text, a token id, or prompt.choices",
            )
        return tokens[0]


async def _replaced(
    items: Sequence[Any],
    indexes: Sequence[int],
    convert: Callable[[list[Request]], Awaitable[Sequence[Request | Outcome]]],
) -> list[Request | Outcome]:
    """Return a copy of `items` in which `convert` has replaced the items at `indexes`."""
    replaced = [*items]
    if indexes:
        results = await convert([items[index] for index in indexes])
        for index, result in zip(indexes, results, strict=True):
            replaced[index] = result
    return replaced


def _split_choices(request: Request, token_ids: Sequence[list[int] | str]) -> Request | Outcome:
    """Split tokenized texts (the prompt, then the prompt with each choice) into a prompt and choices.

    The new prompt is the longest common prefix of all these token lists. Each choice gets the tokens after
    it. If a tokenizer merges the end of the prompt and the start of a choice into one token, that token is no
    longer common. It belongs to the choice, and all other choices start at the same position.
    """
    error = next((ids for ids in token_ids if isinstance(ids, str)), None)
    encoded = [ids for ids in token_ids if not isinstance(ids, str)]
    shared_tokens = 0
    for ids_at_place in zip(*encoded, strict=False):
        if len(set(ids_at_place)) > 1:
            break
        shared_tokens += 1
    choices = tuple(ids[shared_tokens:] for ids in encoded[1:])
    if error is None and not shared_tokens:
        error = "prompt.choices: the prompt has no token before the choices"
    if error is None and not all(choices):
        error = f"prompt.choices: {request.items[choices.index([])]!r} adds no token to the prompt"
    if error is not None:
        return Outcome(ref=request.ref, completion=None, error=error, latency_s=None, attempts=0)
    return request._replace(kind="input_ids", prompt=encoded[0][:shared_tokens], item_ids=choices)


def _simulated(request: Request) -> Request:
    """Return a request with invented token ids for the simulated engine. Longer choices get more of them."""
    return request._replace(
        item_ids=tuple([0] * (len(item) // SIMULATED_TOKEN + 1) for item in request.items)
    )
