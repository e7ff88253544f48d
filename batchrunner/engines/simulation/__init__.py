"""SGLang's scheduler in virtual time: pure code without a clock, threads or an engine.

Others may import `Replica` (replica.py), `SchedulerConfig` (config.py), `Scheduler` (scheduler.py),
`SimulatedRequest` (sample.py) and `CostModel` with its presets (cost.py).
"""
