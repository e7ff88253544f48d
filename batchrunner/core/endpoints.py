"""Endpoints of OpenAI's interface (SGLang has them too), and of our own metrics."""

from typing import NamedTuple

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
BATCH_PATHS = (CHAT_PATH, COMPLETIONS_PATH, EMBEDDINGS_PATH)
"""Endpoints that the lines of a batch file may be for."""


class MetricsAddress(NamedTuple):
    """Where the metrics of a run are served."""

    port: int
    """0 is any free one; the log says which."""
    host: str = "127.0.0.1"
    """By default only programs of this machine can ask."""
