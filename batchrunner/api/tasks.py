"""Tasks without decoding, for all rows, as a table: embeddings, scores, relevance."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchrunner.api.engine import engine_of
from batchrunner.api.results import results_of
from batchrunner.input.tables import Data
from batchrunner.job.call import TaskCall
from batchrunner.job.load import EngineLike
from batchrunner.job.spec import LimitsSpec
from batchrunner.job.tasks import Dtype
from batchrunner.runner.open_engine import OpenEngine
from batchrunner.runner.progress_calls import ProgressListener, make_displays


def embed(
    rows: Data,
    *,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    engine: OpenEngine | EngineLike | None = None,
    columns: Sequence[str] = (),
    dtype: Dtype = "float32",
    normalize: bool = False,
    dimensions: int | None = None,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Make a vector of every row and return the results as a pyarrow Table in input order.

    Example: `embed(["a cat", "a dog"], engine="BAAI/bge-small-en-v1.5").column("embedding")`.

    The arguments are as for `generate`; an open engine is one of `open_engine(…, task="embed")`. `prompt` is
    the template of a text, or the column with it, the `prompt` part of a job, or a function that makes the
    text or the token ids of a row. `dtype`, `normalize` and `dimensions` are those of a job's `output`.

    The column `embedding` has lists of one fixed size; it is null where a row has an `error`. Raises
    BatchrunError, and what an iterator of `rows` raises.
    """
    display = make_displays(progress=progress, on_progress=on_progress)
    opened, spec = engine_of(engine)
    call = TaskCall(
        task="embed",
        engine=spec,
        prompt=prompt,
        columns=columns,
        limits=limits,
        fields={"dtype": dtype, "normalize": normalize, "dimensions": dimensions},
    )
    return results_of(rows, call, opened, display)


def score(
    rows: Data,
    *,
    labels: Sequence[str | int] | None = None,
    choices: str | Sequence[str] | None = None,
    prompt: str | Mapping[str, Any] | Callable[..., Any] | None = None,
    engine: OpenEngine | EngineLike | None = None,
    columns: Sequence[str] = (),
    softmax: bool = False,
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Tell how probable labels or choices are after every row, as a pyarrow Table in input order.

    Example: `score(["Is the sky blue? Answer:"], labels=[" yes", " no"], engine="Qwen/Qwen3-8B")`.

    The arguments are as for `generate`; an open engine is one of `open_engine(…, task="score")`. `prompt` is
    the template of a text, or the column with it, the `prompt` part of a job, or a function that makes the
    text or the token ids of a row. Give either `labels`, single tokens by their texts or ids, or `choices`, a
    list of texts for all rows or the column with a list for each.

    The column `scores` has a list for each row: probabilities of the labels among all tokens, or with
    `softmax` among the labels; or log likelihoods of the choices, which `scores_per_token` and
    `scores_per_byte` have divided by their lengths. It is null where a row has an `error`. Raises
    BatchrunError, and what an iterator of `rows` raises.
    """
    display = make_displays(progress=progress, on_progress=on_progress)
    given = choices if choices is None or isinstance(choices, str) else list(choices)
    opened, spec = engine_of(engine)
    call = TaskCall(
        task="score",
        engine=spec,
        prompt=prompt,
        columns=columns,
        limits=limits,
        fields={"softmax": softmax},
        labels=labels,
        items={} if given is None else {"choices": given},
    )
    return results_of(rows, call, opened, display)


def rerank(
    rows: Data,
    *,
    documents: str,
    prompt: str | Mapping[str, Any] | None = None,
    engine: OpenEngine | EngineLike | None = None,
    columns: Sequence[str] = (),
    limits: Mapping[str, Any] | LimitsSpec | None = None,
    progress: bool = False,
    on_progress: ProgressListener | None = None,
) -> pa.Table:
    """Tell how relevant the documents of every row are to its query, as a pyarrow Table in input order.

    Example: `rerank(rows, prompt="{{ query }}", documents="documents", engine="BAAI/bge-reranker-base")`.

    The arguments are as for `generate`; an open engine is one of `open_engine(…, task="rerank")`. `prompt` is
    the template of the query, or the column with it; `documents` is the column with a list of texts, or one.

    The column `scores` has a list for each row, in the order of its documents; it is null where a row has an
    `error`. Raises BatchrunError, and what an iterator of `rows` raises.
    """
    display = make_displays(progress=progress, on_progress=on_progress)
    opened, spec = engine_of(engine)
    call = TaskCall(
        task="rerank",
        engine=spec,
        prompt=prompt,
        columns=columns,
        limits=limits,
        items={"documents": documents},
    )
    return results_of(rows, call, opened, display)
