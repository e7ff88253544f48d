"""The page on environment variables: those that batchrunner reads, and those that it sets for engines."""

from docs.tools.reference.markdown import meanings

HEAD = """# Environment variables

batchrunner reads these variables. Engines that a run starts inherit all, and get those of `engine.env`."""

READ = {
    "SGLANG_API_KEY": "API key of servers that run already (`engine.api_key_env` names another variable) "
    "and of those that are started; without it these get a key of their own.",
    "BATCHRUN_API_KEY": "Key that clients of `batchrun serve` send; any `--host` but localhost needs it.",
    "XDG_CACHE_HOME": "Directory of caches, `~/.cache` by default: what runs learned about flags, copies of "
    "runs in stores.",
    "HF_HOME": "Directory of Hugging Face's files and models, `~/.cache/huggingface` by default.",
    "HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE": "Directory of its models, `$HF_HOME/hub` by default.",
    "HF_HUB_OFFLINE": "Passed on to engines; `1` by default where the model is a directory.",
    "HF_ENDPOINT": "Address of another Hub, for `hf://` and for models.",
    "SGLANG_USE_MODELSCOPE": "Passed on to engines; with it a model's name is not looked up on the Hub.",
    "http_proxy, https_proxy, no_proxy": "Proxies for servers that run already; `no_proxy` has hosts, "
    "domains and networks (`10.0.0.0/8`) that are reached directly, as the loopback always is.",
    "CUDA_VISIBLE_DEVICES": "GPUs for engines; with an empty text or `-1` they run on the CPU.",
    "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, AWS_ENDPOINT": "Address of the store that `s3://` means, "
    "unless `storage.endpoint` gives it; the first that is set. Other variables of AWS's tools "
    "(`AWS_PROFILE`, `AWS_REGION`, …) count too.",
    "RAY_ADDRESS": "Ray cluster for `batchrun ray` without `--address`.",
    "RAY_AUTH_MODE, RAY_USE_TLS": "`token` and `1` for a Ray cluster that wants a token, or TLS.",
    "RAY_COLOR_PREFIX": "`0` shows Ray's log lines without colours.",
    "SLURM_JOB_ID, SLURM_ARRAY_JOB_ID, SLURM_ARRAY_TASK_ID, SLURM_RESTART_COUNT, SLURMD_NODENAME": "From "
    "Slurm: name of a task, and of its node in the log.",
    "SLURM_JOB_NUM_NODES, SLURM_PROCID": "From Slurm: machines of a task, and rank of an engine's process "
    "(`engine.nodes`).",
    "BATCHRUN_RAY_GROUP": "Set by `batchrun ray` for its workers: machines of one (`engine.nodes`).",
}
"""Meanings of the variables that the package reads, by name."""

SET = {
    "CUDA_VISIBLE_DEVICES": "GPUs of this replica, where the run starts several.",
    "HF_HUB_OFFLINE": "`1` where the model is a directory, unless it is set.",
    "PYTHONDONTWRITEBYTECODE": "Removed: without bytecode SGLang starts twice as slowly.",
    "PYTHONPATH": "On a CPU: a directory of batchrunner first.",
    "PYTHONUNBUFFERED": "`1`, so that the log is complete when the engine dies.",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "Output tokens that admission expects of a row at most, where "
    "tuning changes it.",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "`mean_pooling` for `task: embed`, where vectors are means over tokens.",
    "SGLANG_USE_CPU_ENGINE": "`1`, on a CPU.",
}
"""Meanings of the variables that the package sets for engines, by name."""

SETS = """## Variables set for engines

Unless `engine.env` has them:"""


def page() -> str:
    """Return the page."""
    return "\n\n".join([HEAD, meanings(READ.items()), SETS, meanings(SET.items())])
