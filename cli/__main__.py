"""``python -m cli`` is the ``pdserve`` command."""

from cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
