"""Encoders for SGLang whose vector is the mean over all tokens.

SGLang's own encoders use the vector of the first token instead. A server imports this package if the variable
SGLANG_EXTERNAL_MODEL_PACKAGE names it. The package imports nothing of batchrunner.
"""
