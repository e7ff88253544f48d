"""Programs that `engine.kind: server` launches in SGLang's place: a test says how they answer or die."""

import sys
from pathlib import Path
from typing import Any

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


HUNGRY = """
def option(name, default):
    return float(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else default

chunk = option("--chunked-prefill-size", 8192)
share = option("--mem-fraction-static", 0.88)
with open(os.environ["STARTS"], "a") as starts:
    print(json.dumps(sys.argv[sys.argv.index("--port") + 2:]), file=starts)

class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "hungry"},
        "/server_info": {"version": "0.5.23", "max_running_requests": 8},
        "/v1/loads": {"loads": [{
            "num_running_reqs": 4, "num_waiting_reqs": 9, "token_usage": 0.5, "max_running_requests": 8,
            "max_total_num_tokens": 900, "num_used_tokens": 450, "dp_rank": 0, "timestamp": 1.0}]},
    }
    answered = 0
    def asked(self, body):
        time.sleep(0.02)
        Handler.answered += 1
        if Handler.answered > 20 or body["text"] == os.environ.get("ROW"):
            self.dies()
        self.answer("to " + body["text"])
    def dies(self):
        exec(os.environ["DEATH"])

pool = int(option("--max-total-tokens", 20000))
print(f"server_args=ServerArgs(mem_fraction_static={share}, max_running_requests=None, "
      "max_total_tokens=None, chunked_prefill_size=None, cuda_graph_max_bs_decode=None)", flush=True)
exec(os.environ.get("AT_START", ""))
print(f"max_total_num_tokens={pool}, chunked_prefill_size={chunk:.0f}, max_running_requests=8, context_len=9")
"""
OOM = 'print("RuntimeError: Prefill out of memory. Try to lower your batch size.", flush=True); os._exit(1)'
IN_PREFILL = f"if chunk > 2048: {OOM}"


def hungry(directory: Path, death: str = IN_PREFILL, **environ: str) -> dict[str, Any]:
    return launchable(directory, HUNGRY, DEATH=death, STARTS=str(directory / "starts"), **environ)


FRAGILE = """
class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "fragile"},
        "/server_info": {"version": "0.5.23", "max_running_requests": 32},
        "/v1/loads": {"loads": [{
            "num_running_reqs": 4, "num_waiting_reqs": 9, "token_usage": 0.5, "max_running_requests": 32,
            "max_total_num_tokens": 900, "num_used_tokens": 450, "dp_rank": 0, "timestamp": 1.0}]},
    }
    def sample(self, prompt):
        if prompt == [117]:
            print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(1)
        return {"text": f"answer 0 to {prompt}", "meta_info": {
            "finish_reason": {"type": "stop"}, "prompt_tokens": 1, "completion_tokens": 2}}
    def asked(self, body):
        prompts = body["input_ids"]
        if not isinstance(prompts[0], list):
            self.reply(200, self.sample(prompts))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for index, prompt in enumerate(prompts):
            event = json.dumps({**self.sample(prompt), "index": index})
            self.wfile.write(f"data: {event}\\n\\n".encode())
            self.wfile.flush()
"""

SLOTS = """
import threading

def option(name, default):
    return int(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else default

asked = option("--max-running-requests", 4)
states = int(os.environ.get("STATES", asked))  # requests whose states there is room for
slots = min(asked, states)
with open(os.environ["STARTS"], "a") as starts:
    print(slots, file=starts)
exec(os.environ.get("AT_START", ""))
print(f"server_args=ServerArgs(max_running_requests={asked}, schedule_conservativeness=1.0)", flush=True)
if states < asked:
    print(f"max_running_requests is capped to {states} by the mamba state cache "
          f"(max_mamba_cache_size={states}, 1 state slots per request). To raise it: increase "
          "--mamba-full-memory-ratio or --max-mamba-cache-size, or halve the state size with "
          "--mamba-ssm-dtype bfloat16.", flush=True)
print(f"max_total_num_tokens=9000, chunked_prefill_size=8192, max_running_requests={slots}, context_len=99")
free, lock = threading.Semaphore(slots), threading.Lock()
running = waiting = 0
pace = float(os.environ.get("PACE", 1))  # of a row, with more slots than 4

def tell():
    while True:
        time.sleep(0.1)
        if running:
            rate = running * (pace if slots > 4 else 1) * 20
            print(f"Decode batch, #running-req: {running}, #token: 9, token usage: {usage()}, "
                  f"gen throughput (token/s): {rate}, #queue-req: {waiting}", flush=True)

def usage():
    return min(0.95, running * 0.07)

threading.Thread(target=tell, daemon=True).start()

class Loads(dict):
    def get(self, path, default):
        if path != "/v1/loads":
            return super().get(path, default)
        return {"loads": [{
            "num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": usage(),
            "max_running_requests": slots, "max_total_num_tokens": 9000, "dp_rank": 0,
            "timestamp": time.time()}]}

class Handler(Server):
    known = Loads({
        "/ready": {}, "/health": {}, "/v1/loads": {}, "/model_info": {"model_path": "slots"},
        "/server_info": {
            "version": "0.5.23", "max_running_requests": asked,
            "internal_states": [{"effective_max_running_requests_per_dp": slots}]}})
    def asked(self, body):
        global running, waiting
        with lock:
            waiting += 1
        with free:
            with lock:
                waiting, running = waiting - 1, running + 1
            exec(os.environ.get("AT_ROW", ""))
            time.sleep(0.1 / (pace if slots > 4 else 1))
            with lock:
                running -= 1
        self.answer("to " + body["text"])
"""
"""A server with 4 places, of which the job knows nothing, or as many as it is told; a row takes 0.1 s."""


def with_slots(directory: Path, **environ: str) -> dict[str, Any]:
    """Return the `engine` of a job that launches a server with too few places; `starts` has those of each."""
    return launchable(directory, SLOTS, STARTS=str(directory / "starts"), **environ)


RANKS = """
rank = sys.argv[sys.argv.index("--node-rank") + 1]
with open(os.environ["SEEN"], "a") as seen:
    print(rank, os.environ.get("CUDA_VISIBLE_DEVICES", "-"), *sys.argv, file=seen)
print("rank", rank, "begins", flush=True)
meeting = sys.argv[sys.argv.index("--dist-init-addr") + 1]
while not any(line.startswith("1 ") and meeting in line for line in open(os.environ["SEEN"])):
    time.sleep(0.1)
while rank == "1":
    time.sleep(0.1)
    if os.path.exists(os.environ["DIE"]):
        os.unlink(os.environ["DIE"])
        print("RuntimeError: the second machine is out of order", flush=True)
        os._exit(7)

class Handler(Server):
    known = {
        "/ready": {}, "/health": {}, "/model_info": {"model_path": "two"},
        "/server_info": {"version": "0.5.23", "max_running_requests": 8},
    }
    answered = 0
    def asked(self, body):
        Handler.answered += 1
        while Handler.answered > 4 and not os.path.exists(os.environ["GO"]):
            time.sleep(0.1)  # as one that waits for the other machine
        self.answer("to " + body["text"])
"""
"""Both halves of a server: the second dies once there is a file DIE; rows from the fifth on wait for GO."""


def two_halves(directory: Path, **engine: Any) -> dict[str, Any]:
    """Return the `engine` of a job on two machines; `seen` has a line for each start of one of them."""
    files = {name: str(directory / name.lower()) for name in ("SEEN", "DIE", "GO")}
    return {**launchable(directory, RANKS, **files), "nodes": 2, "tp": 2, **engine}
