"""``nn.Linear`` with MXFP8 GEMMs, tensor-parallel too."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titan_mxfp8.modules.converted import ConvertedModule
from titan_mxfp8.ops.linear import linear
from titan_mxfp8.ops.observe import observe


class MXFP8Linear(ConvertedModule, nn.Linear):
    """``nn.Linear`` whose three GEMMs are MXFP8, also on DTensors. Made by ``convert_linears``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # nn.Linear's name, which TorchTitan 0.3 looks for
        if isinstance(input, torch.Tensor) and input.layout is torch.jagged and input.is_contiguous():
            return torch.nested.nested_tensor_from_jagged(self.forward(input.values()), input.offsets())
        if isinstance(self.weight, DTensor):
            if not isinstance(input, DTensor):
                raise ValueError(
                    f"{self.mxfp8_fqn}: the weight is a DTensor and the input is not: have the parallel style "
                    "make it one (input_layouts of ColwiseParallel and RowwiseParallel)"
                )
            return _linear_on_dtensors(self.mxfp8_linear, input, self.weight, self.bias)
        return self.mxfp8_linear(input, self.weight, self.bias)

    def mxfp8_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``F.linear`` of plain tensors, in MXFP8, and observed."""
        config = self.mx_config
        y = self.mxfp8_call(linear, x, weight, bias, config)
        return y if self.probe is None else observe(y, x, weight, None, self.probe, config)


def _linear_on_dtensors(run: Callable, x: DTensor, weight: DTensor, bias: DTensor | None) -> DTensor:
    """Calls ``run`` on the local shards of a tensor-parallel layer.

    Per mesh dimension (S(i) shards axis i, "last" is the feature axis of x and y, R is replicated, P partial):

    | weight        | x wanted         | bias wanted | y       | gradient of x | of weight   | of bias     |
    |---------------|------------------|-------------|---------|---------------|-------------|-------------|
    | S(0), colwise | R                | S(0)        | S(last) | P             | S(0)        | S(0)        |
    | S(1), rowwise | S(last)          | R           | P       | S(last)       | S(1)        | R           |
    | R             | as is, but whole | R           | as x    | as x          | P if x is S | P if x is S |
    |               | features         |             |         |               |             |             |

    The bias is added in the GEMM. Where outputs are partial, each rank adds its share of it.
    """
    mesh, last = weight.device_mesh, x.ndim - 1
    replicated, partial = Replicate(), Partial()
    rows: list[tuple[Placement, ...]] = []
    summed_ranks = 1
    for mesh_dim, (x_is, weight_is) in enumerate(zip(x.placements, weight.placements, strict=True)):
        if weight_is.is_shard(0):
            rows.append((replicated, Shard(0), Shard(last), partial, Shard(0), Shard(0)))
        elif weight_is.is_shard(1):
            rows.append((Shard(last), replicated, partial, Shard(last), Shard(1), replicated))
            summed_ranks *= mesh.size(mesh_dim)
        elif x_is.is_shard() and not x_is.is_shard(last):
            rows.append((x_is, replicated, x_is, x_is, partial, partial))
        else:
            rows.append((replicated,) * 6)
    x_wanted, bias_wanted, y_is, dx_is, dweight_is, dbias_is = zip(*rows, strict=True)
    x_local = x.redistribute(mesh, x_wanted).to_local(grad_placements=dx_is)
    bias_local = None
    if bias is not None:
        bias_local = bias.redistribute(mesh, bias_wanted).to_local(grad_placements=dbias_is)
        if summed_ranks > 1:
            bias_local = _Share.apply(bias_local, summed_ranks)
    y_local = run(x_local, weight.to_local(grad_placements=dweight_is), bias_local)
    # Without shape and stride each rank would take all others to have as many rows as itself.
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensor.from_local(y_local, mesh, y_is, run_check=False, shape=shape, stride=stride)


class _Share(torch.autograd.Function):
    """A bias divided between ``ranks`` ranks whose outputs are summed. Each has the whole gradient: that of the sum."""

    @staticmethod
    def forward(ctx, bias: torch.Tensor, ranks: int) -> torch.Tensor:
        return bias / ranks

    @staticmethod
    def backward(ctx, dbias: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dbias, None
