"""One question a module; `make bench-…` runs them, `results/` holds their figures."""
