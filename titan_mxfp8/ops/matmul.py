"""The three GEMMs of a layer as functions of their operands, and the autograd function over them.

Per expert e, rows of group e only; a linear is one expert with every row. M tokens, N out features, K in features, E
experts.

| GEMM    | computes                      | contracts  | operands, quantised along it                    |
|---------|-------------------------------|------------|-------------------------------------------------|
| forward | y_MN = x_MK @ w_ENK^T         | K          | x along K (1x32), w along K (recipe)            |
| dgrad   | dx_MK = dy_MN @ w_ENK         | N          | dy along N (1x32), w along N (recipe)           |
| wgrad   | dw_ENK = dy_MN^T @ x_MK       | M, ragged  | dy and x along M, blocks restart at each group  |

Every operand is quantised from the high-precision tensor, but for x along M where it comes as an ``MXTensor`` or with
``requantize_input``: then it is quantised again from FP8 rows (``format.reference.requantize``). The backend's plan
(``backends.Plan``) says how each lies in memory; x and dy are quantised along both axes in one read where the backend
has a kernel for the pair.
"""

import torch

from titan_mxfp8.format.codec import decode
from titan_mxfp8.format.mx import MXTensor
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.ops import library
from titan_mxfp8.ops.autograd import exported, once_differentiable, save_for_backward
from titan_mxfp8.ops.config import MXConfig

_ARRIVED = OperandSpec()  # of activations that come quantised
SUMMED_ROWS = 256  # that one thread adds up


def quantize(x: torch.Tensor, axis: int, spec: OperandSpec, offs: torch.Tensor | None, backend: str) -> Operand:
    """``library.quantize``, or of an unquantised operand ``x`` in bf16: that may be ``x`` itself, which no operator may
    return. ``offs``: int32 (E,) end offsets of groups along ``axis``, or None. Along the features of (M, C) they count
    only where ``spec`` has its scales by groups of rows."""
    if not spec.is_quantized:
        return Operand(x.bfloat16().contiguous(), None, spec, axis)
    if axis == x.ndim - 1 and not spec.grouped_scales:
        offs = None
    return Operand.take(library.quantize(x, axis, spec.key, offs, backend), spec, axis)


def quantize_both(
    x_MC: torch.Tensor, rowwise: OperandSpec, columnwise: OperandSpec, offs: torch.Tensor | None, backend: str
) -> tuple[Operand, Operand]:
    """x or dy for its two GEMMs: along the features and along the tokens. Or a weight, with ``offs`` None. An
    unquantised ``columnwise`` operand is ``x_MC`` itself, in whatever dtype."""
    if not columnwise.is_quantized:
        return quantize(x_MC, x_MC.ndim - 1, rowwise, offs, backend), Operand(x_MC, None, columnwise, x_MC.ndim - 2)
    tensors = library.quantize_both(x_MC, rowwise.key, columnwise.key, offs, backend)
    return Operand.take(tensors, rowwise, x_MC.ndim - 1), Operand.take(tensors, columnwise, x_MC.ndim - 2)


def requantize(rows: Operand, axis: int, spec: OperandSpec, offs: torch.Tensor | None, backend: str) -> Operand:
    """``library.requantize``, ``offs`` as of ``quantize``."""
    if axis == 1 and not spec.grouped_scales:
        offs = None
    tensors = library.requantize(rows.data, rows.scale, rows.spec.key, axis, spec.key, offs, backend)
    return Operand.take(tensors, spec, axis)


