"""SGLang's scheduler in virtual time: pure code without a clock, threads or an engine.

`scheduler` is one server's scheduler in steps, with its prefix cache in `radix`; `replica` gives the steps
their time, and the load that the server tells.
"""
