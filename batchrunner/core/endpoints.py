"""Endpoints of OpenAI's interface that generate text; SGLang has them too."""

CHAT_PATH, COMPLETIONS_PATH = "/v1/chat/completions", "/v1/completions"
BATCH_PATHS = (CHAT_PATH, COMPLETIONS_PATH)
"""Endpoints that the lines of a batch file may be for."""
