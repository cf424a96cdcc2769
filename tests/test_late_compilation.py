"""A layer that has run once compiles nothing more, whatever number of tokens comes: a compilation amid training stalls
all ranks. What kernels would be compiled for is looked at on this CPU, for GPUs that are not here (``aot.py``)."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
import triton
from aot import specializations
from scaled_mm import as_on_sm100
from tiers import daily
from watch import other_hardware

from scripts.bench.problems import group_sizes, make_offs
from titan_mxfp8 import backends, mxfp8_grouped_mm, mxfp8_linear, mxfp8_moe, quantize
from titan_mxfp8.backends.common import gemm, launch
from titan_mxfp8.backends.common.dequantize import dequantize
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.backends.hopper import gemm as hopper
from titan_mxfp8.backends.hopper import swiglu_gemm
from titan_mxfp8.backends.sm100 import gemm as sm100
from titan_mxfp8.format import spec
from titan_mxfp8.moe import collective, transport
from titan_mxfp8.moe import config as moe_config
from titan_mxfp8.moe import kernels as moe
from titan_mxfp8.moe.collective import Collective
from titan_mxfp8.moe.symmetric import Symmetric
from titan_mxfp8.ops import library

EXPERTS, N, K = 3, 96, 160
# None, one, multiples of 16 and a prime, both sides of where the GEMMs of Hopper take other tiles, and more than 2^15.
ROWS = (0, 1, 16, 97, 767 * EXPERTS, 769 * EXPERTS, 40000)
TARGETS = {
    "hopper": Hardware("sm_90", "NVIDIA H200"),
    "triton": Hardware("sm_80", "NVIDIA A100"),
    "triton scaled": Hardware("sm_100", "NVIDIA B200"),
    "sm100": Hardware("sm_100", "NVIDIA B200"),
}


def as_empty(function: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    """A function of torch that looks at its arguments as on a GPU, and computes nothing."""

    def call(*args, **kwargs) -> torch.Tensor:
        fake = as_on_sm100(function, *args, **kwargs)
        return torch.empty(fake.shape, dtype=fake.dtype)

    return call


def kernels() -> list[launch.Kernel]:
    modules = [module for name, module in sys.modules.items() if name.startswith("titan_mxfp8.")]
    found = {id(value): value for m in modules for value in vars(m).values() if isinstance(value, launch.Kernel)}
    return list(found.values())


def forget_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have compiled is new again."""
    for kernel in kernels():
        monkeypatch.setattr(kernel, "compiled", {})
    monkeypatch.setattr(gemm, "_prepared", set())


@contextmanager
def compilations() -> Iterator[list[str]]:
    """What is compiled within for this machine's GPU, as Triton says; then also what ``launch.Kernel`` has kept."""
    before, found = {(kernel, key) for kernel in kernels() for key in kernel.compiled}, []
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = lambda *, repr, **_: found.append(repr)
        yield found
    found += [str(key) for kernel in kernels() for key in kernel.compiled if (kernel, key) not in before]


@pytest.fixture(params=daily(TARGETS, "hopper", "triton", "sm100"))
def backend(request, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, set[str]]]:
    """A backend's name and what it has compiled so far, on a CPU that passes for another device."""
    if request.param != "hopper" and request.node.callspec.params.get("recipe", "").endswith("rebased"):
        pytest.skip("hopper alone rebases")
    hardware = TARGETS[request.param]
    for module in (backends, gemm, transport):
        monkeypatch.setattr(module, "hardware_of", lambda device: hardware)
    for function in ("_scaled_mm", "_scaled_grouped_mm"):
        monkeypatch.setattr(torch, function, as_empty(getattr(torch.ops.aten, function).default))
    for module in (gemm, hopper, moe, swiglu_gemm):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)  # so that few rows are many tiles
    forget_compiled(monkeypatch)
    with other_hardware(), specializations(hardware.arch) as found:
        yield request.param.split()[0], found


def check_later_rows(run: Callable[[int, int], None], first: int, found: set[str], least: int) -> None:
    """``run``, of rows and a seed, compiles at least so many kernels with ``first`` rows, then none with ``ROWS``."""
    run(first, 0)
    expected, variants = set(found), sum(len(kernel.compiled) for kernel in kernels())
    assert len(expected) >= least
    for seed, rows in enumerate(ROWS):
        run(rows, seed)
        assert found == expected, f"{rows} rows compile {sorted(found - expected)}"
    assert variants == sum(len(kernel.compiled) for kernel in kernels()), "a key holds what a batch decides"


