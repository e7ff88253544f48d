"""Encoders of SGLang whose vector is the mean over all tokens: SGLang's own take that of the first token.

A server imports this by the variable SGLANG_EXTERNAL_MODEL_PACKAGE; it imports nothing of batchrunner.
"""
