"""MXFP8 training of mixture-of-experts models: the same bits on CPU, Hopper, Blackwell and AMD."""

from titan_mxfp8.format.mx import MXTensor
from titan_mxfp8.modules import convert_model
from titan_mxfp8.moe.layer import mxfp8_moe
from titan_mxfp8.ops.grouped_mm import mxfp8_grouped_mm
from titan_mxfp8.ops.linear import mxfp8_linear
from titan_mxfp8.ops.quantize import quantize
from titan_mxfp8.recipe import RECIPES

__version__ = "0.3.0"

__all__ = ["RECIPES", "MXTensor", "convert_model", "mxfp8_grouped_mm", "mxfp8_linear", "mxfp8_moe", "quantize"]


def __getattr__(name: str) -> object:
    if name == "JobConfig":  # what TorchTitan asks a config module for
        raise AttributeError("job.custom_config_module = 'titan_mxfp8' is no config module: use 'titan_mxfp8.plugin'")
    raise AttributeError(f"module 'titan_mxfp8' has no attribute {name!r}")