def gemm_m_grouped(
    a: Operand, w: Operand, offs: torch.Tensor | None, bias: torch.Tensor | None, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """Forward, y_MN from x and w quantised along K, or dgrad, dx_MK from dy and w quantised along N."""
    return library.gemm_m_grouped(
        a.data, a.scale, a.spec.key, w.data, w.scale, w.spec.key, w.axis, offs, bias, out_dtype, backend
    )


def gemm_k_grouped(
    dy: Operand, x: Operand, rows: int, offs: torch.Tensor | None, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    """Wgrad, dw_ENK from dy and x quantised along M, ``rows`` tokens; unquantised operands are rounded to bf16, and so
    is their product."""
    product = out_dtype
    if not dy.spec.is_quantized:
        dy, x = (operand._replace(data=operand.data.bfloat16().contiguous()) for operand in (dy, x))
        product = torch.bfloat16
    operands = dy.data, dy.scale, dy.spec.key, x.data, x.scale, x.spec.key
    return library.gemm_k_grouped(*operands, rows, offs, product, backend).to(out_dtype)


def mx_matmul(
    x: torch.Tensor | MXTensor,
    w_ENK: torch.Tensor,
    bias_EN: torch.Tensor | None,
    offs: torch.Tensor | None,
    out_dtype: torch.dtype,
    config: MXConfig,
) -> torch.Tensor:
    """The differentiable core of ``mxfp8_grouped_mm`` and ``mxfp8_linear``; ``offs=None``: one expert, every row."""
    if isinstance(x, MXTensor):
        rows, scale = x.qdata.detach().contiguous(), x.scale.contiguous()
        args = x.source, rows, scale
    else:
        args = x, None, None
    return _run_multiply(*args, w_ENK, bias_EN, offs, out_dtype, config.key)


@torch.compiler.allow_in_graph
def _multiply(x, rows, scale, w_ENK, bias_EN, offs, out_dtype, config):
    """``_Matmul``, which ``torch.compile`` traces for its graph, but without guards for the functions and types in it:
    they do not change. Else a compiled region with linears would look at a hundred more things before each call, in
    forward, where the GPU waits for the host."""
    return _Matmul.apply(x, rows, scale, w_ENK, bias_EN, offs, out_dtype, decode(config), torch.is_grad_enabled())[0]


def _empty(x, rows, scale, w_ENK, bias_EN, offs, out_dtype, config):
    return w_ENK.new_empty(((x if rows is None else rows).shape[0], w_ENK.shape[1]), dtype=out_dtype)


_run_multiply = exported(
    _multiply,
    _empty,
    "Tensor? x, Tensor? rows, Tensor? scale, Tensor w_ENK, Tensor? bias_EN, Tensor? offs, "
    "ScalarType out_dtype, str config",
)


class _Matmul(torch.autograd.Function):
    """``x``: the activations; or, of those that come as FP8 ``rows`` with their ``scale``, what gets their gradient.

    Saves for backward: x as wgrad wants it, quantised along M (one byte per element; two where the backend multiplies
    the values in bf16) or high-precision, or as FP8 rows, which backward requantises; and for dgrad the FP8 weight of
    32x32 blocks, quantised once, or else the weight itself, which FSDP may free and gather again. ``grad_enabled``:
    ``needs_input_grad`` does not know of ``no_grad``."""

    @staticmethod
    def forward(ctx, x, rows, scale, w_ENK, bias_EN, offs, out_dtype, config, grad_enabled):
        plan, backend = config.plan, config.backend
        x_spec, w_spec = plan.forward.a, plan.forward.b
        needs_dx, needs_dw = grad_enabled and ctx.needs_input_grad[0], grad_enabled and ctx.needs_input_grad[3]
        if rows is not None:
            x_saved = x_forward = Operand(rows, scale, _ARRIVED, 1)
            if (x_spec.stored, x_spec.block_k, x_spec.scales) != ("fp8", 32, "k_major"):
                x_forward = requantize(x_saved, 1, x_spec, offs, backend)
        elif needs_dw and not config.keeps_rows:
            x_forward, x_saved = quantize_both(x, x_spec, plan.wgrad.b, offs, backend)
        else:
            x_saved = x_forward = quantize(x, 1, x_spec, offs, backend)
        w_saved = Operand(w_ENK, None, w_spec, 2)
        if needs_dx and config.kept_weight == "quantized":
            w_forward, w_saved = quantize_both(w_ENK, w_spec, plan.dgrad.b, None, backend)
        else:
            w_forward = quantize(w_ENK, 2, w_spec, None, backend)
        saved_x, saved_w = x_saved[:2] if needs_dw else (None, None), w_saved[:2] if needs_dx else (None, None)
        ctx.config, ctx.x_saved = config, x_saved[2:]
        ctx.dtypes = [None if t is None else t.dtype for t in (x, w_ENK, bias_EN)]
        y = gemm_m_grouped(x_forward, w_forward, offs, bias_EN, out_dtype, backend)
        return save_for_backward(ctx, y, *saved_x, *saved_w, offs)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy_MN):
        x, x_scale, w, w_scale, offs = saved
        del saved
        config, plan, backend = ctx.config, ctx.config.plan, ctx.config.backend
        needs_dx, needs_dw, needs_dbias = ctx.needs_input_grad[0], ctx.needs_input_grad[3], ctx.needs_input_grad[4]
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        dx_MK = dw_ENK = dbias_EN = None
        if needs_dx and needs_dw:
            dy_rowwise, dy_columnwise = quantize_both(dy_MN, plan.dgrad.a, plan.wgrad.a, offs, backend)
        elif needs_dx:
            dy_rowwise = quantize(dy_MN, 1, plan.dgrad.a, offs, backend)
        elif needs_dw:
            dy_columnwise = quantize(dy_MN, 0, plan.wgrad.a, offs, backend)
        if needs_dx:
            w_spec = plan.dgrad.b
            is_kept = config.kept_weight == "quantized"
            weight = Operand(w, w_scale, w_spec, 1) if is_kept else quantize(w, 1, w_spec, None, backend)
            dx_MK = gemm_m_grouped(dy_rowwise, weight, offs, None, x_dtype, backend)
            del dy_rowwise, weight, w, w_scale
        if needs_dw:
            x_columnwise = Operand(x, x_scale, *ctx.x_saved)
            if x_columnwise.axis == 1:
                x_columnwise = requantize(x_columnwise, 0, plan.wgrad.b, offs, backend)
            dw_ENK = gemm_k_grouped(dy_columnwise, x_columnwise, dy_MN.shape[0], offs, w_dtype, backend)
        if needs_dbias:
            summed = dy_MN.sum(0, keepdim=True, dtype=torch.float32) if offs is None else sum_rows(dy_MN.float(), offs)
            dbias_EN = summed.to(bias_dtype)
        return dx_MK, None, None, dw_ENK, dbias_EN, None, None, None, None


def sum_rows(values_MC: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The sum of each group's rows, (E, C) in fp32, of values in fp32. Rows past the last group count nowhere.

    Of a group the rows between two multiples of ``SUMMED_ROWS`` are added up one after the other, and then these parts:
    the same bits in every run, as no atomics would give, and enough threads where a group has many rows.
    """
    rows = values_MC.shape[0]
    multiples = torch.arange(SUMMED_ROWS, rows + SUMMED_ROWS, SUMMED_ROWS, dtype=offs.dtype, device=offs.device)
    cuts = torch.cat((offs, multiples.clamp(max=rows))).sort().values
    sums = values_MC
    for ends in (cuts, torch.searchsorted(cuts, offs, right=True, out_int32=True)):
        starts_and_end = torch.nn.functional.pad(ends, (1, 0))
        sums = torch.segment_reduce(sums, "sum", offsets=starts_and_end, axis=0, unsafe=True)  # unsafe: no host wait
    return sums
