"""Backward in the thread that calls it."""

import torch


def run_backward_in_the_calling_thread() -> None:
    """Works around: forward + backward of a small layer takes the host twice as long as both parts alone.

    For: all versions of torch (seen with 2.11), GPUs. Autograd runs backward of a GPU's operators in a thread of that
    GPU. Forward and backward of Python code, which custom operators, FSDP's hooks and compiled code have much of, then
    take turns on two cores, each of which finds nothing in its cache: 1258 us for a grouped GEMM on an H200's host, 629
    with both threads on one core, 580 to 670 in one thread. A training process has one GPU, so nothing runs at once
    that would be in turns now. It holds for the thread that calls this, the one that trains.
    """
    torch.autograd.set_multithreading_enabled(False)
