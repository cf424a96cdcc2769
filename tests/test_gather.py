"""FSDP's gather of experts in FP8 (``titan.gather``): bits, bytes, checkpoints, and who keeps the other gather."""

import os
import subprocess
import sys
from pathlib import Path

from models import ROOT
from test_models import cpu_only

PROGRAM = Path(__file__).parent / "parallel_gather.py"


@cpu_only
def test_gathered_in_fp8_the_losses_are_those_of_a_gather_in_fp32() -> None:
    paths = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(PROGRAM)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(result.stdout)
    assert result.returncode == 0 and result.stdout.count("passed") == 4, result.stdout + result.stderr[-6000:]
