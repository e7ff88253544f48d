"""SGLang's scheduler in virtual time: pure code without a clock, threads or an engine.

`scheduler` simulates one server's scheduler step by step; the prefix cache is in `radix`. `replica` computes
the duration of the steps, and the load that the server reports. `made_up` writes synthetic answers.
"""
