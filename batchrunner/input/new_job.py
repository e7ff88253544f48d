"""Writes a job file with comments for a data file (`batchrun init`).

The prompt is the likeliest text column.
"""

import codecs
import contextlib
import json
import re
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.types as pt
from pyroaring import BitMap64

from batchrunner.core.errors import InputError, JobError
from batchrunner.core.files import format_of
from batchrunner.input.compression import DECOMPRESSION_ERRORS, decompressed
from batchrunner.input.csv_records import delimiter_on
from batchrunner.input.dataset import Dataset, is_ids, usable_columns
from batchrunner.input.files import find_files, format_in, read_errors
from batchrunner.input.messages import holds_messages
from batchrunner.input.templates import template_of_column
from batchrunner.job.arrow_types import is_text, type_name
from batchrunner.job.fields import user_paths
from batchrunner.job.output import RESULT_COLUMNS
from batchrunner.job.spec import InputSpec

TEXT_NAMES = (
    "prompt", "instruction", "question", "query", "input", "text", "content", "document", "body", "article",
    "message", "source", "review", "comment", "description", "abstract", "title",
)  # fmt: skip
"""Common names of a column with prompts, the likeliest first."""
ID_NAME = re.compile(r"(.*[ _-])?(?i:id|uuid|guid|key|sku|no|code|isbn|.*nr)|.*[a-z](Id|ID)")
"""Pattern of the names of columns that identify rows."""
SAMPLED_ROWS = 1000
"""Maximum number of rows that are read to choose the column of prompts."""
SAMPLED_BYTES = 16 << 20
"""Maximum number of bytes from which the delimiter and the encoding of a CSV file are guessed."""
ENCODINGS = ("utf-8", "utf-16", "cp1252", "latin-1")
"""Encodings to try for CSV files, in order. The last one decodes any bytes."""
ENGINES = {
    "server": """engine:
  kind: server                    # starts an SGLang server here, and ends it with the run
  model: Qwen/Qwen3-8B            # put your model here: a name of Hugging Face, or a directory
  # args: {mem-fraction-static: 0.88}   # arguments of the server
# engine: {kind: simulated}       # instead: answers are made up, to try the job without a GPU
""",
    "simulated": """engine: {kind: simulated}         # answers are made up, to try the job without a GPU
# engine:                         # instead: a real one
#   kind: server                  # starts an SGLang server here, and ends it with the run
#   model: Qwen/Qwen3-8B          # put your model here: a name of Hugging Face, or a directory
""",
}
"""The section `engine` of the new job, by the kind of engine."""


def new_job(path: str, engine: str, files: str) -> str:
    """Return the YAML text of a job for the data at `path`, with an engine of the kind `engine`.

    `path` is written into the job; `files` is a path from which this process can read the same data. Raises
    JobError or InputError.
    """
    if engine not in ENGINES:
        raise JobError(
            f"--engine {engine}: unknown kind of engine",
            hint="give server or simulated; for another kind, change the job afterwards",
        )
    options = _csv_options(files)
    dataset = Dataset(InputSpec.model_validate({"path": files, **options}))
    if not dataset.total_rows:
        raise InputError(f"{path}: there are no rows in {len(dataset.files)} file(s)")
    usable = usable_columns(dataset)
    if not usable:
        raise InputError(f"{path}: there is no column that a job can use")
    texts = [name for name, kind in usable.items() if is_text(kind)]
    rows = BitMap64(range(min(SAMPLED_ROWS, dataset.total_rows)))
    sample = pa.Table.from_batches(batch.data for batch in dataset.read(rows, texts))
    name, prompt = _prompt(usable, sample)
    free_columns = [column for column in usable if column not in {name, *RESULT_COLUMNS}]
    carried = [
        column for column in free_columns if ID_NAME.fullmatch(column) and not pt.is_nested(usable[column])
    ]
    columns = "".join(f"#   {_quoted(field.name)}: {type_name(field.type)}\n" for field in dataset.schema)
    notes = "".join(f"# {' '.join(note.split())}\n" for note in dataset.notes())
    return (
        "# A job for batchrunner, made by `batchrun init`. Save it as job.yaml, change what you like, then:\n"
        "#   batchrun check job.yaml   validates it and shows three prompts; sends nothing\n"
        "#   batchrun job.yaml         runs it; the same command resumes\n"
        f"#\n# Columns of the data, {dataset.total_rows:,} rows:\n{columns}{notes}\n"
        f"input:\n  path: {_quoted(path)}\n"
        + "".join(f"  {option}: {_quoted(value)}\n" for option, value in options.items())
        + f"  columns: [{', '.join(map(_quoted, carried))}]"
        "   # copied into the results: columns that tell rows apart\n"
        "  # limit: 100                    # for a trial: the first rows only\n\n"
        f"prompt:\n  {prompt}\n\n"
        "sampling:\n"
        "  max_new_tokens: 1024            # the longest output, in tokens\n"
        "  temperature: 0\n\n"
        "output:\n  path: out/job                   # the results come into parts/ below it\n\n"
        f"{ENGINES[engine]}"
        "\nlimits:\n  max_failed_rows: 1%             # with more the exit code is 3\n"
    )


