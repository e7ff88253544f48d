"""The page on environment variables: those that batchrunner reads, and those that it sets for engines."""

from docs.tools.reference.markdown import table

HEAD = """# Environment variables

batchrunner reads these variables of its own environment. Engines that a run starts inherit the whole
environment, and `engine.env` adds to it."""

READ = {
    "SGLANG_API_KEY": "API key of the servers of `engine.kind: attach` and of a gateway with `url`, and "
    "of the server "
    "that `batchrun advise` watches; `engine.api_key_env` names another variable. Servers that are started "
    "have it too, or one of their own where it is not set.",
    "BATCHRUN_API_KEY": "Key that clients of `batchrun serve` send; any `--host` but localhost needs it.",
    "XDG_CACHE_HOME": "Directory of caches, `~/.cache` by default. Below it, in `batchrunner/`, is what "
    "out-of-memory "
    "recovery has learned about a model on a GPU.",
    "HF_HOME": "Directory of Hugging Face's files, `~/.cache/huggingface` by default: a model's name is "
    "looked up "
    "there, to read its tokenizer and sizes.",
    "HF_HUB_CACHE": "Directory of models in Hugging Face's layout, `$HF_HOME/hub` by default.",
    "HF_HUB_OFFLINE": "Passed on to an engine. Where its model is a directory, `1` is the default: then "
    "it asks nothing of "
    "the Hub.",
    "HF_ENDPOINT": "Address of the Hub that `hf://` means, if it is not the Hugging Face Hub.",
    "CUDA_VISIBLE_DEVICES": "GPUs that engines may use; with an empty text or `-1` there is none, and "
    "engines run on "
    "the CPU.",
    "AWS_ENDPOINT_URL_S3": "Address of the store that `s3://` means, unless `storage.endpoint` gives it. "
    "The other variables of AWS's own tools (`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, `AWS_REGION`, …) count too.",
    "AWS_ENDPOINT_URL": "The same, where the variable above is not set.",
    "AWS_ENDPOINT": "The same, where neither is set.",
    "RAY_ADDRESS": "Address of the Ray cluster for `batchrun ray` without `--address`; jobs of `ray job "
    "submit` have it.",
    "RAY_AUTH_MODE": "`token` for a Ray cluster that wants a token, as Ray reads it.",
    "RAY_USE_TLS": "`1` for a Ray cluster with TLS, as Ray reads it: its address is tried less strictly.",
    "RAY_COLOR_PREFIX": "`0`, as `batchrun ray` sets it where there is no terminal, shows log lines of the "
    "cluster without colours.",
    "SLURM_JOB_ID": "Set by Slurm: names a task in the log and in the run directory.",
    "SLURM_ARRAY_JOB_ID": "Set by Slurm: the same for a job array.",
    "SLURM_ARRAY_TASK_ID": "Set by Slurm: number of the task, for its name.",
    "SLURM_JOB_NUM_NODES": "Set by Slurm: how many machines a task has, for `engine.nodes`.",
    "SLURM_PROCID": "Set by Slurm: rank of an engine's process on several machines.",
    "SLURM_RESTART_COUNT": "Set by Slurm: how often the task was requeued, for its name.",
    "SLURMD_NODENAME": "Set by Slurm: name of the node, for the log.",
}
"""Meanings of the variables that the package reads, by name."""

SET = {
    "CUDA_VISIBLE_DEVICES": "The GPUs of this replica, where the run starts several.",
    "HF_HUB_OFFLINE": "`1`, where the model is a directory, and the variable is not set already.",
    "PYTHONDONTWRITEBYTECODE": "Removed: without its bytecode SGLang starts twice as slowly.",
    "PYTHONPATH": "On a CPU: a directory of batchrunner, before what was there.",
    "PYTHONUNBUFFERED": "`1`, so that the engine's log is complete when it dies.",
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "Most output tokens that admission expects of a row, where a "
    "trial of `batchrun tune` changes it.",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "`mean_pooling`, with `task: embed` where the model's files say that "
    "its vectors are means over all tokens.",
    "SGLANG_USE_CPU_ENGINE": "`1`, on a CPU.",
}
"""Meanings of the variables that the package sets for engines, by name."""

SETS = """## Variables set for engines

An engine that the run starts gets these too, unless `engine.env` has them."""


def page() -> str:
    """Return the page."""
    head = ["variable", "meaning"]
    read = table(head, ([f"`{name}`", meaning] for name, meaning in READ.items()))
    return "\n\n".join(
        [HEAD, read, SETS, table(head, ([f"`{name}`", meaning] for name, meaning in SET.items()))]
    )
