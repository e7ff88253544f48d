"""SGLang's scheduler in virtual time: pure code without a clock, threads or an engine.

`scheduler` simulates one server's scheduler step by step, with its prefix cache in `radix`. `replica`
computes how long the steps take, and which load the server reports.
"""
