"""What a model calls: ``quantize``, ``mxfp8_grouped_mm``, ``mxfp8_linear``."""