def _csv_options(path: str) -> dict[str, str]:
    """Guess the delimiter and the encoding of a CSV file from its beginning; return {} for other formats."""
    fs, files = find_files([user_paths(path)])
    file_format = format_of(files[0])
    if file_format.kind != "CSV":
        return {}
    codec = format_in(fs, files[0], file_format).compression
    content = b""
    # An error is reported later, when the whole file is read.
    with contextlib.suppress(*read_errors(fs), *DECOMPRESSION_ERRORS):
        content = decompressed(fs.open_input_stream(files[0], compression=None), codec).read(SAMPLED_BYTES)
    # The first encoding that decodes the bytes wins. The decoder is incremental, so that it accepts a
    # character that the end of the sample cuts in two.
    for encoding in ENCODINGS:
        with contextlib.suppress(UnicodeError):
            text = codecs.getincrementaldecoder(encoding)().decode(content)
            break
    header = text.removeprefix("\ufeff").partition("\n")[0]
    excel_delimiter = delimiter_on(header)
    if excel_delimiter is not None:
        return {"delimiter": excel_delimiter, "encoding": encoding}
    # The delimiter is likely the most frequent of these characters in the header. max() returns the first of
    # equals, so the usual delimiter is tried first.
    usual_delimiter = "\t" if file_format.ending == ".tsv" else ","
    return {"delimiter": max(f"{usual_delimiter},;\t|", key=header.count), "encoding": encoding}


def _prompt(usable: Mapping[str, pa.DataType], sample: pa.Table) -> tuple[str, str]:
    """Return the column of prompts, and the lines of the job's section `prompt`.

    `usable` has the columns that a job can use, and `sample` the text columns of some rows. Conversations are
    preferred to texts, and texts to token ids.
    """
    for name, kind in usable.items():
        if holds_messages(kind) and not is_text(kind):
            return name, f"messages: {_quoted(name)}   # the model's chat template is applied"
    texts = [name for name, kind in usable.items() if is_text(kind)]
    ids = [name for name, kind in usable.items() if is_ids(kind)]
    if ids and not texts:
        return ids[0], f"input_ids: {_quoted(ids[0])}   # token ids"
    columns_with_usual_name = [
        name for usual_name in TEXT_NAMES for name in texts if name.lower() == usual_name
    ]
    no_id_columns = [name for name in texts if not ID_NAME.fullmatch(name)]
    # Columns with the most text are the likeliest prompts, so they come first.
    no_id_columns.sort(key=lambda name: -sample.column(name).nbytes)
    candidates = [*columns_with_usual_name, *no_id_columns, *texts, *usable]
    name = candidates[0]
    template = _quoted(f"{{{{ {template_of_column(name)} }}}}")
    return name, f"# system: You are terse.\n  user: {template}   # Jinja2 over the columns of a row"


def _quoted(text: str) -> str:
    """Quote a text so that it is valid in JSON and in YAML."""
    return json.dumps(text, ensure_ascii=False)
