"""Examples and units for the page on job files; a test reads each example as a job."""

EXAMPLES = {
    "input.path": "[data/2024/*.parquet, more.parquet]",
    "input.columns": "[id, title]",
    "input.types": "{score: float64, zip: string}",
    "input.rename": "{output: human_answer}",
    "input.filter": "lang == 'en' and text | length > 100",
    "input.limit": "1000",
    "prompt.system": "You are terse.",
    "prompt.user": "'Summarise: {{ text }}'",
    "prompt.messages": "conversation",
    "prompt.continue": "true",
    "prompt.text": "'{{ question }} The answer is'",
    "prompt.input_ids": "tokens",
    "prompt.python": "hooks:prompt",
    "prompt.truncate": "middle",
    "prompt.chat_template_kwargs": "{enable_thinking: false}",
    "sampling.max_new_tokens": "{column: budget}",
    "sampling.min_new_tokens": "16",
    "sampling.n": "4",
    "sampling.temperature": "0",
    "sampling.top_p": "0.95",
    "sampling.top_k": "20",
    "sampling.min_p": "0.05",
    "sampling.frequency_penalty": "0.5",
    "sampling.presence_penalty": "0.5",
    "sampling.repetition_penalty": "1.1",
    "sampling.stop": "['###', 'Question:']",
    "sampling.stop_token_ids": "[2]",
    "sampling.stop_regex": "'\\n[A-Z]+:'",
    "sampling.no_stop_trim": "true",
    "sampling.ignore_eos": "true",
    "sampling.skip_special_tokens": "false",
    "sampling.spaces_between_special_tokens": "false",
    "sampling.sampling_seed": "{column: id}",
    "sampling.json_schema": "{type: object, properties: {label: {enum: [good, bad]}}, required: [label]}",
    "sampling.regex": "'(yes|no)'",
    "sampling.ebnf": '\'root ::= "yes" | "no"\'',
    "sampling.structural_tag": "{column: tag}",
    "sampling.logit_bias": "{'42': -100}",
    "sampling.custom_params": "{budget: 512}",
    "sampling.lora_path": "{column: adapter}",
    "parse.python": "hooks:label",
    "parse.columns": "{label: string, score: float64}",
    "output.path": "out/summaries",
    "output.columns": "[logprobs, output_ids]",
    "output.top_logprobs": "20",
    "output.explode": "true",
    "output.part_rows": "50000",
    "output.durable": "10s",
    "engine.urls": "['http://gpu1:30000', 'http://gpu2:30000']",
    "engine.api_key_env": "MY_SGLANG_KEY",
    "engine.args": "{mem-fraction-static: 0.88, enable-metrics: true}",
    "engine.device": "cuda",
    "engine.python": "/opt/sglang/bin/python",
    "engine.env": "{SGLANG_TORCH_PROFILER_DIR: /tmp}",
    "engine.start_timeout": "1h",
    "engine.heal": "false",
    "engine.model": "Qwen/Qwen3-8B",
    "engine.url": "'http://gateway:30000'",
    "engine.replicas": "2",
    "engine.tp": "2",
    "engine.policy": "round_robin",
    "engine.gateway_args": "{log-level: info}",
    "engine.max_running": "64",
    "engine.max_total_tokens": "100000",
    "engine.context_length": "4096",
    "engine.step_s": "0",
    "limits.deadline": "8h",
    "limits.max_failed_rows": "1%",
    "limits.abort_failed_share": "20%",
    "limits.max_attempts": "3",
    "limits.render": "20s",
    "limits.python": "2m",
    "limits.python_memory_gb": "8",
    "limits.python_processes": "4",
    "limits.request_timeout": "10m",
    "limits.engine_wait": "15m",
    "limits.hang": "2m",
    "limits.drain": "60s",
    "limits.disk_wait": "1h",
    "order": "longest_first",
    "dedupe": "false",
    "window": "64",
    "bundle": "16",
    "tokenize": "client",
    "queue": "[50, 1000]",
    "python_path": "[~/functions]",
}
"""An example of each field's value, as YAML, by the field's path."""

COMPANIONS = {
    "input": "{path: rows.parquet}",
    "input.types": "{path: rows.csv}",
    "input.rename": "{path: rows.parquet, columns: [id, output]}",
    "prompt": "{user: '{{ text }}'}",
    "prompt.messages": "{}",
    "prompt.continue": "{messages: conversation}",
    "prompt.text": "{}",
    "prompt.input_ids": "{}",
    "prompt.python": "{}",
    "parse": "{python: 'hooks:label'}",
    "output": "{path: out/run}",
    "attach": "{kind: attach, urls: ['http://localhost:30000']}",
    "server": "{kind: server, model: Qwen/Qwen3-8B}",
    "gateway": "{kind: gateway, model: Qwen/Qwen3-8B}",
    "engine.url": "{kind: gateway}",
    "inprocess": "{kind: inprocess, model: Qwen/Qwen3-8B}",
    "simulated": "{kind: simulated}",
}
"""What an example's section must have besides, as YAML: by the field's path, the engine's kind or the "
"section."""

UNITS = {
    "input.limit": "rows",
    "sampling.max_new_tokens": "tokens",
    "sampling.min_new_tokens": "tokens",
    "sampling.n": "outputs",
    "output.top_logprobs": "tokens",
    "output.part_rows": "rows",
    "limits.python_memory_gb": "GiB",
    "limits.python_processes": "processes",
    "engine.tp": "GPUs",
    "engine.max_running": "requests",
    "engine.max_total_tokens": "tokens",
    "engine.context_length": "tokens",
    "engine.step_s": "seconds",
    "limits.max_failed_rows": "rows",
    "limits.max_attempts": "tries",
    "window": "requests",
    "bundle": "rows",
    "queue": "requests",
}
"""Units of the fields whose type does not tell it, by path."""

WHOLE_JOBS = {
    "A job that runs anywhere, on an engine that invents its answers:": """
input: {path: rows.parquet, columns: [id]}
prompt: {user: "Summarise: {{ text }}"}
sampling: {max_new_tokens: 64, temperature: 0}
output: {path: out/simulated}
engine: {kind: simulated}
""",
    "The same on a server that the run starts:": """
input: {path: rows.parquet, columns: [id]}
prompt: {user: "Summarise: {{ text }}"}
sampling: {max_new_tokens: 64, temperature: 0}
output: {path: out/summaries}
engine: {kind: server, model: Qwen/Qwen3-8B}
""",
}
"""Whole jobs at the head of the page, by the sentence above each."""
