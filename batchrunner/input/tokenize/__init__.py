"""Tokenization in this process, with the same tokens as SGLang.

`encoder` (`Encoder`) tokenizes prompts and limits their length. `chat_template` reads the tokenizer files of
a model and renders messages.
"""
