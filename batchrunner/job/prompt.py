"""The section `prompt` of a job: how a row becomes a prompt."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from batchrunner.core.media import KIND_OF_FIELD, PDF_FIELD, page_ranges
from batchrunner.job.fields import PythonFunction, Spec, UserPath, refuse
from batchrunner.job.sampling import FromColumn

DEFAULT_DPI = 150.0
"""Default resolution of a page in dots per inch, at which the small print of a letter is legible."""

MaxPixels: TypeAlias = Annotated[int, Field(ge=28 * 28)]
"""Pixels of an image: at least one token of the most common models."""


class MediaFiles(Spec):
    """Where files of rows may lie."""

    folder: UserPath | None = None
    """Folder of the files: relative paths begin there, and a path that leads out of it fails its row. By
    default it is the folder of the input file that has the row; for rows of a program it is the current
    folder, and paths may lead anywhere. `/` allows all files."""
    allow_urls: bool = False
    """Whether http:// and https:// URLs are downloaded. Addresses that are not public (of this machine, of
    private networks, link-local) are refused in any case."""


class MediaSpec(MediaFiles):
    """Columns with files that are sent with prompts."""

    columns: Annotated[list[str], Field(min_length=1)]
    """Columns with files: bytes of a file, a struct {bytes, path} as Hugging Face datasets have it, a path, a
    URL, a data URL, or a list of these."""
    placeholder: Annotated[str, Field(min_length=1)] | None = None
    """Text that stands for a file in `prompt.text`, which has no chat template. It is the model's own token,
    such as `<image>`. In messages SGLang inserts the token."""

    @field_validator("columns", mode="before")
    @classmethod
    def _one_alone(cls, columns: object) -> object:
        return [columns] if isinstance(columns, str) else columns


class ImagesSpec(MediaSpec):
    """Columns with images, and how images are sent."""

    max_pixels: MaxPixels | None = None
    """Maximum number of pixels of an image (width times height); a larger image is scaled down. By default
    images keep their size, and the model's own processor decides."""


class PdfSpec(MediaFiles):
    """A column with PDF documents, whose pages are sent as images."""

    column: str
    """Column with the documents: bytes of a file, a struct {bytes, path}, a path, a URL or a data URL."""
    pages: FromColumn | Annotated[int, Field(ge=1)] | str = "all"
    """Pages of a document, counted from 1: `all`, a number, or ranges such as `1-3,7`. Pages that a document
    lacks are left out of ranges. `{column: NAME}` takes such a value from each row: with page numbers in the
    column, each row is a page."""
    dpi: Annotated[float, Field(gt=0, le=1200)] = DEFAULT_DPI
    """Resolution of an image in dots per inch. At 150, a page of 8.5 by 11 inches has 2.1 million pixels."""
    max_pixels: MaxPixels | None = None
    """Maximum number of pixels of an image; a larger page gets fewer dots per inch."""

    @field_validator("pages")
    @classmethod
    def _known(cls, pages: Any) -> Any:
        if isinstance(pages, str) and pages != "all":
            page_ranges(pages)
        return pages

    @property
    def columns(self) -> list[str]:
        """The only column, as a list, as in the sections for other files."""
        return [self.column]

    @property
    def page_column(self) -> str | None:
        """Column with the page numbers; None if all rows use the same pages."""
        return self.pages.column if isinstance(self.pages, FromColumn) else None


class MessageTemplate(Spec):
    """A message of the prompt."""

    role: Literal["system", "user", "assistant"]
    """Role of the speaker."""
    content: str
    """Jinja2 template of the message, over the columns of a row."""


class FieldsSpec(Spec):
    """Columns that templates show together, as `{{ fields }}`: a line `name: value` for each."""

    columns: Annotated[list[str], Field(min_length=1)]
    """Names of the columns. A null is `null`, and a list or a struct is JSON."""
    order: Literal["auto", "written"] = "auto"
    """Order of the lines. `auto`: the order in which rows share the longest prefixes, judged by a sample of
    the input, so that the engine's cache holds more of each prompt. The first start decides, and the run
    keeps the order. `written`: the order of `columns`."""


