"""What modules that count say about ``rebase``."""

from typing import Literal

from torch import nn

from titan_mxfp8.modules.converted import ConvertedModule
from titan_mxfp8.modules.linear import MXFP8Linear
from titan_mxfp8.ops.rebase_counter import KINDS, RebaseCounter

ModuleKind = Literal["experts", "linears"]


def rebase_report(model: nn.Module, kind: ModuleKind | None = None) -> str | None:
    """What ``rebase`` changed in the modules of ``model`` since the last report, in words; waits for the device.

    Args:
        model: converted with ``count_rebased``.
        kind: ``experts`` or ``linears``, or None for both.

    Returns:
        None if no such module counts.
    """
    counts = {}
    for module in model.modules():
        own_kind = "linears" if isinstance(module, MXFP8Linear) else "experts"
        counts_here = isinstance(module, ConvertedModule) and isinstance(module.mxfp8.rebase, RebaseCounter)
        if counts_here and kind in (own_kind, None):
            counts[module.mxfp8_fqn] = module.mxfp8.rebase.read()
    if not counts:
        return None
    parts = []
    for operands in KINDS:
        changed, seen = (sum(count[operands][i] for count in counts.values()) for i in (0, 1))
        shares = {fqn: count[operands][0] / max(count[operands][1], 1) for fqn, count in counts.items()}
        most = max(shares, key=shares.get)
        parts.append(f"{operands} {changed / max(seen, 1):.2e} (most in {most}: {shares[most]:.2e})")
    return f"MXFP8: share of elements that rebase changed in {kind or 'all modules'}: {', '.join(parts)}"
