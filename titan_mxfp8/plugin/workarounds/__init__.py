"""Workarounds of TorchTitan 0.2.2. Each says what it cures.

``apply`` applies those that depend on nothing but the versions, with those of titan_mxfp8/workarounds. The rest are
called where the config is known: ``keep_saved_outputs`` by the converters, ``hide_grouped_mm_warning`` when a config is
parsed. ``tests/test_workarounds.py`` shows each symptom without its workaround.
"""

from titan_mxfp8 import workarounds
from titan_mxfp8.plugin.workarounds import cpu, moe, validation


def apply() -> None:
    """Applies the workarounds that every run needs, and those of machines without an accelerator where there is
    none."""
    workarounds.apply()
    moe.initialise_router_bias()
    validation.validate_every_model()
    validation.validate_as_it_trains()
    cpu.enable_cpu_training()
