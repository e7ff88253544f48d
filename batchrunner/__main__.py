"""`python -m batchrunner` is the command `batchrun`."""

from batchrunner.cli import main

if __name__ == "__main__":
    main()
