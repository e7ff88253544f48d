"""The library: blocking calls, their asynchronous counterparts, and an engine for several runs.

runs: `run`, `arun`, `open_engine`. tables: `generate`, `embed`, `score`, `rerank`, and the same awaited.
streaming: `stream`. `batchrunner` exports the functions; the command needs none of them.
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
