"""`python -m eejax`, which is the command `eejax`."""

from eejax.experiments.command import main

if __name__ == "__main__":
    main()
