"""Tokenization in this process, with the same tokens as SGLang.

encoder (`Encoder`) tokenizes prompts and limits their length; chat_template reads a model's files and renders
messages; detokenizer (`Detokenizer`) decodes answers.
"""