def run_layer(kind: str, recipe: str, backend: str, rows: int, seed: int) -> list[torch.Tensor]:
    """Forward and backward, with any numbers in all tensors; some of these."""
    x = torch.empty(rows, K, dtype=torch.bfloat16)
    if kind == "strided":
        x = torch.empty(K, rows, dtype=torch.bfloat16).T
    x.requires_grad_()
    w = torch.empty(EXPERTS, N, K, dtype=torch.bfloat16, requires_grad=True)
    if kind == "linear":
        y = mxfp8_linear(x, w[1], recipe=recipe, backend=backend)
    else:
        offs = make_offs(group_sizes("zipf", rows - rows // 7, EXPERTS, seed))
        bias = torch.empty(EXPERTS, N, requires_grad=True) if kind == "biased" else None
        x = quantize(x, backend=backend) if kind == "prequantised" else x
        options = {"recipe": recipe, "backend": backend, "requantize_input": kind == "requantised"}
        y = mxfp8_grouped_mm(x, w.mT, offs, bias=bias, **options)
    if kind == "strided":
        y.sum().backward()  # a gradient of strides 0
    else:
        y.backward(torch.empty_like(y))
    return [x, w, y]


@pytest.mark.parametrize("first", daily([80, 0, 40000], 80))
@pytest.mark.parametrize("kind", ["grouped", "biased", "strided", "linear", "prequantised", "requantised"])
@pytest.mark.parametrize(
    "recipe", ["mxfp8", "mxfp8_2d", "mxfp8_2d_rebased", "mxfp8_wgrad_bf16", "mxfp8_wgrad_bf16_rebased"]
)
def test_a_layer_compiles_with_its_first_tokens_only(recipe: str, kind: str, first: int, backend) -> None:
    name, found = backend
    check_later_rows(partial(run_layer, kind, recipe, name), first, found, 2 if name == "sm100" else 4)


def run_moe(recipe: str, backend: str, features: int, tokens: int, **options) -> None:
    """Forward and backward of ``mxfp8_moe`` with K 2 and, on each rank of a group, ``EXPERTS`` experts. Of 512 features
    hidden ones are whole blocks, too."""
    group = options.get("group")
    x = torch.empty(tokens, features, dtype=torch.bfloat16, requires_grad=True)
    scores, ids = torch.rand(tokens, EXPERTS * (group.size() if group else 1)).topk(2)
    hidden = 256 if features == 512 else N
    shapes = (hidden, features), (hidden, features), (features, hidden)
    weights = [torch.empty(EXPERTS, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    y = mxfp8_moe(x, scores.requires_grad_(), ids, *weights, recipe=recipe, backend=backend, **options)
    y.backward(torch.empty_like(y))


@pytest.mark.parametrize("first", daily([80, 0], 80))
@pytest.mark.parametrize("features", [160, 512])  # scales that are moved as bytes, and as words
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_2d", "mxfp8_2d_rebased", "bf16"])
def test_a_moe_layer_compiles_with_its_first_tokens_only(recipe: str, features: int, first: int, backend) -> None:
    """``mxfp8_moe`` whole, on one rank."""
    name, found = backend
    check_later_rows(lambda rows, seed: run_moe(recipe, name, features, rows), first, found, 10)
    assert any(key.startswith("_permute ") for key in found)
    in_the_gemm = name == "hopper" and recipe.endswith("rebased") and features == 512
    assert any(key.startswith("_swiglu_gemm_kernel ") for key in found) == in_the_gemm


class Lonely:
    """``GroupLink`` of one of two ranks, where nothing comes from the other."""

    ranks, rank, device = 2, 0, torch.device("cpu")

    def gather(self, value: object) -> list:
        return [value] * self.ranks

    def allocate(self, size: int) -> tuple[torch.Tensor, list[int]]:
        memory = torch.empty(size, dtype=torch.uint8)
        return memory, [memory.data_ptr()] * self.ranks

    def barrier(self) -> None:
        pass


@pytest.mark.parametrize("first", daily([80, 0], 0))
@pytest.mark.parametrize("rows_for", ["counted", "worst_case"])
@pytest.mark.parametrize("transport_name", ["collective", "symmetric"])
@pytest.mark.parametrize("recipe", daily(["mxfp8", "mxfp8_2d_rebased", "bf16"], "mxfp8", "mxfp8_2d_rebased"))
def test_a_moe_layer_of_two_ranks_compiles_with_its_first_tokens_only(
    recipe: str, transport_name: str, rows_for: str, first: int, backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many rows as tokens have slots are for the experts here; the kernels that would count them do not run."""
    name, found = backend
    group = Mock(group_name="two", size=lambda: 2, rank=lambda: 0)
    carrier = Collective(group) if transport_name == "collective" else Symmetric(Lonely())
    monkeypatch.setattr(carrier, "_gather", lambda value: [value] * 2)
    plan, received = moe.plan, 0

    def plan_received(*args) -> tuple[torch.Tensor, torch.Tensor]:
        starts, offs = plan(*args)
        return starts, torch.full_like(offs, received)

    def receive_all(out: torch.Tensor, sent: torch.Tensor, **kwargs) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    def receive(out: torch.Tensor, sent: torch.Tensor, *args, **kwargs) -> None:
        if out.dtype == torch.int32:  # how many slots chose each expert, which no kernel counted, and copies
            out.copy_(sent)
            out[:, : 2 * EXPERTS] = 0
            out[0, 0] = received

    monkeypatch.setattr(moe, "plan", plan_received)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", receive)
    monkeypatch.setattr(collective, "_all_gather", receive_all)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_resolve_process_group", lambda name: group)
    monkeypatch.setattr(moe_config, "choose", lambda *_: (carrier, ""))

    def run(rows: int, seed: int) -> None:
        nonlocal received
        received = 2 * rows
        run_moe(recipe, name, 160, rows, group=group, transport=transport_name, rows=rows_for, max_tokens=max(ROWS))

    check_later_rows(run, first, found, 10)
    assert any(key.startswith("_combine ") for key in found)


def test_torch_would_refuse_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks that SM100's layers pass above look: scales of another shape, rows that are none, wrong offsets."""
    for name in ("_scaled_mm", "_scaled_grouped_mm"):
        monkeypatch.setattr(torch, name, partial(as_on_sm100, getattr(torch.ops.aten, name).default))
    swizzled, offs = spec.OperandSpec(scales="swizzled"), make_offs([100, 0, 150])
    x, w = torch.empty(256, 512), torch.empty(3, 160, 512)
    a, b, dense = swizzled.empty(x, 1, 3), swizzled.empty(w, 2, None), swizzled.empty(x, 1, None)
    for wrong_a, wrong_b, wrong_offs in (
        (a, b._replace(scale=b.scale[:, :-4]), offs),
        (a, b, offs.long()),
        (a._replace(scale=a.scale.flatten()), b, offs),
        (a._replace(data=torch.empty(512, 256, dtype=a.data.dtype).mT), b, offs),
    ):
        with pytest.raises(RuntimeError):
            sm100.scaled_grouped_mm(wrong_a, wrong_b, wrong_offs)
    for wrong in (dense._replace(scale=dense.scale[:128]), dense._replace(data=dense.data[:, :500])):
        with pytest.raises(RuntimeError):
            sm100.scaled_mm(wrong, swizzled.empty(w[0], 1, None), None, torch.bfloat16)


def test_new_compilations_are_seen(backend) -> None:
    """Features that 16 does not divide; and with a name missing in ``do_not_specialize`` the tests above fail."""
    _, found = backend
    counts = []
    for features in (160, 320, 168):
        dequantize(spec.OperandSpec().empty(torch.empty(64, features), 1, None))
        counts.append(len(found))
    assert counts == [1, 1, 2]


def test_on_amd_memory_of_2_gib_and_more_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For less Triton takes 32 bits of an address. The memory here is never touched."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    forget_compiled(monkeypatch)
    compiled, counts = dequantize.__globals__["_dequantize_rows"].compiled, []
    with specializations("gfx942") as found:
        for rows in (64, 2**24 - 1, 2**24, 64):  # of 128 bytes
            dequantize(spec.OperandSpec().empty(torch.empty(1, 64).expand(rows, 64), 1, None))
            counts.append((len(found), len(compiled)))
    assert counts == [(1, 1), (1, 1), (2, 2), (2, 2)]


def test_what_starts_elsewhere_than_at_16_bytes_is_copied() -> None:
    """Kernels are compiled for pointers that do: a view that starts at row 1 of rows of 33, and offs that lie apart."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    x, offs = torch.randn(9, 33).as_subclass(OnGpu), make_offs([1, 2, 3, 4]).as_subclass(OnGpu)
    assert library.aligned(x) is x and library.aligned(x[4:]).data_ptr() == x[4:].data_ptr()
    for view in (x[1:], x[1:, 3:], x[1:].T, offs[::2], offs[1:]):
        copy = library.aligned(view)
        assert copy.data_ptr() % 16 == 0 and torch.equal(copy, view)
    assert library.aligned(offs[::2]).is_contiguous() and library.aligned(None) is None


def test_kept_descriptors_differ_in_all_that_a_layout_says() -> None:
    """Two at one address, and one at another."""

    class OnGpu(NamedTuple):
        pointer: int
        is_cuda: bool = True

        def data_ptr(self) -> int:
            return self.pointer

    layout = launch.TileLayout(torch.bfloat16, (128, 64), (64, 64))
    other = launch.TileLayout(torch.float32, (64, 128), (32, 32), gluon=True, offset=512)
    layouts = [layout, *(layout._replace(**{name: value}) for name, value in other._asdict().items())]
    for pointer in (4096, 8192):
        made = [launch.descriptor(OnGpu(pointer), each) for each in layouts]
        for found, each in zip(made, layouts, strict=True):
            start, key = pointer + each.offset * each.dtype.itemsize, (each.dtype, each.block)
            assert (found.base.data_ptr(), tuple(found.shape), found.key) == (start, each.shape, key)
            assert hasattr(found, "layout") == each.gluon
            assert launch.descriptor(OnGpu(pointer), each) is found
