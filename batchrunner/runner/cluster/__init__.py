"""Several tasks that do one run together: leases, takeover of dead tasks, Slurm arrays.

The runner imports `join` and `Leases`; the command imports `slurm`.
"""
