"""`python -m batchrunner.cli`, which Slurm scripts of earlier versions call."""

from batchrunner.cli import main

if __name__ == "__main__":
    main()
