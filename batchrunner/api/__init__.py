"""The public functions of the library; `batchrunner` exports all of them.

The file runs has `run`, `arun` and `open_engine`. The file tables has `generate`, `embed`, `score`, `rerank`
and their asynchronous counterparts. The file streaming has `stream`.
"""

from batchrunner.api.runs import arun, open_engine, run
from batchrunner.api.streaming import stream
from batchrunner.api.tables import aembed, agenerate, arerank, ascore, embed, generate, rerank, score
from batchrunner.forecast.estimate import estimate

__all__ = [
    "aembed",
    "agenerate",
    "arerank",
    "arun",
    "ascore",
    "embed",
    "estimate",
    "generate",
    "open_engine",
    "rerank",
    "run",
    "score",
    "stream",
]
