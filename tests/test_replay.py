"""Operators that launch what they launched before: nothing that reaches a kernel differs. On a CPU that passes for a
GPU, whose kernels only note what they are given; test_gpu_replay.py has real ones."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_late_compilation import run_layer
from watch import other_hardware

from scripts.bench.problems import make_offs
from titan_mxfp8 import backends, mxfp8_grouped_mm
from titan_mxfp8.backends.common import gemm, launch, replay
from titan_mxfp8.backends.hardware import Hardware
from titan_mxfp8.backends.hopper import gemm as hopper
from titan_mxfp8.ops import expert_operators, library


class Calls:
    """Calls of operators, as ``replay.call`` gets them: what each launched, with addresses as (tensor, offset), and
    whether its implementation ran."""

    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.allocated: list[tuple[str, torch.Tensor]] = []  # and how
        self.log: list[tuple] = []
        self.ran: list[bool] = []
        self.implementations = 0
        self._counted: dict[Callable, Callable] = {}

    def __call__(self, function: Callable[..., Any], *args: Any, unread: int | None = None) -> Any:
        counted = self._counted.setdefault(function, self._count(function))
        self.launches.clear()
        self.allocated.clear()
        before = self.implementations
        result = replay.call(counted, args, unread)
        self.ran.append(self.implementations > before)
        known = [a for a in (*args, *(made for _, made in self.allocated)) if isinstance(a, torch.Tensor)]
        results = result if isinstance(result, list) else [result]
        returned = [(self._place(r.data_ptr(), known), r.shape, r.stride(), r.dtype) for r in results]
        launches = []
        for kernel, programs, descriptors, arguments in self.launches:
            bases = [(self._place(d.base.data_ptr(), known), d.tile_layout) for d in descriptors]
            launches.append((kernel, programs, bases, [self._place(a, known) for a in arguments]))
        allocated = [(how, a.shape, a.stride(), a.dtype) for how, a in self.allocated]
        self.log.append((function.__name__, returned, allocated, launches))
        return result

    def kernel(self, name: object) -> Callable[[int, int, tuple, tuple], None]:
        """A compiled kernel's launcher."""
        return lambda programs, stream, *given: self.launches.append((name, programs, *given))

    def _count(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.implementations += 1
            return function(*args)

        return counted

    @staticmethod
    def _place(number: object, known: list[torch.Tensor]) -> object:
        """An address as whose it is, "elsewhere" if nobody's here; other things as they are."""
        for i, tensor in enumerate(known):
            if type(number) is int and 0 <= number - tensor.data_ptr() < replay._extent(tensor):
                return "address", i, number - tensor.data_ptr()
        return "elsewhere" if type(number) is int and number > 2**40 else number


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()

    def kept(function: Callable[..., torch.Tensor], how: str) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            made.allocated.append((how, function(*args, **kwargs)))
            return made.allocated[-1][1]

        return call

    for owner, name, how in ((torch, "empty", "any"), (torch, "zeros", "zeros"), (torch.Tensor, "new_empty", "any")):
        monkeypatch.setattr(owner, name, kept(getattr(owner, name), how))
    monkeypatch.setattr(replay, "_empty_strided_cuda", kept(torch._C._dynamo.guards._empty_strided_cpu, "any"))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    def run(operator: library.KernelOperator, *args: Any) -> Any:
        return made(operator.function, *args, unread=operator.unread)

    monkeypatch.setattr(library.KernelOperator, "run", run)
    return made


@pytest.fixture(params=[Hardware("sm_90", "NVIDIA H200"), Hardware("sm_80", "NVIDIA A100")], ids=["hopper", "triton"])
def gpu(request, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A backend on a GPU where everything is compiled."""
    for module in (backends, gemm):
        monkeypatch.setattr(module, "hardware_of", lambda device: request.param)
    for module in (gemm, hopper):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)

    def descriptor(x: torch.Tensor, layout: launch.TileLayout) -> launch.TensorDescriptor:
        return launch.kept_descriptor(x.data_ptr(), layout)

    for module in (gemm, hopper):
        monkeypatch.setattr(module, "descriptor", descriptor)

    class Compiled(dict):
        def get(self, key: tuple) -> Callable[[int, int, tuple, tuple], None]:
            return calls.kernel(key)

    real = launch.Kernel.launch

    def launch_compiled(kernel: launch.Kernel, *args: Any, **kwargs: Any) -> bool:
        compiled = launch.Kernel(kernel.function)
        compiled.compiled = Compiled()
        return real(compiled, *args, **kwargs)

    monkeypatch.setattr(launch.Kernel, "launch", launch_compiled)
    with other_hardware():
        yield "hopper" if request.param.arch == "sm_90" else "triton"


@pytest.mark.parametrize("kind", ["linear", "grouped", "strided", "prequantised", "requantised"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_2d", "mxfp8_wgrad_bf16", "mxfp8_2d_rebased"])
def test_what_is_launched_again_is_what_was_launched(recipe: str, kind: str, gpu: str, calls: Calls) -> None:
    if gpu != "hopper" and recipe.endswith("rebased"):
        pytest.skip("hopper alone rebases")

    def step(rows: int, seed: int) -> list[tuple]:
        """The calls of forward and backward, on tensors that lie elsewhere each time."""
        calls.log, calls.ran, calls.implementations = [], [], 0
        here.append(run_layer(kind, recipe, "auto", rows, seed))  # not freed, so that the next tensors cannot lie there
        return calls.log

    here: list[list[torch.Tensor]] = []
    steps = [step(300, seed) for seed in range(4)]
    # All is known by now, but for what is more than launches: copies of x and of the gradient, whose rows are not
    # contiguous; torch's GEMM.
    torchs = (gpu, recipe, kind) == ("triton", "mxfp8_wgrad_bf16", "linear")
    assert calls.implementations == 2 * (kind == "strided") + torchs
    replayed = [i for i, ran in enumerate(calls.ran) if not ran]
    assert len(replayed) >= 4 and all(steps[0][i][-1] for i in replayed)
    for calls_of_step in steps[1:]:
        assert [calls_of_step[i] for i in replayed] == [steps[0][i] for i in replayed]
    other = step(301, 4)
    assert sum(calls.ran) >= len(other) - 2 and other != steps[0]  # the weight's are known


def test_which_operators_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs alone; and not those of a MoE layer, in which the host looks at sizes."""
    monkeypatch.setattr(replay, "call", lambda *given: given)
    on_gpu, on_cpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda")), torch.zeros(1)
    operators = {name: value for name, value in vars(library).items() if isinstance(value, library.Operator)}
    assert operators.keys() == {"quantize", "quantize_both", "requantize", "gemm_m_grouped", "gemm_k_grouped"}
    for name, operator in operators.items():
        unread = 6 if name == "gemm_k_grouped" else None
        assert operator.run(on_gpu, 7) == (operator.run_aligned, (on_gpu, 7), unread)
        monkeypatch.setattr(operator, "function", lambda *args: args)
        assert operator.run(on_cpu, 7) == (on_cpu, 7)
    of_experts = [value for value in vars(expert_operators).values() if isinstance(value, library.Operator)]
    assert len(of_experts) == 5
    for operator in of_experts:
        monkeypatch.setattr(operator, "function", lambda *args: args)
        assert operator.run(on_gpu, 7) == (on_gpu, 7)


@pytest.mark.parametrize("why", ["switched off", "another torch"])
def test_nothing_is_replayed_where_it_is_switched_off_or_torch_lacks_what_it_takes(
    why: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "replays", True)
    function, x = launches_a_kernel(calls), torch.randn(4, 4)
    for _ in range(4):
        calls(function, x)
    assert calls.ran == [True, True, False, False]
    if why == "switched off":
        backends.replay_launches(False)
    else:
        monkeypatch.setattr(replay, "_empty_strided_cuda", None)
    calls(function, x)
    assert calls.ran[-1]


def launches_a_kernel(calls: Calls) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, *numbers: object) -> torch.Tensor:
        buffer, out = torch.zeros(12, dtype=torch.int32), torch.empty(x.shape)
        tensors = (x, buffer[4:], out, None)
        layouts = (launch.TileLayout(torch.int32, (4,), (4,), offset=offset) for offset in (0, 4))
        descriptors = tuple(launch.kept_descriptor(buffer[4:].data_ptr(), layout) for layout in layouts)
        kernel = calls.kernel("kernel")
        kernel(5, 0, descriptors, (*[t if t is None else t.data_ptr() for t in tensors], *numbers))
        if launch.watched.launches is not None:
            launch.watched.launches.append(launch.Launched(kernel, 5, descriptors, tensors, numbers))
        return out

    return function


def test_what_a_call_is_known_by(calls: Calls) -> None:
    function, other = launches_a_kernel(calls), launches_a_kernel(calls)
    x = torch.randn(64, 32)
    square = x[:32]
    variants = [(x,), (x, 7), (x, "floor"), (square,), (square.T,), (x.bfloat16(),), (x[:, :16],)]
    shapes = 3
    for again in (0, 1, 1, 1):  # before one is watched, a call of the function with such a shape is made
        for args in variants:
            calls(function, *args)
        calls(other, x)
        assert calls.implementations == len(variants) + 1 + again * (shapes + 1)
    assert calls.log[: len(variants) + 1] * 4 == calls.log


def test_calls_that_differ_in_what_is_not_read_are_alike(calls: Calls) -> None:
    """As wgrad's in the number of tokens, of which its operands have the padded one."""
    kernel, x = launches_a_kernel(calls), torch.randn(64, 32)

    def function(x: torch.Tensor, tokens: int, number: int) -> torch.Tensor:
        return kernel(x, number)

    for tokens, number in ((1, 7), (2, 7), (3, 7), (4, 7), (5, 8), (6, 8)):
        calls(function, x, tokens, number, unread=1)
    assert calls.ran == [True, True, False, False, True, False]


def test_what_is_said_not_to_be_read_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the one operator that says so, see above."""
    operator, given = library.gemm_k_grouped, []
    monkeypatch.setattr(operator, "run", lambda *args: given.append(args) or operator.function(*args))
    x, w = (torch.randn(shape, requires_grad=True) for shape in ((64, 32), (2, 32, 32)))
    mxfp8_grouped_mm(x, w.mT, make_offs([30, 34]), recipe="mxfp8_2d", requantize_input=True).sum().backward()
    (args,) = given
    assert args[operator.unread] == 64
    other = operator.function(*args[: operator.unread], 10**6, *args[operator.unread + 1 :])
    assert torch.equal(other, operator.function(*args))


@torch.inference_mode()
def copied(x: torch.Tensor) -> torch.Tensor:
    """There contiguous() says of itself that it is a view, and no mode sees the copy in it."""
    x.T.contiguous()
    return x


class Interpreted:
    """A kernel that is compiled when it is launched."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: None


def compiled_and(result: torch.Tensor) -> torch.Tensor:
    launch.Kernel(Interpreted()).launch(1, (result,), (), (), (), device=result.device)
    return result


def launched_with(kept: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Another kernel with an address of its own."""
    if launch.watched.launches is not None:
        launch.watched.launches.append(launch.Launched(print, 1, (), (kept,), ()))
    return result


SQUARE, KEPT = torch.ones(8, 8), torch.ones(8)
# What a function does besides launching a kernel with ``run``, and its arguments.
MORE = {
    "returns its argument": (lambda run, x: x, SQUARE),
    "returns a part": (lambda run, x: run(x)[:2], SQUARE),
    "copies": (lambda run, x: run(x.T.contiguous()), SQUARE[:4]),
    "copies in inference mode": (lambda run, x: run(copied(x)), SQUARE[:4]),
    "changes its result": (lambda run, x: run(x).add_(1), SQUARE),
    "takes memory twice": (lambda run, x, part: run(x, part), SQUARE, SQUARE[4:]),
    "has no memory": (lambda run, x: run(x), SQUARE[:0]),
    "launches with another address": (lambda run, x: launched_with(KEPT, run(x)), SQUARE),
    "compiles": (lambda run, x: compiled_and(torch.empty(4, 4)), SQUARE),
}


@pytest.mark.parametrize("what", MORE)
def test_what_is_more_than_launches_is_not_replayed(what: str, calls: Calls) -> None:
    (function, *args), run = MORE[what], launches_a_kernel(calls)
    operator = partial(function, run)
    operator.__name__ = what
    for _ in range(4):
        calls(operator, *args)
    assert calls.implementations == 4 and list(replay._known.values()) == ([] if what == "compiles" else [False])


def test_what_is_not_watched_now_is_watched_later(calls: Calls) -> None:
    """A call amid another thread's, with a tensor that starts elsewhere than at 16 bytes, which is not replayed either,
    and one that compiles."""
    function, wide, compiled = launches_a_kernel(calls), torch.randn(65), False

    def compiles_at_times(x: torch.Tensor) -> torch.Tensor:
        if launch.watched.launches is not None and not compiled:
            launch.watched.launches.append(None)
        return function(x)

    calls(compiles_at_times, wide[:64])
    calls(compiles_at_times, wide[1:])
    with replay._watching:
        calls(compiles_at_times, wide[:64])
    calls(compiles_at_times, wide[:64])
    assert calls.implementations == 4
    compiled = True
    calls(compiles_at_times, wide[:64])
    calls(compiles_at_times, wide[:64])
    assert calls.implementations == 5 and not replay._watching.locked()
    calls(compiles_at_times, wide[1:])
    assert calls.ran[-1]


def test_an_error_ends_the_watching(calls: Calls) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            calls(fails, torch.randn(4, 4))
    assert launch.watched.launches is None and not replay._watching.locked()


def test_other_threads_are_not_watched(calls: Calls) -> None:
    function, other = launches_a_kernel(calls), torch.randn(2, 2)

    def launches_elsewhere(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=function, args=(other,))
        thread.start()
        thread.join()
        return function(x)

    x = torch.randn(4, 4)
    for _ in range(3):
        calls(launches_elsewhere, x)
    assert [len(launches) for *_, launches in calls.log] == [2, 2, 1]


def test_no_more_is_kept_than_so_many_calls(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is replayed outlives what came but once."""
    monkeypatch.setattr(replay, "_MOST", 8)
    monkeypatch.setattr(replay, "_UNWATCHED", 2)
    function = launches_a_kernel(calls)
    for rows in range(1, 30):
        calls(function, torch.randn(rows, 4))
        calls(function, torch.randn(40, 4))
        assert len(replay._known) <= 8 and len(replay._calls) <= 8
    assert calls.implementations == 29 + 3
    for rows in range(50, 70):
        for _ in range(4):
            calls(function, torch.randn(rows, 4))
        assert len(replay._known) <= 8 and len(replay._calls) <= 8
    assert calls.implementations == 29 + 3 + 3 * 20


def test_hooks_of_profilers_see_every_launch(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Triton, which ``Kernel.launch`` goes back to as soon as there is one."""
    function, x = launches_a_kernel(calls), torch.randn(4, 4)
    for _ in range(3):
        calls(function, x)
    assert calls.implementations == 2
    monkeypatch.setattr(replay.knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
    calls(function, x)
    assert calls.implementations == 3
