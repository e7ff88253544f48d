"""What tests share: a fake SGLang, logs of its releases, models, a Slurm, a browser, and helpers for runs."""
