"""The page on environment variables: those that batchrunner reads, and those that it sets for engines."""

from docs.tools.reference.markdown import meanings

HEAD = """# Environment variables

batchrunner reads these variables. Engines that a run starts inherit all variables, and also get those of
`engine.env`."""

READ = {
    "SGLANG_API_KEY": "API key of servers that already run (`engine.api_key_env` names another variable) "
    "and of servers that the run starts. If it is unset, the run generates a key for its servers.",
    "BATCHRUN_API_KEY": "Key that clients of `batchrun serve` must send; required for any `--host` "
    "except localhost.",
    "XDG_CACHE_HOME": "Directory of caches, `~/.cache` by default: learned flags, and working copies of "
    "runs in "
    "object stores.",
    "HF_HOME": "Directory of Hugging Face's files and models, `~/.cache/huggingface` by default.",
    "HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE": "Directory of Hugging Face's models, `$HF_HOME/hub` by default.",
    "HF_HUB_OFFLINE": "Passed on to engines; `1` by default if the model is a directory.",
    "HF_ENDPOINT": "Address of another Hub, for `hf://` and for models.",
    "SGLANG_USE_MODELSCOPE": "Passed on to engines; a model's name is then not looked up on the Hub.",
    "http_proxy, https_proxy, no_proxy": "Proxies for servers that already run. `no_proxy` lists hosts, "
    "domains "
    "and networks (`10.0.0.0/8`) that are reached directly; the loopback always is.",
    "CUDA_VISIBLE_DEVICES": "GPUs for engines. If it is empty or `-1`, they run on the CPU.",
    "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_ENDPOINT": "Address of the store for `s3://`, unless "
    "`storage.endpoint` sets it; the first of these variables that is set counts. Other variables of AWS's "
    "tools (`AWS_PROFILE`, `AWS_REGION`, …) apply too.",
    "RAY_ADDRESS": "Ray cluster for `batchrun ray` without `--address`.",
    "RAY_AUTH_MODE, RAY_USE_TLS": "Set to `token` and `1` for a Ray cluster that requires a token or TLS.",
    "RAY_COLOR_PREFIX": "`0` shows Ray's log lines without colours.",
    "SLURM_JOB_ID, SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID, SLURM_RESTART_COUNT, SLURMD_NODENAME": "Set by "
    "Slurm: they name a task, and its node in the log.",
    "SLURM_ARRAY_TASK_COUNT": "Set by Slurm: the number of tasks of an array, which share rows in "
    "at least eight times as many leases.",
    "SLURM_JOB_NUM_NODES, SLURM_PROCID": "Set by Slurm: number of a task's machines, and rank of an engine's "
    "process (`engine.nodes`).",
    "BATCHRUN_RAY_GROUP": "Set by `batchrun ray` for its workers: the machines of one worker "
    "(`engine.nodes`).",
}
"""Meanings of the variables that the package reads, by name."""

SET = {
    "CUDA_VISIBLE_DEVICES": "GPUs of this replica, if the run starts several.",
    "HF_HUB_OFFLINE": "`1` if the model is a directory, unless the variable is already set.",
    "PYTHONDONTWRITEBYTECODE": "Removed: without bytecode SGLang starts twice as slowly.",
    "PYTHONPATH": "On a CPU: begins with a directory of batchrunner.",
    "PYTHONUNBUFFERED": "`1`, so that the log is complete if the engine dies.",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "Most output tokens that SGLang's admission expects of a "
    "row, if "
    "flag tuning sets it.",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "`mean_pooling` for `task: embed`, if vectors are means over tokens.",
    "SGLANG_MAX_THINK_TOKENS": "With `sampling.max_thinking_tokens` and a reasoning parser that would ignore "
    "it: the most thinking tokens of a row without a limit of its own.",
    "SGLANG_USE_CPU_ENGINE": "`1` on a CPU.",
}
"""Meanings of the variables that the package sets for engines, by name."""

SETS = """## Variables set for engines

The run sets these variables for engines, unless `engine.env` does:"""


def page() -> str:
    """Return the page."""
    return "\n\n".join([HEAD, meanings(READ.items()), SETS, meanings(SET.items())])
