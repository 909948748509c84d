"""`python -m clawstream` is the command `clawstream`."""

from clawstream.cli import main

if __name__ == "__main__":
    main()
