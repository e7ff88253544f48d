"""Section `prompt` of a job, which defines the prompt of each row."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field, ValidationInfo, field_validator, model_validator

from batchrunner.core.media import KIND_OF_FIELD, PDF_FIELD, page_ranges
from batchrunner.job.fields import PythonFunction, Spec, UserPath, refuse
from batchrunner.job.sampling import FromColumn

DEFAULT_DPI = 150.0
"""Default resolution of a PDF page in dots per inch, at which the small print of a letter is legible."""

MaxPixels: TypeAlias = Annotated[int, Field(ge=28 * 28)]
"""Maximum number of pixels of an image, at least those of one token in the most common models."""


class MediaFiles(Spec):
    """Folder that contains the files of rows, and whether files may be downloaded."""

    folder: UserPath | None = None
    """Folder of the files. Relative paths begin there, and a path that leads out of the folder fails its row.
    Default: the folder of the input file that has the row. For rows that a program passes, relative paths
    begin in the current folder, and paths may lead anywhere. `/` allows all files."""
    allow_urls: bool = False
    """Whether http:// and https:// URLs are downloaded. Addresses that are not public (of this machine, of
    private networks, link-local) are refused in any case."""


class MediaSpec(MediaFiles):
    """Columns with files that are sent with prompts."""

    columns: Annotated[list[str], Field(min_length=1)]
    """Columns with files: bytes of a file, a struct {bytes, path} as Hugging Face datasets have it, a path, a
    URL, a data URL, or a list of these."""
    placeholder: Annotated[str, Field(min_length=1)] | None = None
    """Text that stands for a file in `prompt.text`: the model's own token, such as `<image>`. Messages need
    no placeholder, because SGLang inserts the token."""

    @field_validator("columns", mode="before")
    @classmethod
    def _one_alone(cls, columns: object) -> object:
        return [columns] if isinstance(columns, str) else columns


class ImagesSpec(MediaSpec):
    """Columns with images, and the maximum size of an image."""

    max_pixels: MaxPixels | None = None
    """Maximum number of pixels of an image (width times height). A larger image is scaled down. Default:
    images keep their size, and the model's own processor may scale them."""


class PdfSpec(MediaFiles):
    """Column with PDF documents, whose pages are sent as images."""

    column: str
    """Column with the documents: bytes of a file, a struct {bytes, path}, a path, a URL or a data URL."""
    pages: FromColumn | Annotated[int, Field(ge=1)] | str = "all"
    """Pages of a document, counted from 1: `all`, a number, or ranges such as `1-3,7`. Pages of a range that
    a document does not have are left out. `{column: NAME}` takes the pages of each row from a column. If that
    column has numbers, each row has a single page."""
    dpi: Annotated[float, Field(gt=0, le=1200)] = DEFAULT_DPI
    """Resolution of the image of a page in dots per inch. At 150, a page of 8.5 by 11 inches has 2.1 million
    pixels."""
    max_pixels: MaxPixels | None = None
    """Maximum number of pixels of the image of a page. A larger page gets fewer dots per inch."""

    @field_validator("pages")
    @classmethod
    def _known(cls, pages: Any) -> Any:
        if isinstance(pages, str) and pages != "all":
            page_ranges(pages)  # `page_ranges` raises ValueError for invalid ranges.
        return pages

    @property
    def columns(self) -> list[str]:
        """List with the only column, like the field `columns` of other sections for files."""
        return [self.column]

    @property
    def page_column(self) -> str | None:
        """Column with the page numbers; None if all rows use the same pages."""
        return self.pages.column if isinstance(self.pages, FromColumn) else None


class MessageTemplate(Spec):
    """Message of the prompt."""

    role: Literal["system", "user", "assistant"]
    """Role of the speaker."""
    content: str
    """Jinja2 template of the message, over the columns of a row."""


