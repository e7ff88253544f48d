"""A program that `engine.kind: server` launches in SGLang's place: a test says how it answers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def answer(self, text):
        self.reply(200, {"text": text, "meta_info": {
            "finish_reason": {"type": "stop"}, "prompt_tokens": 3, "completion_tokens": 2}})

    def do_GET(self):
        path = self.path.split("?")[0]
        self.reply(200 if path in self.known else 404, self.known.get(path, {}))

    def do_POST(self):
        self.asked(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, *_):
        pass

"""
_SERVE = """
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def launchable(directory: Path, handler: str, **environ: str) -> dict[str, Any]:
    """Write a program whose class `Handler(Server)` has `known` (what GET gives) and `asked(body)`.

    Return the `engine` of a job that launches it with these variables.
    """
    package = directory / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(_SERVER + handler + _SERVE)
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    return {
        "kind": "server", "model": str(directory / "model"), "device": "cuda", "python": sys.executable,
        "env": {"PYTHONPATH": str(directory / "site"), **environ},
    }  # fmt: skip


def never_ready(directory: Path) -> dict[str, Any]:
    """Return the `engine` of a job that launches a program which is never ready; it ends with its runner."""
    slow = directory / "slow-python"
    asked = '[ "$1" = -c ] && exit'  # for its version of SGLang, before it is to run a server
    slow.write_text(f"#!/bin/sh\n{asked}\ncat > /dev/null\n")
    slow.chmod(0o755)
    (directory / "model").mkdir(exist_ok=True)
    (directory / "model" / "config.json").write_text("{}")
    return {"kind": "server", "model": str(directory / "model"), "python": str(slow)}
