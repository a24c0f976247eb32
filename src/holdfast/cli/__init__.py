"""The command line. Words enter, text and an exit code leave; to import it imports no torch."""

from holdfast.cli.commands import app, main

__all__ = ["app", "main"]
