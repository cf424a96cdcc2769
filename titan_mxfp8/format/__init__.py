"""What MXFP8 is: constants and ``MXTensor`` (``mx.py``), and the definition in plain torch (``reference.py``)."""
