"""Module conversion: a module's class is swapped for a subclass with an MXFP8 forward; parameters stay as they are.

So FSDP, TP, EP, checkpoints, optimizers, ``deepcopy`` and meta-device init meet the modules and parameters they know.
"""

from titan_mxfp8.modules.choose import EXPERT_CLASSES, LINEAR_CLASSES, is_expert_module
from titan_mxfp8.modules.convert import as_list, convert_experts, convert_linears, convert_model, training_device
from titan_mxfp8.modules.converted import ConvertedModule
from titan_mxfp8.modules.linear import MXFP8Linear

__all__ = [
    "EXPERT_CLASSES",
    "LINEAR_CLASSES",
    "ConvertedModule",
    "MXFP8Linear",
    "as_list",
    "convert_experts",
    "convert_linears",
    "convert_model",
    "is_expert_module",
    "training_device",
]
