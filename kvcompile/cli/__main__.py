"""`python -m kvcompile.cli`."""

from kvcompile.cli import main

if __name__ == "__main__":
    main()
