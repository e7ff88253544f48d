"""Batch inference on a Ray cluster: stages of Ray Data pipelines, and whole jobs.

`generate` takes a Ray data set and returns one with the answers. A whole job is `batchrun ray JOB.yaml`
(`whole_job.py`). `import batchrunner` imports nothing of this.
"""

try:
    from batchrunner.ray.stages import generate
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "ray":
        raise
    raise ModuleNotFoundError(
        "batchrunner.ray: Ray is not installed: pip install 'batchrunner[ray]'", name="ray"
    ) from None

__all__ = ["generate"]
