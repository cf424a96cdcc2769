"""The backends: what one is (``Backend``), which there are (``BACKENDS``), and which is chosen (``select``)."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from titan_mxfp8.backends.hardware import Hardware, hardware_of
from titan_mxfp8.format.codec import Encoded
from titan_mxfp8.format.spec import Operand, OperandSpec
from titan_mxfp8.recipe import AUTO, Recipe, get_recipe


@dataclass(frozen=True, kw_only=True)
class Gemm(Encoded):
    """One of the three GEMMs in a plan."""

    a: OperandSpec  # the activations (forward) or the output gradient (dgrad, wgrad)
    b: OperandSpec  # the weight (forward, dgrad) or the activations (wgrad)
    mma_dtype: Literal["FP8", "bf16", "fp32"]  # what the tensor cores, or the CPU, multiply


@dataclass(frozen=True, kw_only=True)
class Plan(Encoded):
    """Which operands each GEMM of a recipe takes: ``ops/matmul.py`` has a table of the three."""

    forward: Gemm
    dgrad: Gemm
    wgrad: Gemm

    @property
    def gemms(self) -> dict[str, Gemm]:
        """All three by their names."""
        return {"forward": self.forward, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def mma_dtypes(self) -> set[str]:
        """What its GEMMs multiply."""
        return {gemm.mma_dtype for gemm in self.gemms.values()}

    def in_u(self, whole_blocks: bool) -> Literal["dgate_dup", "dgate", "nothing"]:
        """What ``Backend.swiglu_backward`` writes over u: both gradients along H, interleaved (``format.spec``), where
        they are rebased and features are whole blocks of 128; or dgate along M, where that is in bf16."""
        if self.wgrad.a.stored == "bf16":
            return "dgate"
        return "dgate_dup" if self.dgrad.a.block_k == 128 and whole_blocks else "nothing"

    def map(self, change: Callable[[Gemm], Gemm]) -> "Plan":
        """Each of the three changed."""
        return Plan(**{name: change(gemm) for name, gemm in self.gemms.items()})

    def __str__(self) -> str:
        return ", ".join(f"{name} {gemm.mma_dtype}" for name, gemm in self.gemms.items())


class SwigluGradients(NamedTuple):
    """What ``Backend.swiglu_backward`` makes: the gradients along H (dgrad) and along M (wgrad), the score times h
    along M (wgrad of w2), and the scores' gradient, fp32 (M,), None without scores."""

    dgate_rowwise: Operand
    dup_rowwise: Operand
    dgate_columnwise: Operand
    dup_columnwise: Operand
    sh_columnwise: Operand
    dscores: Tensor | None


