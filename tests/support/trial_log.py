"""The log of a trial."""

from __future__ import annotations

LOG = """
[2025-08-11 17:17:03] server_args=ServerArgs(mem_fraction_static=0.83, attention_backend='fa3', tp_size=1)
[2025-08-11 17:17:03] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.50 GB, \
mem usage=15.00 GB.
[2025-08-11 17:17:03] max_total_num_tokens=665690, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB
[2025-08-11 17:18:03] Prefill batch, #new-seq: 2, #new-token: 800, #cached-token: 0, token usage: 0.10, \
#running-req: 30, #queue-req: 117
[2025-08-11 17:18:04] Decode batch, #running-req: 233, #token: 370959, token usage: 0.82, cuda graph: True, \
gen throughput (token/s): 4594.01, #queue-req: 317
[2025-08-11 17:18:05] Decode batch, #running-req: 300, #token: 370959, token usage: 0.82, cuda graph: False, \
gen throughput (token/s): 4594.01, #queue-req: 317
"""
