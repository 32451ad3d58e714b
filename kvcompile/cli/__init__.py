"""The command line: `kvcompile --help` lists the commands, which `app.py` registers.

Exit codes: 0 done, 1 a KVCompileError (its message on stderr), 2 wrong usage. Text and tables go to stdout,
progress and summaries to stderr. torch and transformers are imported by the commands that need them.
"""

from kvcompile.cli.app import app, main

__all__ = ["app", "main"]
