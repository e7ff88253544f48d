"""Batch inference on a Ray cluster: stages of Ray Data pipelines, and whole jobs.

`generate` takes a Ray dataset and returns the dataset with the answers. `batchrun ray JOB.yaml` runs a whole
job (`whole_job.py`). `import batchrunner` does not import this package, so Ray is needed only here.
"""

from batchrunner.core.errors import install_command

try:
    from batchrunner.ray.stages import generate
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "ray":
        raise
    raise ModuleNotFoundError(
        f"batchrunner.ray: Ray is not installed: {install_command('ray')}", name="ray"
    ) from None

__all__ = ["generate"]
