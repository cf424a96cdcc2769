"""``nn.Linear`` with MXFP8 GEMMs, tensor-parallel too."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titan_mxfp8.modules.converted import ConvertedModule
from titan_mxfp8.ops.health import observe
from titan_mxfp8.ops.linear import mxfp8_linear


class MXFP8Linear(ConvertedModule, nn.Linear):
    """``nn.Linear`` whose three GEMMs are MXFP8, also on DTensors. Made by ``convert_linears``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options = self.op_options

        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            try:
                y = mxfp8_linear(x, weight, bias, **options)
            except ValueError as error:
                raise ValueError(f"{self.mxfp8_fqn}: {error}") from error
            return observe(y, x, weight, None, self.health_probe, options["recipe"], options["backend"])

        if isinstance(self.weight, DTensor):
            return _linear_on_dtensors(linear, x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def _linear_on_dtensors(linear: Callable, x: DTensor, weight: DTensor, bias: DTensor | None) -> DTensor:
    """Runs ``linear`` on the local shards of a tensor-parallel layer.

    Per mesh dimension (S(i) shards axis i, "last" is the feature axis of x and y):

    | weight         | x wanted                 | y        | gradient of x | gradient of weight |
    |----------------|--------------------------|----------|---------------|--------------------|
    | S(0), colwise  | replicated               | S(last)  | partial       | S(0)               |
    | S(1), rowwise  | S(last)                  | partial  | S(last)       | S(1)               |
    | replicated     | as it is, features whole | as x     | as x          | partial if x is S  |
    """
    mesh, last = weight.device_mesh, x.ndim - 1
    x_wanted: list[Placement] = []
    y_is: list[Placement] = []
    dx_is: list[Placement] = []
    dw_is: list[Placement] = []
    for x_placement, w_placement in zip(x.placements, weight.placements, strict=True):
        if w_placement.is_shard(0):
            row = (Replicate(), Shard(last), Partial(), Shard(0))
        elif w_placement.is_shard(1):
            row = (Shard(last), Partial(), Shard(last), Shard(1))
        elif x_placement.is_shard() and not x_placement.is_shard(last):
            row = (x_placement, x_placement, x_placement, Partial())
        else:
            row = (Replicate(), Replicate(), Replicate(), Replicate())
        for placements, placement in zip((x_wanted, y_is, dx_is, dw_is), row, strict=True):
            placements.append(placement)
    x_local = x.redistribute(mesh, x_wanted).to_local(grad_placements=dx_is)
    y_local = linear(x_local, weight.to_local(grad_placements=dw_is), None)
    y = DTensor.from_local(y_local, mesh, y_is, run_check=False)
    return y if bias is None else y + bias
