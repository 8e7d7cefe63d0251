"""``python -m delta`` is ``deltactl``."""

from delta.cli import main

if __name__ == "__main__":
    main()
