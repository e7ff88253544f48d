"""The parts of a job's prompt that name columns with files: images, audio, videos, PDF documents."""

from typing import Annotated, Any, TypeAlias

from pydantic import Field, field_validator, model_validator

from batchrunner.core.media import AUDIO, IMAGE, KIND_OF_FIELD, PDF_FIELD, VIDEO
from batchrunner.core.pages import page_ranges
from batchrunner.job.fields import Spec, UserPath
from batchrunner.job.sampling import FromColumn

DEFAULT_DPI = 150.0
"""Dots an inch of a page, unless the job says otherwise: the small print of a letter can be read."""

MaxPixels: TypeAlias = Annotated[int, Field(ge=28 * 28)]
"""At least one token of the models that are most used."""


class MediaFiles(Spec):
    """Where files may be."""

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
    """What stands for a file in `prompt.text`, which has no chat template: the model's own token, such as
    `<image>`. In messages SGLang puts it in."""

    @field_validator("columns")
    @classmethod
    def _once(cls, columns: list[str]) -> list[str]:
        if len({*columns}) < len(columns):
            raise ValueError("has a column twice")
        return columns


class ImagesSpec(MediaSpec):
    """Columns with images, and how these are sent."""

    max_pixels: MaxPixels | None = None
    """Most pixels of an image (width times height); a larger one is made smaller, with its proportions. By
    default images keep their size, and the model's own processor decides."""


class PdfSpec(MediaFiles):
    """A column with PDF documents, whose pages are sent as images."""

    column: str
    """Column with the documents: bytes of a file, a struct {bytes, path}, a path, a URL or a data URL."""
    pages: FromColumn | Annotated[int, Field(ge=1)] | str = "all"
    """Pages of a document, counted from 1: `all`, a number, or ranges such as `1-3,7`, of which a shorter
    document has fewer; or `{column: NAME}`, whose values are such: with page numbers each row is a page."""
    dpi: Annotated[float, Field(gt=0, le=1200)] = DEFAULT_DPI
    """Dots an inch of an image; a page of 8.5 by 11 inches at 150 has 2.1 million pixels."""
    max_pixels: MaxPixels | None = None
    """Most pixels of an image; a larger page gets fewer dots an inch."""

    @field_validator("pages")
    @classmethod
    def _known(cls, pages: Any) -> Any:
        if isinstance(pages, str) and pages != "all":
            page_ranges(pages)
        return pages

    @property
    def page_column(self) -> str | None:
        """Column that says which pages."""
        return self.pages.column if isinstance(self.pages, FromColumn) else None


class PromptWithMedia(Spec):
    """The fields of a prompt that bring files."""

    images: ImagesSpec | None = None
    """Columns with images, as a list of names or with options. In a template such a column stands for its
    images; if no template has it, they come before the text of the last user message."""
    audio: MediaSpec | None = None
    """Columns with sound, as a list of names or with options: WAV, FLAC, MP3, Ogg, AAC, AIFF, AMR, MP4 or
    WebM files. They are sent as they are, and have their place in the prompt as images do."""
    videos: MediaSpec | None = None
    """Columns with videos, as a list of names or with options: MP4, MOV, WebM, MKV, AVI, MPEG, Ogg, FLV or
    WMV files. They are sent as they are, and have their place in the prompt as images do."""
    pdf: PdfSpec | None = None
    """Column with PDF documents, as its name or with options. Its pages are images of the prompt."""

    @field_validator(IMAGE.field, AUDIO.field, VIDEO.field, mode="before")
    @classmethod
    def _columns_alone(cls, media: object) -> object:
        if isinstance(media, str):
            return {"columns": [media]}
        return {"columns": media} if isinstance(media, list) else media

    @field_validator(PDF_FIELD, mode="before")
    @classmethod
    def _column_alone(cls, pdf: object) -> object:
        return {"column": pdf} if isinstance(pdf, str) else pdf

    @model_validator(mode="after")
    def _one_meaning(self) -> "PromptWithMedia":
        owner: dict[str, str] = {}
        for field in self.media:
            for column in self.columns_of(field):
                if column in owner:
                    raise ValueError(f"column {column!r} is named in both `{owner[column]}` and `{field}`")
                owner[column] = field
        return self

    @property
    def media(self) -> dict[str, MediaSpec | PdfSpec]:
        """The fields that bring files, by their names."""
        given = {field: getattr(self, field) for field in KIND_OF_FIELD}
        return {field: spec for field, spec in given.items() if spec is not None}

    def columns_of(self, field: str) -> list[str]:
        """Return the columns with files that a field names."""
        spec = self.media[field]
        return [spec.column] if isinstance(spec, PdfSpec) else spec.columns

    @property
    def has_media(self) -> bool:
        """Whether prompts may have images, audio or videos."""
        return bool(self.media)

    @property
    def media_names(self) -> str:
        """What the prompts bring, in words, such as `images and audio`."""
        return " and ".join(dict.fromkeys(KIND_OF_FIELD[field].field for field in self.media))

    @property
    def media_columns(self) -> frozenset[str]:
        """Columns that stand for files in templates."""
        return frozenset(column for field in self.media for column in self.columns_of(field))
