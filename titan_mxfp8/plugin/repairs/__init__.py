"""Repairs of TorchTitan 0.2.2. Each says what it cures.

``repair`` applies those that depend on nothing but the versions, with those of titan_mxfp8/repairs. The rest are called
where the config is known: ``keep_saved_outputs`` by the converters, ``hide_grouped_mm_warning`` when a config is
parsed. ``tests/test_repairs.py`` shows each symptom without its repair.
"""

from titan_mxfp8 import repairs
from titan_mxfp8.plugin.repairs import cpu, moe, validation


def repair() -> None:
    """Applies the repairs that every run needs, and those of machines without an accelerator where there is none."""
    repairs.repair()
    moe.initialise_router_bias()
    validation.validate_every_model()
    validation.validate_as_it_trains()
    cpu.enable_cpu_training()
