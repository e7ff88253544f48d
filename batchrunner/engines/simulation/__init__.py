"""SGLang's scheduler in virtual time, without a clock, threads, I/O or an engine.

`scheduler` simulates one server's scheduler step by step; the prefix cache is in `radix`. `replica` computes
the duration of the steps, and the load that the server reports. `made_up` writes synthetic answers.
"""
