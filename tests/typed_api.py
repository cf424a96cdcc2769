"""A program that calls the public functions, for a type checker to read (``test_structure.py``); nobody runs it.

The checker reports a call that the annotations ought to allow and do not. Behind a call that they must refuse stands an
``ignore`` with the kind of error: the checker reports one that is not needed.
"""

import torch
from torch import nn

import titan_mxfp8
from titan_mxfp8 import RECIPES, MXTensor
from titan_mxfp8.recipe import Recipe

version: str = titan_mxfp8.__version__
recipe: Recipe = RECIPES["mxfp8_2d"]
x, w, offs = torch.ones(64, 32), torch.ones(2, 32, 32), torch.tensor([32, 64], dtype=torch.int32)

y: torch.Tensor = titan_mxfp8.mxfp8_grouped_mm(x, w.transpose(-2, -1), offs, recipe=recipe, out_dtype=torch.float32)
titan_mxfp8.mxfp8_grouped_mm(x, w)  # type: ignore[call-arg]
titan_mxfp8.mxfp8_grouped_mm(x, w, [32, 64])  # type: ignore[arg-type]
titan_mxfp8.mxfp8_grouped_mm(x, w, offs, out_dtype="bf16")  # type: ignore[arg-type]

quantized: MXTensor = titan_mxfp8.quantize(x, axis=-1, rounding="floor", block="1x32")
titan_mxfp8.quantize(x, rounding="nearest")  # type: ignore[arg-type]
titan_mxfp8.quantize(x, block="64x64")  # type: ignore[arg-type]

y = titan_mxfp8.mxfp8_linear(quantized, w[0], None, recipe="mxfp8", rebase=True)
titan_mxfp8.mxfp8_linear(3, w[0])  # type: ignore[arg-type]
titan_mxfp8.mxfp8_linear(x, w[0], recipe=3)  # type: ignore[arg-type]
titan_mxfp8.mxfp8_linear(x, w[0], recipes="mxfp8")  # type: ignore[call-arg]

ids = torch.zeros(64, 1, dtype=torch.int64)
y = titan_mxfp8.mxfp8_moe(x, torch.ones(64, 1), ids, w, w, w, transport="collective", rows=1.5, max_tokens=64)
titan_mxfp8.mxfp8_moe(x, torch.ones(64, 1), ids, w, w, w, transport="nccl")  # type: ignore[arg-type]
titan_mxfp8.mxfp8_moe(x, torch.ones(64, 1), ids, w, w, w, rows="all")  # type: ignore[arg-type]

names: list[str] = titan_mxfp8.convert_model(nn.Linear(32, 32), recipe="auto", linear_filter_fqns=["lm_head"])
titan_mxfp8.convert_model(nn.Linear(32, 32), grouped_fqns=3)  # type: ignore[arg-type]
titan_mxfp8.convert_model(x)  # type: ignore[arg-type]
