"""``quantize.health_every`` and ``hopper_rebase_report``, for ``modules.telemetry``."""

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import JobConfig

from titan_mxfp8.modules import telemetry


def periods(job_config: JobConfig) -> dict[str, int]:
    """Steps between two logs: of health, and of what rebasing changed in the experts and in the linears; 0: never."""
    quantize = job_config.quantize
    reports = {"experts": quantize.grouped_mm.mx, "linears": quantize.linear.mx}
    return {"health": quantize.health_every} | {kind: mx.hopper_rebase_report for kind, mx in reports.items()}


def install() -> None:
    """Makes every run that asks for it log what was recorded. Safe to call again."""
    telemetry.install(MetricsProcessor, lambda processor: periods(processor.job_config))