class Backend(Protocol):
    """What a backend's module offers. All give the bits of ``format.reference``, and GEMMs equal up to the order of
    additions and the rounding of the output.

    E experts; C is a GEMM's contraction axis, R and D the other axis of ``a`` and of ``b``.
    """

    @staticmethod
    def plan(recipe: Recipe, hardware: Hardware) -> Plan:
        """What each GEMM takes and multiplies."""

    @staticmethod
    def quantize(x: Tensor, axis: int, spec: OperandSpec, offs: Tensor | None) -> Operand:
        """``format.reference.quantize``, of any spec of the plans and any exact FP8 one. Of operands of a spec that
        ``grouped_scales`` what lies behind the last group is undefined."""

    @staticmethod
    def quantize_both(
        x: Tensor, rowwise: OperandSpec, columnwise: OperandSpec, offs: Tensor | None
    ) -> tuple[Operand, Operand]:
        """``x`` quantised along its last axis and along the one before it, both from ``x``; ``offs`` cuts the latter,
        and the former if its spec ``grouped_scales``.

        In one read of ``x`` where there is a kernel for the pair.
        """

    @staticmethod
    def requantize(
        rows: Operand, axis: int, spec: OperandSpec, offs: Tensor | None, places: Tensor | None = None
    ) -> Operand:
        """``format.reference.requantize`` to any spec of activations or gradients, or of weights in exact 32x32 blocks
        to that of forward or dgrad. What lies behind the last group is undefined, and costs nothing. With ``places``,
        int32 (M,), row i is that at ``places[i]`` of ``rows``."""

    @staticmethod
    def gemm_m_grouped(
        a: Operand, b: Operand, offs: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype, zero_tail: bool = True
    ) -> Tensor:
        """Rows of group e times matrix e: forward and dgrad. (M, D), zeros in the rows at and past ``offs[-1]``.

        Args:
            a: of (M, C), quantised along C.
            b: of (E, D, C) quantised along its last axis, or of (E, C, D) along the one before it.
            offs: int32 (E,) end offsets of the groups among the M rows; None: E is 1 and every row is in the group.
            bias: (E, D), added to the rows of each group, or None.
            out_dtype: bf16 or fp32.
            zero_tail: False: the rows at and past ``offs[-1]`` are undefined, and cost nothing.
        """

    @staticmethod
    def dual_gemm_m_grouped(products: Iterator[tuple[Operand, Operand]], offs: Tensor | None) -> list[Tensor]:
        """Two products of which only the sum is wanted: dgrad of w1 and w3. (M, D) in bf16: the sum, rounded once,
        where a kernel adds up both, else each of the two. Rows at and past ``offs[-1]`` are undefined.

        Args:
            products: ``a`` and ``b`` as of ``gemm_m_grouped``, both pairs of the same shapes and specs; both ``a``
                may be interleaved, as ``swiglu_backward`` makes them.
            offs: as there.
        """

    @staticmethod
    def gemm_k_grouped(
        a: Operand, b: Operand, offs: Tensor | None, out_dtype: torch.dtype, add_to: Tensor | None = None
    ) -> Tensor:
        """``a^T`` times ``b`` over the tokens of each group: wgrad. (E, N, K), exactly 0 for an empty group; or
        ``add_to``.

        Args:
            a: of (M, N), quantised along M with ``offs``.
            b: of (M, K), likewise.
            offs: the offsets that both were quantised with; None: one group.
            out_dtype: bf16 or fp32.
            add_to: fp32 (E, N, K), contiguous, to which the product is added before it is rounded; None: to nothing.
                ``out_dtype`` is then fp32.
        """

    @staticmethod
    def swiglu(gate_MH: Tensor, up_MH: Tensor, limit: float | None, spec: OperandSpec, offs: Tensor | None) -> Operand:
        """``format.swiglu.forward``, quantised along H. Bits may differ where another ``exp`` rounds otherwise.

        Args:
            gate_MH, up_MH: bf16 (M, H).
            limit: of gpt_oss, or None.
            spec: of a plan's activations in forward.
            offs: int32 (E,) end offsets of the groups; rows at and past ``offs[-1]`` are not computed, and the operand
                holds anything there. None: every row.
        """

    swiglu_gemm_m_grouped: Callable[..., tuple[Tensor, Tensor, Operand] | None] | None
    """``gemm_m_grouped`` by w1 and by w3, and ``swiglu`` of both, as one kernel that gives their bits: gate and up in
    bf16, (M, H), and h along H; None where a backend has none. It takes ``a``, w1, w3, a pair of their biases, and
    limit, spec and offs of ``swiglu``, and gives None of what it cannot do: the separate kernels do that. What belongs
    to no group is undefined."""

    @staticmethod
    def swiglu_backward(
        inputs: list[Tensor], scores_M: Tensor | None, limit: float | None, plan: Plan, offs: Tensor | None
    ) -> SwigluGradients:
        """``format.swiglu.backward``, quantised along H and M as the plan's gradients, and s h as its activations in
        wgrad.

        Args:
            inputs: gate and up as in ``swiglu``, and u, bf16 (M, H), contiguous, the gradient by h without the score.
                The list is emptied. u is lost: ``Plan.in_u`` says what is in its memory then.
            scores_M: fp32 (M,), or None for 1.
            limit: as in ``swiglu``.
            plan: of the layer.
            offs: as in ``swiglu``; along M blocks restart at each group.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """A row of the table of backends."""

    name: str  # what users write
    module: str  # import path of the ``Backend``, which is imported when it is first used
    needs: str  # the hardware it needs, in words
    runs_on: Callable[[Hardware], bool]  # whether it runs there
    rebases: bool  # whether it multiplies rebased operands (``Recipe.block_k`` 128)
    recipe: str  # what recipe ``auto`` is there
    why: str  # why that recipe, in words for the log


def runs_triton(hardware: Hardware) -> bool:
    """Whether the portable kernels run there."""
    capability = hardware.capability
    return capability >= (8, 0) if capability else hardware.arch in ("gfx942", "gfx950")


# In order of preference: ``auto`` takes the first that runs on the hardware.
BACKENDS = (
    BackendRow(
        name="hopper",
        module="titan_mxfp8.backends.hopper",
        needs="an NVIDIA GPU of SM90 (H100, H200)",
        runs_on=lambda hardware: hardware.arch == "sm_90",
        rebases=True,
        recipe="mxfp8_2d_rebased",
        why="the fastest on Hopper. 128 elements share a scale, so it is not exact MXFP8, which mxfp8_2d is",
    ),
    BackendRow(
        name="sm100",
        module="titan_mxfp8.backends.sm100",
        needs="an NVIDIA GPU of SM100 (B200, GB200)",
        runs_on=lambda hardware: hardware.arch == "sm_100",
        rebases=False,
        recipe="mxfp8",
        why="exact MXFP8, which Blackwell's tensor cores multiply",
    ),
    BackendRow(
        name="triton",
        module="titan_mxfp8.backends.triton",
        needs="an NVIDIA GPU of SM80 or newer, or an AMD gfx942 or gfx950",
        runs_on=runs_triton,
        rebases=False,
        recipe="mxfp8",
        why="exact MXFP8, in FP8 where tensor cores know its scales",
    ),
    BackendRow(
        name="reference",
        module="titan_mxfp8.backends.reference",
        needs="anything torch runs on",
        runs_on=lambda hardware: True,
        rebases=True,
        recipe="mxfp8",
        why="exact MXFP8, whose numerics any hardware can show",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The chosen backend and why, in words for the log; ``warning`` where this project never ran it there."""

    name: str
    reason: str
    warning: str | None