class PromptSpec(Spec):
    """A row as a prompt: `user` (and `system`), `messages`, `text`, `input_ids`, `python` or `rollout`."""

    is_batch: ClassVar[bool] = False
    """Whether the rows are the requests of a batch file."""

    images: ImagesSpec | None = None
    """Columns with images: names, or `columns` with `folder`, `allow_urls`, `placeholder`, `max_pixels`. A
    template places them; else they come before the last user message."""
    audio: MediaSpec | None = None
    """Columns with sound, as for `images`: WAV, FLAC, MP3, Ogg, AAC, AIFF, AMR, MP4, WebM."""
    videos: MediaSpec | None = None
    """Columns with videos, as for `images`: MP4, MOV, WebM, MKV, AVI, MPEG, Ogg, FLV, WMV."""
    pdf: PdfSpec | None = None
    """Column with PDF documents, whose pages are sent as images: a name, or `column` with `pages`, `dpi`,
    `max_pixels`, `folder`, `allow_urls`."""

    @field_validator(*KIND_OF_FIELD, mode="before")
    @classmethod
    def _columns_alone(cls, media: Any, about: ValidationInfo) -> Any:
        return media_part(str(about.field_name), media)

    @model_validator(mode="after")
    def _one_meaning(self) -> PromptSpec:
        if len({*self.media_columns}) < len(self.media_columns):
            raise ValueError("a column with files is given twice")
        return self

    @property
    def media(self) -> dict[str, MediaSpec | PdfSpec]:
        """The fields with files that the job gives, by name."""
        specs = {field: getattr(self, field) for field in KIND_OF_FIELD}
        return {field: spec for field, spec in specs.items() if spec is not None}

    @property
    def media_columns(self) -> list[str]:
        """Columns that stand for files in templates."""
        return [column for spec in self.media.values() for column in spec.columns]

    system: str | None = None
    """Jinja2 template of the system message."""
    user: str | None = None
    """Jinja2 template of the user message."""
    messages: str | Annotated[list[MessageTemplate], Field(min_length=1)] | None = None
    """A list of messages with `role` and a Jinja2 template as `content`; if the last one is an assistant's,
    it is the beginning of the answer. Or a column of conversations: `{role, content}`, ShareGPT's `{from,
    value}`, or JSON of these."""
    continue_: Annotated[bool | None, Field(alias="continue")] = None
    """Take an assistant's message at the end of a conversation in a column as the beginning of the answer.
    Unset: that message is left out."""
    text: str | None = None
    """Jinja2 template of the whole prompt, or the name of a column with whole prompts. No chat template is
    applied."""
    input_ids: str | None = None
    """Column with prompts as lists of token ids."""
    python: PythonFunction | None = None
    """Function whose argument is the row, a dict. It returns messages, a text (no chat template), token ids,
    or None to leave the row out."""
    rollout: PythonFunction | None = None
    """Asynchronous function whose arguments are the row, a dict, and `generate`. It returns a dict of
    columns, a list of such dicts for several rows, or None."""
    tools: str | Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    """Tools of a chat in OpenAI's form, `{type: function, function: {name, description, parameters}}`, or the
    column with such lists, also as JSON. The server needs a `--tool-call-parser`."""
    fields: FieldsSpec | None = None
    """`columns` that templates show as `{{ fields }}`, a line `name: value` each. `order: auto` is the order
    in which rows share the longest prefixes; `order: written` is the order of `columns`."""
    truncate: Literal["head", "tail", "middle"] | None = None
    """Part that is removed from a prompt that leaves no room for `max_new_tokens`. Of messages, only the last
    user message is truncated. Unset: the row fails. Never truncated: messages with tools, names, other roles,
    a `structural_tag` or a begun answer."""
    choices: str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """With `task: score`: texts that may follow `text`. Either a list for all rows, or a column with a list
    for each row."""
    documents: str | None = None
    """With `task: rerank`: column with the documents for the query in `text`, each value a list or one
    document."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, such as `{enable_thinking: false}`."""

    @property
    def continues(self) -> bool:
        """Whether the assistant's last message is the beginning of the answer."""
        return isinstance(self.messages, list) or self.python is not None or self.continue_ is True

    @property
    def is_chat(self) -> bool:
        """Whether prompts are messages, or may be."""
        return any(kind is not None for kind in (self.user, self.messages, self.python, self.rollout))

    @field_validator("tools")
    @classmethod
    def _are_tools(cls, value: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]] | None:
        problem = tool_problem(value) if isinstance(value, list) else None
        if problem is not None:
            raise ValueError(problem)
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> PromptSpec:
        if self.is_batch:
            return self
        kinds = ("user", "messages", "text", "input_ids", "python", "rollout")
        kinds_here = [name for name in kinds if getattr(self, name) is not None]
        if len(kinds_here) != 1:
            raise ValueError(
                f"give exactly one of {', '.join(kinds)} (got {', '.join(kinds_here) or 'none'})"
            )
        (kind,) = kinds_here
        in_column = isinstance(self.messages, str)
        allowed = {
            "fields": kind in {"user", "text"} or isinstance(self.messages, list),
            "system": kind == "user",
            "continue_": in_column,
            "tools": self.is_chat,
            "chat_template_kwargs": self.is_chat,
            "pdf": kind in {"user", "messages"},
            "truncate": self.tools is None and not self.media,
        }
        for name in KIND_OF_FIELD:
            allowed.setdefault(name, kind in {"user", "messages", "text"})
        useless = [
            name.rstrip("_") for name, fits in allowed.items() if getattr(self, name) is not None and not fits
        ]
        beside = ", ".join(f"`{key}`" for key in self.model_dump(exclude_none=True) if key not in useless)
        faults = [f"`{name}` has no effect beside {beside}: leave it out" for name in useless]
        if isinstance(self.messages, list) and all(m.role == "assistant" for m in self.messages):
            faults.append("`messages` has no message that the assistant could answer")
        refuse(faults)
        return self


def media_part(field: str, value: Any) -> Any:
    """Return the section of a field with files, which a job may write as its columns alone."""
    if not isinstance(value, (str, list, tuple)):
        return value
    return {"column" if field == PDF_FIELD else "columns": value}


class BatchRules(NamedTuple):
    """Rules for the lines of a batch file."""

    allows_repeated: bool
    """Whether several lines may have one custom_id."""


class BatchPrompts(PromptSpec):
    """Rows that are the requests of a batch file; a line that is no request fails.

    The rows have the columns `custom_id`, `url` and `body`, and the results a last column, `response`.
    `batchrun batch` makes it; no job file can.
    """

    is_batch = True

    allows_repeated: bool = False
    """Whether several lines may have one custom_id."""


def tool_problem(tools: Any) -> str | None:
    """Return the problem of a list of tools; None for a valid list."""
    if not isinstance(tools, list):
        return "not a list of tools"
    names = set()
    for number, tool in enumerate(tools, 1):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or tool.get("type", "function") != "function":
            return f"tool {number} is not of the form {{type: function, function: {{name: …}}}}"
        if name in names:
            return f"two tools have the name {name!r}"
        names.add(name)
    return None
