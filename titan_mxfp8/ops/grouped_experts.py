"""The experts of a MoE layer on rows that are sorted by expert already.

M rows, D model and H hidden features, E experts. x and the output's gradient are there in high precision, so all of
their operands are quantised from the originals; what the recipe leaves unquantised is multiplied as it is.
"""

from collections.abc import Sequence

import torch

from titan_mxfp8.format.spec import Operand
from titan_mxfp8.ops.autograd import exported
from titan_mxfp8.ops.checks import check_offs_values
from titan_mxfp8.ops.config import MXConfig
from titan_mxfp8.ops.expert_operators import WEIGHTS_SCHEMA, ExpertsFunction
from titan_mxfp8.ops.experts import DispatchedRows, ExpertsLayer, Tokens, Weights, constant_of, key_of
from titan_mxfp8.ops.library import aligned


def grouped_experts(
    x_MD: torch.Tensor,
    weights: Weights,
    offs: torch.Tensor,
    config: MXConfig,
    limit: float | None = None,
    gathered: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """``expert(x)`` of each expert on its own rows, (M, D) in bf16; zeros at and past ``offs[-1]``, here and in the
    gradient of x.

    Args:
        x_MD: bf16, sorted by expert.
        weights: this rank's.
        offs: int32 (E,), end offsets of the experts' rows.
        limit: that of gpt_oss's clamped SwiGLU, or None for SiLU.
        gathered: elements and scales of w1, w3 and w2 in exact 32x32 blocks, where they were gathered quantised; or
            what ``experts.quantize_ahead`` gave, with a ``config`` that keeps no quantised weight. Those of ``weights``
            only get the gradients then, in their dtype.
    """
    if limit is not None and torch.compiler.is_compiling():
        limit = constant_of(limit)
    key = key_of(SortedExperts, config.key, limit=limit)
    kept_weight = "itself" if gathered else config.kept_weight
    return _run_experts(x_MD, offs, key, kept_weight, config.keeps_input, *weights, *gathered)


def _experts(x, offs, config, kept_weight, keeps_input, *weights):
    rest = config, kept_weight, keeps_input, torch.is_grad_enabled()
    return ExpertsFunction.apply(x, None, offs, None, *rest, *weights)[0]


_run_experts = exported(
    _experts,
    lambda x, *rest: x.new_empty(x.shape, dtype=torch.bfloat16),
    f"Tensor x, Tensor offs, str config, str kept_weight, bool keeps_input, {WEIGHTS_SCHEMA}",
)


class SortedExperts(ExpertsLayer):
    """Rows are there: the handle is ``offs`` alone, and there are no scores."""

    zero_tail = True

    def dispatch(self, transport, x, scores, routing, capacity, local, save, kernels, overlap):
        check_offs_values(routing, x.shape[0])
        gemms, spec, x, offs = self.gemms, self.plan.forward.a, aligned(x), aligned(routing)
        if save and not gemms.keeps_rows and not gemms.keeps_input:
            rows, kept = kernels.quantize_both(x, spec, self.plan.wgrad.b, offs)
        else:
            rows = kept = kernels.quantize(x, 1, spec, offs if spec.grouped_scales else None)
        overlap()
        left = kept.tensors() if save and not gemms.keeps_input else []
        return DispatchedRows([Tokens(rows)], [offs], [], left)

    def scores(self, handle):
        return None

    def combine(self, transport, y, weighted, handle, dtype):
        return y

    def dispatch_gradient(self, transport, g, handle, needs_w2, kernels):
        (offs,), rows, columns = handle, self.plan.dgrad.a, self.plan.wgrad.a
        if needs_w2 and columns.is_quantized:
            of_rows, of_columns = kernels.quantize_both(g, rows, columns, offs)
            return DispatchedRows([Tokens(of_rows, None, g)], handle, [], of_columns.tensors())
        of_rows = kernels.quantize(g, 1, rows, offs if rows.grouped_scales else None)
        return DispatchedRows([Tokens(of_rows, None, g)], handle, [], [])

    def combine_gradient(self, transport, rows, dscores_M, handle, dtype):
        dx = rows[0] if len(rows) == 1 else rows[0].add_(rows[1])
        row_M = torch.arange(dx.shape[0], device=dx.device)
        return [dx.masked_fill_((row_M >= handle[0][-1])[:, None], 0)]

    def empty_dispatched(self, x, routing, capacity, local):
        gemms, spec = self.gemms, self.plan.forward.a
        if gemms.keeps_input:
            kept = []
        elif gemms.keeps_rows:
            kept = spec.empty(x, 1, local if spec.grouped_scales else None).tensors()
        else:
            kept = self.plan.wgrad.b.empty(x, 0, local).tensors()
        return [], x.shape[0], kept

    def empty_gradient(self, g, handle, rows, needs_w2):
        columns = self.plan.wgrad.a
        return columns.empty(g, 0, handle[0].shape[0]).tensors() if needs_w2 and columns.is_quantized else []

    def wgrad_tokens(self, tensors, sources, of_g):
        gemm = self.plan.wgrad
        if self.gemms.keeps_rows and not of_g:
            return Tokens(Operand.take(tensors, self.plan.forward.a, 1))
        return Tokens(None, Operand.take(tensors, gemm.a if of_g else gemm.b, 0))
