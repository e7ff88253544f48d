"""Tokenization in this process, with the tokens that SGLang would make.

encoder (`Encoder`, `Tokenizer`, `TokenBudget`) tokenizes prompts and limits their length; chat_template
renders messages; detokenizer (`Detokenizer`) decodes answers; tokenizer_files reads the files.
"""
