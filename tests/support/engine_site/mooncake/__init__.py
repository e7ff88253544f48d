"""A substitute for the package `mooncake`, by which a prefill worker sends KV caches to a decode worker.

The real package needs a fast network or GPUs.
"""
