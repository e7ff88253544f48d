"""nginx with SGLang's answers, which it gives at once: for benchmarks of our own side."""

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

BUNDLES = (16, 64)
"""Rows in a request; below `/rows16` and `/rows64` each is answered with so many events, but
for bodies below 600 bytes, which have one row."""

ADDRESSES = [f"127.0.0.{number}" for number in range(1, 65)]
"""Addresses of the server, each of which can stand for a replica."""
_META = {
    "id": "2275190bf5af4de6aad00b0bb0a5d1bc", "finish_reason": {"type": "length", "length": 12},
    "prompt_tokens": 5, "weight_version": "default", "num_retractions": 0, "storage_prefetch_wait": 0.0,
    "storage_staging_wait": 0.0, "forward_entry_time": 1795261003.562938,
    "prefill_finished_time": 1795261003.7557359, "queue_time": 0.001061489999983678, "reasoning_tokens": 0,
    "completion_tokens": 12, "cached_tokens": 2,
    "weight_versions": [{"version": "default", "start": 0, "end": 12}],
    "cached_tokens_details": {"device": 2, "host": 0}, "dp_rank": None, "e2e_latency": 1.0291313130001072,
    "request_received_ts": 1795261003.5602317, "first_token_latency": 0.19550413739671058,
    "api_server_dispatch_finish_ts": 1795261003.5608242, "request_finished_ts": 1795261004.589363,
    "decode_throughput": 13.195347179076752, "response_sent_to_client_ts": 1795261004.5898006,
}  # fmt: skip
_TEXT = " Paris.\n\nThe answer is: 201"
REPLIES: dict[str, dict[str, Any]] = {  # SGLang 0.5.23's own, as recorded
    "/generate": {
        "text": _TEXT, "output_ids": [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33],
        "meta_info": _META,
    },
    "/v1/chat/completions": {
        "id": "chat-9", "object": "chat.completion", "created": 1795261010, "model": "default",
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": _TEXT, "reasoning_content": None},
            "logprobs": None, "finish_reason": "length", "matched_stop": None, "meta_info": _META,
        }],
        "usage": {
            "prompt_tokens": 5, "total_tokens": 17, "completion_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 2}, "reasoning_tokens": 0,
            "completion_tokens_details": None,
        },
        "metadata": {"weight_version": "default", "weight_versions": _META["weight_versions"]},
    },
    "/model_info": {"model_path": "canned", "is_generation": True},
    "/server_info": {"version": "0.5.23", "max_running_requests": 4096, "max_total_num_tokens": 665690},
    "/v1/loads": {"loads": [{
        "timestamp": 1795261003.4985807, "dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0,
        "num_used_tokens": 0, "max_total_num_tokens": 665690, "max_running_requests": 4096,
        "token_usage": 0.0,
    }]},
}  # fmt: skip


@contextmanager
def nginx(folder: Path) -> Iterator[str]:
    """Serve the canned replies on a free port of all ADDRESSES until the block ends; yield the first URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.chmod(0o755)  # nginx reads the answers as another user
    for rows in BUNDLES:
        events = [{"text": " yes", "meta_info": _META, "index": index} for index in range(rows)]
        answer = folder / f"rows{rows}" / "generate"
        answer.parent.mkdir()
        answer.write_bytes(b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events))
    locations = "\n".join(
        f"location = {base}{path} {{ return 200 '{_escaped(reply)}'; }}"
        for base in ("", *(f"/rows{rows}" for rows in BUNDLES))
        for path, reply in REPLIES.items()
        if not (base and path == "/generate")
    )
    listens = "\n".join(f"listen {address}:{port} backlog=4096;" for address in ADDRESSES)
    config = folder / "nginx.conf"
    config.write_text(f"""
        daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
        events {{ worker_connections 4096; }}
        http {{
            access_log off; keepalive_timeout 3600; keepalive_requests 1000000; default_type application/json;
            client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
            fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
            server {{ {listens} {locations}
                location ~ ^/rows[0-9]+/generate$ {{
                    if ($content_length ~ "^[1-5]?[0-9]?[0-9]$") {{
                        return 200 '{_escaped(REPLIES["/generate"])}';
                    }}
                    root {folder}; default_type text/event-stream; error_page 405 =200 $uri;
                }}
            }}
        }}""")
    server = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(config)], stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(timeout=10)


def _escaped(reply: dict[str, Any]) -> str:
    return json.dumps(reply, separators=(",", ":")).replace("\\", "\\\\").replace("'", "\\'").replace("$", "")


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"nginx ended with {server.returncode}: is it installed?")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SystemExit("nginx does not listen")
