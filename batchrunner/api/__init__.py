"""The library: blocking calls, their asynchronous counterparts, and an engine for several runs.

runs: `run`, `arun`, `open_engine`. tables: `generate`, `embed`, `score`, `rerank` and their asynchronous
counterparts. streaming: `stream`. `batchrunner` exports these functions.
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
