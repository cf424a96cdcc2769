"""These tests need a process of their own, which ``../test_triton_interpreter.py`` starts: elsewhere they are not
collected."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter

    from titan_mxfp8.backends.common import activation, bf16x2, convert, swiglu

    interpreter.install()
    for module in (activation, bf16x2, convert, swiglu):  # assembly cannot be interpreted, whatever GPU is here
        module.cuda_capability_geq = lambda *capability: False
else:
    collect_ignore_glob = ["test_*.py"]
