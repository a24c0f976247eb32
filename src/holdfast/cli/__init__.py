"""The command line. Words enter, text and an exit code leave; none of it imports torch."""

from holdfast.cli.commands import app, main

__all__ = ["app", "main"]
