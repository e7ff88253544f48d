"""The parts `prompt.images` and `prompt.pdf` of a job: which columns hold images, and how they are sent."""

from typing import Annotated, Any, TypeAlias

from pydantic import Field, field_validator, model_validator

from batchrunner.core.pages import page_ranges
from batchrunner.job.fields import Spec, UserPath
from batchrunner.job.sampling import FromColumn

DEFAULT_DPI = 150.0
"""Dots an inch of a page, unless the job says otherwise: the small print of a letter can be read."""

MaxPixels: TypeAlias = Annotated[int, Field(ge=28 * 28)]
"""At least one token of the models that are most used."""


class ImageFiles(Spec):
    """Where files of images may be."""

    folder: UserPath | None = None
    """Folder of the files: relative paths begin there, and a path that leads out of it fails its row. By
    default it is the folder of the input file that has the row; for rows of a program it is the current
    folder, and paths may lead anywhere. `/` allows all files."""
    allow_urls: bool = False
    """Whether http:// and https:// URLs are downloaded. Addresses that are not public (of this machine, of
    private networks, link-local) are refused in any case."""


class ImagesSpec(ImageFiles):
    """Columns with images, and how these are sent."""

    columns: Annotated[list[str], Field(min_length=1)]
    """Columns with images: bytes of a file, a struct {bytes, path} as Hugging Face datasets have it, a path,
    a URL, a data URL, or a list of these."""
    max_pixels: MaxPixels | None = None
    """Most pixels of an image (width times height); a larger one is made smaller, with its proportions. By
    default images keep their size, and the model's own processor decides."""
    placeholder: Annotated[str, Field(min_length=1)] | None = None
    """What stands for an image in `prompt.text`, which has no chat template: the model's own token, such as
    `<image>`. In messages SGLang puts it in."""

    @field_validator("columns")
    @classmethod
    def _once(cls, columns: list[str]) -> list[str]:
        if len({*columns}) < len(columns):
            raise ValueError("has a column twice")
        return columns


class PdfSpec(ImageFiles):
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


class PromptWithImages(Spec):
    """The fields of a prompt that bring images."""

    images: ImagesSpec | None = None
    """Columns with images, as a list of names or with options. In a template such a column stands for its
    images; if no template has it, they come before the text of the last user message."""
    pdf: PdfSpec | None = None
    """Column with PDF documents, as its name or with options. Its pages are images of the prompt."""

    @field_validator("images", mode="before")
    @classmethod
    def _columns_alone(cls, images: object) -> object:
        if isinstance(images, str):
            return {"columns": [images]}
        return {"columns": images} if isinstance(images, list) else images

    @field_validator("pdf", mode="before")
    @classmethod
    def _column_alone(cls, pdf: object) -> object:
        return {"column": pdf} if isinstance(pdf, str) else pdf

    @model_validator(mode="after")
    def _one_meaning(self) -> "PromptWithImages":
        if self.images is not None and self.pdf is not None and self.pdf.column in self.images.columns:
            raise ValueError(f"column {self.pdf.column!r} is named in both `images` and `pdf`")
        return self

    @property
    def has_images(self) -> bool:
        """Whether prompts may have images."""
        return self.images is not None or self.pdf is not None

    @property
    def image_columns(self) -> frozenset[str]:
        """Columns that stand for images in templates."""
        names = [] if self.images is None else self.images.columns
        return frozenset([*names, *([] if self.pdf is None else [self.pdf.column])])