def select(backend: str, hardware: Hardware, recipe: Recipe) -> Selection:
    """Chooses the backend: the one named, or with ``auto`` the first of the table that runs on ``hardware``. Raises
    ValueError: unknown name, a named backend that cannot run there, or a rebased recipe with one that cannot."""
    row, reason = _row(backend, hardware), "named by the user"
    if backend == "auto":
        passed_over = [f"{other.name} needs {other.needs}" for other in BACKENDS[: BACKENDS.index(row)]]
        reason = "; ".join([f"for {hardware.name}", *passed_over])
    if recipe.block_k == 128 and not row.rebases:
        able = " or ".join(repr(other.name) for other in BACKENDS if other.rebases)
        raise ValueError(
            f"recipe {recipe.name!r} is rebased, but backend {row.name!r} ({reason}) cannot: use backend {able}, or "
            f"a recipe that is not"
        )
    warning = None
    if not hardware.was_tried and row.name != "reference":
        warning = (
            f"backend {row.name!r} was never run on {hardware.name} ({hardware.arch}) by this project: check losses "
            "against bf16, or name another one"
        )
    return Selection(name=row.name, reason=reason, warning=warning)


def recommend(recipe: str | Recipe, backend: str, hardware: Hardware, rebase: bool = False) -> Recipe:
    """``get_recipe``, and for ``auto`` the recipe that is recommended for the backend that is named, or chosen, there.
    Raises ValueError as ``select`` and ``get_recipe``."""
    return get_recipe(_row(backend, hardware).recipe if recipe == AUTO else recipe, rebase)


def explain(asked: str | Recipe, recipe: Recipe, backend: str, hardware: Hardware) -> str:
    """Why ``auto`` is this recipe; or, of a recipe that was named and multiplies bf16 values in all GEMMs, which one
    multiplies FP8 there. Nothing where there is nothing to say."""
    row = _row(backend, hardware)
    if asked == AUTO:
        return f"recipe auto is {recipe.name} on {hardware.name}: {row.why}"
    best = get_recipe(row.recipe)
    here, fastest = (plan_on(one, row.name, hardware).mma_dtypes for one in (recipe, best))
    if recipe.quantized and here == {"bf16"} and "FP8" in fastest:
        return (
            f"recipe {recipe.name} multiplies bf16 values in all GEMMs on {hardware.name}, so expect no speed from it; "
            f"{best.name} multiplies FP8"
        )
    return ""


@cache
def load(backend: str, device: torch.device) -> Backend:
    """The module of the backend that is named, or that ``auto`` chooses for ``device``. Raises ValueError: unknown
    name, or a named backend that cannot run there."""
    return importlib.import_module(_row(backend, hardware_of(device)).module)


replays = True


def replay_launches(on: bool) -> None:
    """Switches on or off, for this process, that operators on a GPU repeat what they launched for the same shapes
    before instead of running the Python that decides it (``common.replay``); on unless switched off. Results are the
    same: off is slower for small shapes, and for whoever debugs a backend."""
    global replays
    replays = on


def plan_on(recipe: Recipe, backend: str, hardware: Hardware) -> Plan:
    """The plan of the backend that is named, or that ``auto`` chooses for ``hardware``. Raises ValueError as
    ``select``."""
    select(backend, hardware, recipe)  # which raises
    return importlib.import_module(_row(backend, hardware).module).plan(recipe, hardware)


def _row(backend: str, hardware: Hardware) -> BackendRow:
    """The one that is named, or the first that runs there."""
    known = ["auto", *(row.name for row in BACKENDS)]
    if backend not in known:
        raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(known)}")
    if backend == "auto":
        return next(row for row in BACKENDS if row.runs_on(hardware))
    row = next(row for row in BACKENDS if row.name == backend)
    if not row.runs_on(hardware):
        raise ValueError(
            f"backend {backend!r} needs {row.needs} and cannot run on {hardware.name}: use 'auto' or 'reference'"
        )
    return row
