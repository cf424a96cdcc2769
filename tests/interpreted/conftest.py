"""These tests need a process of their own, which ``../test_triton_interpreter.py`` starts: elsewhere they are not
collected."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    interpreter.install()
else:
    collect_ignore_glob = ["test_*.py"]