class FieldsSpec(Spec):
    """Columns that a template shows together as `{{ fields }}`, with a line `name: value` for each column."""

    columns: Annotated[list[str], Field(min_length=1)]
    """Names of the columns. A null is shown as `null`, and a list or a struct as JSON."""
    order: Literal["auto", "written"] = "auto"
    """Order of the lines.

    `auto`: the order in which rows share the longest prefixes, so that the prefix cache saves the most work.
    The first start of the run decides it from a sample of the input, and later starts keep it. `written`: the
    order of `columns`.
    """


class PromptSpec(Spec):
    """Prompt of a row: `user` (and `system`), `messages`, `text`, `input_ids`, `python` or `rollout`."""

    is_batch: ClassVar[bool] = False
    """Whether the rows are the requests of a batch file."""

    images: ImagesSpec | None = None
    """Columns with images: either their names, or a mapping with `columns` and, if needed, `folder`,
    `allow_urls`, `placeholder` and `max_pixels`. A template prints a column to place its images. Other images
    come at the start of the last user message."""
    audio: MediaSpec | None = None
    """Columns with audio, written like `images`. Formats: WAV, FLAC, MP3, Ogg, AAC, AIFF, AMR, MP4, WebM."""
    videos: MediaSpec | None = None
    """Columns with videos, written like `images`. Formats: MP4, MOV, WebM, MKV, AVI, MPEG, Ogg, FLV, WMV."""
    pdf: PdfSpec | None = None
    """Column with PDF documents, whose pages are sent as images: either its name, or a mapping with `column`
    and, if needed, `pages`, `dpi`, `max_pixels`, `folder` and `allow_urls`."""

    @field_validator(*KIND_OF_FIELD, mode="before")
    @classmethod
    def _columns_alone(cls, media: Any, about: ValidationInfo) -> Any:
        return media_part(str(about.field_name), media)

    @model_validator(mode="after")
    def _one_meaning(self) -> PromptSpec:
        if len({*self.media_columns}) < len(self.media_columns):
            raise ValueError("two of images, audio, videos and pdf name the same column")
        return self

    @property
    def media(self) -> dict[str, MediaSpec | PdfSpec]:
        """The sections `images`, `audio`, `videos` and `pdf` that the job has, by name."""
        specs = {field: getattr(self, field) for field in KIND_OF_FIELD}
        return {field: spec for field, spec in specs.items() if spec is not None}

    @property
    def media_columns(self) -> list[str]:
        """Columns with files: those of `images`, `audio`, `videos` and `pdf`."""
        return [column for spec in self.media.values() for column in spec.columns]

    system: str | None = None
    """Jinja2 template of the system message."""
    user: str | None = None
    """Jinja2 template of the user message."""
    messages: str | Annotated[list[MessageTemplate], Field(min_length=1)] | None = None
    """Either a list of messages with `role` and a Jinja2 template as `content`, or the name of a column with
    conversations: lists of `{role, content}` or of ShareGPT's `{from, value}`, also as JSON. If the list of
    messages ends with an assistant message, the answer begins with that message."""
    continue_: Annotated[bool | None, Field(alias="continue")] = None
    """For conversations in a column that end with an assistant message: begin the answer with this message.
    Unset: leave the message out."""
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
    name of a column with lists of tools, also as JSON. The server needs a `--tool-call-parser`."""
    fields: FieldsSpec | None = None
    """Columns that templates show together as `{{ fields }}`, with a line `name: value` for each of
    `columns`. `order: auto` is the order in which rows share the longest prefixes, and `order: written` the
    order of `columns`."""
    truncate: Literal["head", "tail", "middle"] | None = None
    """Which part to remove from a prompt that leaves no room for `max_new_tokens`. In a chat, only the last
    user message is truncated. Unset: the row fails. Prompts with tools, names, unusual roles, a
    `structural_tag` or the beginning of an answer are never truncated."""
    choices: str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """With `task: score`: possible continuations of `text`, either a list for all rows, or the name of a
    column with a list for each row."""
    documents: str | None = None
    """With `task: rerank`: column with the documents for the query in `text`. Each value is a document or a
    list of documents."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template, such as `{enable_thinking: false}`."""

    @property
    def continues(self) -> bool:
        """Whether the answer continues an assistant message at the end of the prompt."""
        return isinstance(self.messages, list) or self.python is not None or self.continue_ is True

    @property
    def is_chat(self) -> bool:
        """Whether prompts are chat messages. A Python function may also return other prompts."""
        return any(kind is not None for kind in (self.user, self.messages, self.python, self.rollout))

    @property
    def comes_from_function(self) -> bool:
        """Whether a Python function makes the prompts, so that their kind is known row by row."""
        return self.python is not None or self.rollout is not None

    @field_validator("tools")
    @classmethod
    def _are_tools(cls, value: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]] | None:
        problem = tool_problem(value) if isinstance(value, list) else None
        if problem is not None:
            raise ValueError(problem)
        return value

    @model_validator(mode="after")
    def _check_fields(self) -> PromptSpec:
        """Raise ValueError unless the job has exactly one kind of prompt, and only fields that affect it."""
        if self.is_batch:
            return self
        kinds = ("user", "messages", "text", "input_ids", "python", "rollout")
        kinds_in_job = [name for name in kinds if getattr(self, name) is not None]
        if len(kinds_in_job) != 1:
            raise ValueError(
                f"give exactly one of {', '.join(kinds)} (got {', '.join(kinds_in_job) or 'none'})"
            )
        (kind,) = kinds_in_job
        has_templates = kind in {"user", "text"} or isinstance(self.messages, list)
        # Whether each optional field has an effect on prompts of this kind.
        has_effect = {
            "fields": has_templates,
            "system": kind == "user",
            # A list of templates needs no `continue`: the model continues it if its last message is from the
            # assistant.
            "continue_": isinstance(self.messages, str),
            "tools": self.is_chat,
            "chat_template_kwargs": self.is_chat,
            "pdf": kind in {"user", "messages"},
            # The server tokenizes prompts with tools or files, so batchrunner cannot truncate them.
            "truncate": self.tools is None and not self.media,
        }
        # The other fields with files: `images`, `audio` and `videos`.
        for name in KIND_OF_FIELD:
            has_effect.setdefault(name, kind in {"user", "messages", "text"})
        useless_keys = []
        for name, affects_prompts in has_effect.items():
            if getattr(self, name) is not None and not affects_prompts:
                useless_keys.append(name.rstrip("_"))  # `continue_` is written `continue` in a job
        other_keys = [key for key in self.model_dump(exclude_none=True) if key not in useless_keys]
        others = ", ".join(f"`{key}`" for key in other_keys)
        faults = [f"`{key}` has no effect together with {others}: leave it out" for key in useless_keys]
        if isinstance(self.messages, list) and all(item.role == "assistant" for item in self.messages):
            faults.append("`messages` has only assistant messages: add a message for the assistant to answer")
        refuse(faults)
        return self


def media_part(field: str, value: Any) -> Any:
    """Return the full section of a field such as `images`, for which a job may give only the column names."""
    if not isinstance(value, (str, list, tuple)):
        return value
    return {"column" if field == PDF_FIELD else "columns": value}


class BatchRules(NamedTuple):
    """Rules for the lines of a batch file."""

    allows_repeated: bool
    """Whether several lines may have the same custom_id."""
    endpoint: str | None
    """Endpoint that each line must name; None if a file may have all endpoints of one task."""


class BatchPrompts(PromptSpec):
    """Section `prompt` of the job of `batchrun batch`, whose rows are the requests of a batch file.

    A row has the columns `custom_id`, `url` and `body`. The results have an additional last column,
    `response`. A line without a valid request becomes a failed row. A job file cannot have this section.
    """

    is_batch = True

    allows_repeated: bool = False
    """Whether several lines may have the same custom_id."""
    endpoint: str | None = None
    """Endpoint that each line must name; None if a file may have all endpoints of one task."""


def tool_problem(tools: Any) -> str | None:
    """Return the reason why a value is not a list of tools in OpenAI's format; None if it is one."""
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
