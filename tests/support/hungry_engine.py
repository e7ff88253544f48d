"""An engine that a job launches, and that dies for want of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.launchable import launchable

if TYPE_CHECKING:
    from pathlib import Path

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
