"""Module conversion without TorchTitan: which modules are swapped, what stays as it was, and what the errors say."""

import copy
import functools
import io
import logging
import pickle
from collections.abc import Callable

import processes
import pytest
import torch
import torch.nn.functional as F
from tiers import daily
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint
from watch import process_group, saved_tensors

from scripts.bench.problems import make_offs, relative_rms
from titan_mxfp8 import RECIPES, convert_model, modules, mxfp8_grouped_mm, mxfp8_linear
from titan_mxfp8.backends.hardware import CLUSTER_GPUS
from titan_mxfp8.modules import convert


class Experts(nn.Module):
    """A user's own experts."""

    def __init__(self, experts: int = 4, dim: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(experts, hidden, dim) / dim**0.5)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x.bfloat16(), self.w.bfloat16().transpose(-2, -1), offs=offs)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.shared_experts = nn.Linear(64, 96)
        self.head = nn.Linear(64, 4)
        self.attention = nn.ModuleDict({"wq": nn.Linear(64, 64), "wk": nn.Linear(64, 64, bias=False)})

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return self.experts(x, offs) + self.shared_experts(x)


class Plain(Experts):
    """Casts nothing."""

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, self.w.mT, offs)


OFFS = make_offs([3, 0, 6, 11])


def test_what_is_converted_is_returned_logged_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    """INFO is shown to nobody who did not set logging up."""
    model = Layer()
    converted = convert_model(model, grouped_fqns=["experts"], linear_filter_fqns=["wk"], recipe="mxfp8_2d")
    assert converted == ["experts", "shared_experts", "attention.wq"]
    assert isinstance(model.experts, Experts) and isinstance(model.shared_experts, modules.MXFP8Linear)
    assert type(model.head) is nn.Linear and type(model.attention["wk"]) is nn.Linear
    assert str(converted).splitlines() == [record.getMessage() for record in caplog.records]
    assert str(converted).splitlines()[1:] == [
        "MXFP8: converted 1 expert module (recipe mxfp8_2d, backend reference); left: none",
        "MXFP8: converted 2 Linears (recipe mxfp8_2d, backend reference); left: "
        "head (64 -> 4 features, not multiples of 32), attention.wk (linear_filter_fqns has 'wk')",
    ]
    again = copy.deepcopy(converted)
    assert str(again) == str(converted) and again == converted


def test_either_kind_alone_is_converted_with_what_is_recommended_too() -> None:
    for report in (modules.convert_linears(Layer()), modules.convert_experts(Layer(), fqns="experts")):
        assert str(report).startswith("MXFP8: recipe mxfp8, backend reference (for cpu")


def test_the_forward_is_the_mxfp8_op() -> None:
    model, x = Layer(), torch.randn(20, 64)
    convert_model(model, grouped_fqns="experts", recipe="mxfp8_floor")
    expected = mxfp8_grouped_mm(x.bfloat16(), model.experts.w.bfloat16().mT, OFFS, recipe="mxfp8_floor")
    assert torch.equal(model.experts(x, OFFS), expected)
    expected = mxfp8_linear(x, model.shared_experts.weight, model.shared_experts.bias, recipe="mxfp8_floor")
    assert torch.equal(model.shared_experts(x), expected)


def test_parameters_stay_plain_and_checkpoints_exchange() -> None:
    model = Layer()
    before = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    convert_model(model, grouped_fqns=["experts"])
    assert all(param is before[name] and type(param) is nn.Parameter for name, param in model.named_parameters())
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    fresh = Layer()
    fresh.load_state_dict(model.state_dict())
    model.load_state_dict(fresh.state_dict())


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copy.deepcopy, saved_and_loaded])
def test_a_copy_is_converted_too(make: Callable[[nn.Module], nn.Module]) -> None:
    """TorchTitan's pipelines copy the model. Classes of experts are made at run time: pickle finds none by name."""
    model, x = Layer(), torch.randn(20, 64)
    convert_model(model, grouped_fqns=["experts"], recipe="mxfp8_2d")
    copied = make(model)
    assert type(copied.experts) is type(model.experts) and copied.experts.mxfp8 == model.experts.mxfp8
    assert torch.equal(copied(x, OFFS), model(x, OFFS)) and copied.experts.w is not model.experts.w


class CompiledExperts(Experts):
    """An MXFP8 class of the user's."""

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return mxfp8_grouped_mm(x.bfloat16(), self.w.bfloat16().mT, offs, **self.op_options)


def test_a_class_of_no_importable_module_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modules.EXPERT_CLASSES, Experts, CompiledExperts)
    monkeypatch.setattr(CompiledExperts, "__module__", "made_by_exec")
    model = Layer()
    convert_model(model, grouped_fqns=["experts"], recipe="mxfp8_2d")
    assert type(copy.deepcopy(model).experts) is type(model.experts)


def test_any_number_of_recipes_compile_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile compiles a forward for at most 8 states of the world, of which each recipe takes some."""
    monkeypatch.setitem(modules.EXPERT_CLASSES, Experts, CompiledExperts)
    torch._dynamo.reset()
    *others, last = [*dict.fromkeys(RECIPES.values())][:9]
    for recipe in (*others, last):
        model = nn.ModuleDict({"experts": Experts(), "linear": nn.Linear(64, 64)})
        convert_model(model, recipe=recipe, grouped_fqns="experts")
        for module, args in ((model["experts"], (OFFS,)), (model["linear"], ())):
            assert isinstance(module, modules.ConvertedModule) and isinstance(module, CompiledExperts | nn.Linear)
            compiled = torch.compile(module, backend="eager", fullgraph=True)
            for rows in (20, 24) if recipe is last else (20,):
                x = torch.randn(rows, 64, requires_grad=True)
                y = compiled(x, *args)
                y.float().sum().backward()
                assert torch.equal(y, module(x, *args))
                with torch.no_grad():
                    compiled(x, *args)
    assert pickle.loads(pickle.dumps(model))["experts"].mxfp8.recipe == recipe


def test_a_compiled_linear_looks_at_nothing_behind_its_matmul_before_a_call() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    convert_model(model)
    torch._dynamo.reset()
    torch.compile(model[0], backend="eager", fullgraph=True)(torch.randn(20, 64, requires_grad=True)).sum().backward()
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(type(model[0]).forward.__code__)
    guards = str(entry.guard_manager)
    assert "mx_matmul" in guards
    assert "_Matmul" not in guards and "quantize_both" not in guards


def test_a_forward_that_calls_no_grouped_mm_is_refused() -> None:
    """A loop over experts, as TorchTitan's fallback: it would train in bf16 while the config says MXFP8."""

    class Loop(Experts):
        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return x @ self.w[0].mT

    model = nn.Sequential(Loop())
    convert_model(model, grouped_fqns=["0"])
    with pytest.raises(RuntimeError, match=r"made no call of torch\._grouped_mm"):
        model[0](torch.randn(20, 64), OFFS)


class EarlyReturn(Experts):
    """Without tokens it has nothing to multiply."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if not counts.sum():
            return x.new_zeros(x.shape[0], self.w.shape[1], dtype=torch.bfloat16)
        return super().forward(x, counts.cumsum(0, dtype=torch.int32))


@pytest.mark.parametrize("rows", [0, 8])
def test_experts_without_tokens_may_call_nothing(rows: int) -> None:
    """One rank of expert parallelism has none, or has rows of padding alone, while the others go on."""
    model = nn.Sequential(EarlyReturn())
    convert_model(model, grouped_fqns=["0"])
    assert model[0](torch.randn(rows, 64), torch.tensor([0, 0, 0, 0])).shape == (rows, 96)
    assert model[0](x=torch.randn(rows, 64), counts=torch.tensor([0, 0, 0, 0])).shape == (rows, 96)
    x, counts = torch.randn(20, 64), torch.tensor([3, 0, 6, 11])
    expected = mxfp8_grouped_mm(x.bfloat16(), model[0].w.bfloat16().mT, OFFS)
    assert torch.equal(model[0](x, counts), expected)


class Recomputed(Experts):
    """Its GEMM, between two activations; with ``how`` computed again in backward."""

    def __init__(self, how: str | None) -> None:
        super().__init__()
        self.how = how

    def multiply(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.silu(super().forward(F.silu(x), offs))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        if self.how is None:
            return self.multiply(x, offs)
        if self.how == "own function":
            return OwnCheckpoint.apply(self.multiply, x, offs)
        if self.how == "compiled":
            return torch.compile(self.multiply, backend="aot_eager")(x, offs)
        return checkpoint(self.multiply, x, offs, use_reentrant=self.how == "reentrant")


class OwnCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x, offs):
        ctx.function = function
        ctx.save_for_backward(x, offs)
        return function(x, offs)

    @staticmethod
    def backward(ctx, dy):
        x, offs = (tensor.detach() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            y = ctx.function(x.requires_grad_(), offs)
        y.backward(dy)
        return None, x.grad, None


def gradients(module: nn.Module) -> list[torch.Tensor]:
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    module(x, OFFS).float().square().sum().backward()
    return [x.grad, module.w.grad]


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_what_activation_checkpointing_inside_experts_computes_again_is_mxfp8_too(how: str) -> None:
    bf16 = nn.ModuleList([Recomputed(None), Recomputed(how)])
    bf16[1].load_state_dict(bf16[0].state_dict())
    mxfp8 = copy.deepcopy(bf16)
    convert_model(mxfp8, grouped_fqns=["0", "1"])
    expected = gradients(mxfp8[0])
    for actual, value, unconverted in zip(gradients(mxfp8[1]), expected, gradients(bf16[1]), strict=True):
        assert torch.equal(actual, value) and not torch.equal(actual, unconverted)


@pytest.mark.parametrize("how", ["own function", "compiled"])
def test_a_function_of_the_users_with_a_backward_of_its_own_is_refused(how: str) -> None:
    """Nobody can know that it will be MXFP8; without gradients there is none."""
    model = nn.ModuleList([Recomputed(how)])
    convert_model(model, grouped_fqns=["0"])
    says = r"^0: its forward, .* calls torch._grouped_mm with gradients off, in .* that torch.compile compiles or"
    with pytest.raises(RuntimeError, match=says):
        gradients(model[0])
    with torch.no_grad():
        model[0](torch.randn(20, 64), OFFS)


@pytest.mark.parametrize("recipe, changes", [("mxfp8", False), ("mxfp8_2d", True), ("mxfp8_2d_rebased", True)])
def test_requantize_input_without_effect_is_a_warning(
    recipe: str, changes: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "hardware_of", lambda device: CLUSTER_GPUS["H200"])
    convert_model(Layer(), recipe=recipe)
    assert "requantize_input" not in caplog.text
    convert_model(Layer(), recipe=recipe, requantize_input=True)
    assert ("requantize_input changes nothing, as forward multiplies bf16 values" in caplog.text) is not changes


def test_hardware_that_was_never_tried_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "hardware_of", lambda device: CLUSTER_GPUS["B200"])
    convert_model(Layer(), recipe="mxfp8_2d")
    assert "backend sm100 (for NVIDIA B200; " in caplog.text and "forward FP8, dgrad FP8, wgrad FP8" in caplog.text
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "never run on NVIDIA B200" in warning.getMessage()


def test_a_model_that_is_still_on_the_cpu_of_a_machine_with_a_gpu_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers would run the backend of the CPU on the GPU."""
    for device, backend, warns in (("cpu", "auto", False), ("cuda", "reference", False), ("cuda", "auto", True)):
        monkeypatch.setattr(convert, "training_device", lambda device=device: torch.device(device))
        convert_model(Layer(), backend=backend)
        assert ("convert it after model.to('cuda')" in caplog.text) is warns


def tree(linears: str, **others: nn.Module) -> nn.Module:
    """A model with a linear of 64 features for each of these names, and the other modules."""
    root = nn.Module()
    for name, module in ({name: nn.Linear(64, 64) for name in linears.split()} | others).items():
        *parents, last = name.split(".")
        parent = root
        for part in parents:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, module)
    return root


class Closed(Experts):
    """Cannot be derived from as other classes."""

    def __init_subclass__(cls, *, kind: str, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)


class Frozen(Experts):
    """Takes no attributes but those of its own."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("training", "w"):
            raise AttributeError(name)
        super().__setattr__(name, value)


class Scaled(nn.Linear):
    """A subclass may have a forward of its own."""


class TopRouter(nn.Sequential):
    """Named as Transformers and TorchTitan name theirs."""


def hooked(module: nn.Module) -> nn.Module:
    """As accelerate's hooks leave it: with a forward in the module, past which no class can reach."""
    module.forward = functools.partial(type(module).forward, module)
    return module


def test_what_is_left_as_it_was_is_named_with_the_reason() -> None:
    """A gated linear unit's gate is no router. Of many names of a kind the first 8 are told."""
    adapters = " ".join(f"{i}.base_layer {i}.lora_A.default {i}.lora_B.default" for i in range(3, 8))
    attention, shared = nn.MultiheadAttention(64, 2), nn.Linear(64, 64)
    attention.out_proj = nn.Linear(64, 64)
    others = {"scaled": Scaled(64, 64), "top": TopRouter(nn.Linear(64, 64)), "hooked": hooked(nn.Linear(64, 64))}
    others |= {"attention": attention, "first": shared, "second": shared, "1.bank": Experts()}
    model = tree(f"0.gate 0.experts.0.up 1.router.proj 2.gate 2.up {adapters}", **others)
    assert "converted 0 expert modules" in str(
        report := convert_model(copy.deepcopy(model), linear_filter_fqns="second")
    )
    assert report == ["0.experts.0.up", "2.gate", "2.up", *(f"{i}.base_layer" for i in range(3, 8))]
    assert convert_model(model, linear_filter_fqns="second", grouped_fqns="1.bank")[:1] == ["1.bank"]
    names = [f"{i}.lora_{part}.default" for i in range(3, 7) for part in "AB"]
    for left in (
        "left: 1.bank (Experts, unless grouped_fqns names it)",
        "left: 0.gate, 1.router.proj, top.0 (router), ",
        f"{', '.join(names)} and 2 more (LoRA adapter), scaled (Scaled, not nn.Linear itself), hooked (has a fo",
        "attention.out_proj (nn.MultiheadAttention reads its weight itself), first (also named second, and linear_f",
    ):
        assert left in str(report)


def test_experts_are_converted_where_the_filter_leaves_no_linear() -> None:
    """Also by one of their names, and where they take no attributes. Where there are none the report has no word."""
    bank = Experts()
    model = tree("wq", first=bank, second=bank, frozen=Frozen())
    report = convert_model(model, grouped_fqns=["second$", "frozen"], linear_filter_fqns="wq")
    assert report == ["first", "frozen"] and "converted 0 Linears" in str(report)
    assert "expert" not in str(convert_model(tree("wq")))


def test_a_filter_names_a_part_or_an_end() -> None:
    for filters, converted in (
        (["gate"], "a.wq"),
        (["gate$"], "a.gate_proj a.wq"),
        ([".gate$", "wq"], "a.gate_proj own_gate"),
        ("own_gate$,a.gate$", "a.gate_proj a.wq"),
        (["a$"], "a.gate a.gate_proj a.wq own_gate"),
    ):
        assert convert_model(tree("a.gate a.gate_proj a.wq own_gate"), linear_filter_fqns=filters) == converted.split()


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (
            {"grouped_fqns": "bank"},
            r"^convert_model: .* grouped_fqns \['bank'\].*expert modules: good, bad, hooked \(Experts\), c",
        ),
        (
            {"grouped_fqns": ["good", "bad"]},
            r"bad holds w of shape \(4, 40, 64\).*multiples of 32.*leave .* out of grouped",
        ),
        ({"grouped_fqns": ["good", "closed"]}, "no class can be derived from Closed, that of closed: .*'kind'"),
        ({"grouped_fqns": ["good", "hooked"]}, r"hooked has a forward of its own.*convert before"),
        ({"linear_filter_fqns": "wq"}, r"no nn.Linear was converted. .*wq \(linear_filter_fqns has 'wq'\)"),
        ({"recipe": "mxfp9"}, "unknown recipe"),
        ({"recipe": "bf16"}, "recipe 'bf16' quantises nothing"),
        ({"backend": 1}, "backend = 1: it must be a string"),
        ({"requantize_input": "false"}, "requantize_input = 'false': it must be true or false"),
        ({"linear_filter_fqns": 3}, "linear_filter_fqns = 3: it must be a list of strings"),
        ({"grouped_fqns": [nn.Linear]}, "grouped_fqns = .*Linear.*: it must be a list of strings"),
        ({"rebase": "false"}, "rebase is True or False, got 'false'"),
    ],
)
def test_what_cannot_be_is_an_error_that_leaves_the_whole_model_as_it_was(kwargs: dict, message: str) -> None:
    model = tree("wq", good=Experts(), bad=Experts(hidden=40), closed=Closed(), hooked=hooked(Experts()))
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        convert_model(model, **kwargs)
    assert [type(module) for module in model.modules()] == before
    assert not any(hasattr(module, "mxfp8") for module in model.modules())


def test_what_is_converted_or_no_model_is_refused() -> None:
    model = Layer()
    convert_model(model, grouped_fqns=["experts"])
    with pytest.raises(ValueError, match=r"expert modules: experts \(converted already\)"):
        convert_model(model, grouped_fqns=["experts"])
    with pytest.raises(ValueError, match=r"Linears: shared_experts, attention.wq, attention.wk \(converted already\)"):
        modules.convert_linears(model, recipe="mxfp8")
    for thing in (model.state_dict(), [model], None):
        with pytest.raises(ValueError, match=r"^convert_model: takes a model, .*: load saved weights into a model"):
            convert_model(thing)


class Doubled(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return 2 * w


@pytest.mark.parametrize("before", [True, False])
def test_experts_of_parametrized_weights_are_converted(before: bool) -> None:
    """They, not the module that makes a weight of theirs, in which "experts" is a part of the name too."""
    model = nn.ModuleDict({"experts": Experts()})
    x = torch.randn(20, 64)
    if before:
        register_parametrization(model["experts"], "w", Doubled())
    assert convert_model(model, grouped_fqns=["experts"]) == ["experts"]
    if not before:
        register_parametrization(model["experts"], "w", Doubled())
    w = model["experts"].parametrizations.w.original
    expected = mxfp8_grouped_mm(x.bfloat16(), (2 * w).bfloat16().mT, OFFS)
    actual = model["experts"](x, OFFS)
    actual.float().sum().backward()
    assert torch.equal(actual, expected) and w.grad.any()


@pytest.mark.parametrize("shape", [(4, 1, 96), (4, 1, 1), (4, 3, 2)])
def test_what_is_narrower_than_a_block_is_no_matrix_of_an_expert(shape: tuple[int, ...]) -> None:
    """A bias, a scale, or scales of blocks, which no GEMM takes."""

    class Scaled(Experts):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(shape))

        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return super().forward(x, offs) * self.scale[0, 0, -1]

    model = nn.Sequential(Scaled())
    convert_model(model, grouped_fqns=["0"])
    x = torch.randn(20, 64)
    expected = mxfp8_grouped_mm(x.bfloat16(), model[0].w.bfloat16().mT, OFFS) * model[0].scale[0, 0, -1]
    assert torch.equal(model[0](x, OFFS), expected)
    model = nn.Sequential(Scaled())
    model[0].scale = nn.Parameter(torch.randn(4, 40, 56))
    with pytest.raises(ValueError, match=r"0 holds scale of shape \(4, 40, 56\).* if no GEMM multiplies it, give it"):
        convert_model(model, grouped_fqns=["0"])


@pytest.mark.parametrize("whole", [False, True])
def test_torchs_fused_encoder_layer_does_not_read_past_converted_linears(whole: bool) -> None:
    """In eval mode without gradients its fused operator takes weights, not modules."""
    model = nn.TransformerEncoderLayer(64, 2, 96, batch_first=True)
    model = nn.TransformerEncoder(model, 1) if whole else model
    mxfp8 = copy.deepcopy(model)
    assert len(convert_model(mxfp8)) == 2
    x, padding = torch.randn(3, 8, 64), torch.zeros(3, 8, dtype=torch.bool)
    padding[0, 6:] = True  # with a mask, a whole encoder makes nested tensors
    # dropout apart, what training mode computes, which never takes the fused operator
    for module in mxfp8.modules():
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            module.eval()
    expected = mxfp8(x, src_key_padding_mask=padding)
    with torch.no_grad():
        actual = mxfp8.eval()(x, src_key_padding_mask=padding)
        unconverted = model.eval()(x, src_key_padding_mask=padding)
    assert relative_rms(actual[~padding], expected[~padding]) < 1e-6
    assert relative_rms(actual[~padding], unconverted[~padding]) > 1e-3


@pytest.mark.parametrize("what", ["model", "activations", "autocast"])
def test_float16_is_an_error_that_names_the_module(what: str) -> None:
    model = nn.ModuleDict({"experts": Plain(), "linear": nn.Linear(64, 64)})
    convert_model(model, grouped_fqns="experts")
    x = torch.randn(20, 64, dtype=torch.float32 if what == "autocast" else torch.float16)
    model.to(torch.float16 if what == "model" else torch.float32)
    with torch.autocast("cpu", torch.float16, enabled=what == "autocast"):
        said = "this autocast region is of" if what == "autocast" else "x must be bfloat16 or float32, got"
        with pytest.raises(ValueError, match=rf"^linear: {said} torch\.float16"):
            model["linear"](x)
        if what != "autocast":
            with pytest.raises(ValueError, match=r"^experts: .*float16"):
                model["experts"](x, OFFS)


def test_a_module_that_is_the_whole_model_has_a_name() -> None:
    with pytest.raises(ValueError, match=r"The model's Linears: Linear \(64 -> 40 features, not multiples of 32\)$"):
        convert_model(nn.Linear(64, 40))
    with pytest.raises(ValueError, match=r"The model's expert modules: Experts \(Experts\)$"):
        convert_model(Experts(), grouped_fqns="bank")
    linear = nn.Linear(64, 64)
    convert_model(linear)
    with pytest.raises(ValueError, match=r"^Linear: mxfp8_linear takes x of shape"):
        linear(torch.randn(4, 32))


@pytest.mark.parametrize("wrapped", [False, True])
@process_group()
def test_weights_that_fsdp_frees_are_not_kept_in_fp8(wrapped: bool) -> None:
    """Between forward and backward: one byte for each element of every layer's whole weight would undo FSDP."""
    model = Layer()
    convert_model(model, grouped_fqns=["experts"], recipe="mxfp8_2d")
    if wrapped:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

    with saved_tensors() as saved:
        y = model(torch.randn(20, 64, requires_grad=True), OFFS)
    y.float().sum().backward()
    kept = {tuple(t.shape) for t in saved if t.dtype == torch.float8_e4m3fn}
    for weight in ((4, 64, 96), (1, 64, 96)):  # of the experts, and of the linear, the contraction of dgrad last
        assert (weight in kept) != wrapped


def test_a_grouped_mm_of_the_users_keeps_its_signature() -> None:
    """The dtype of its input where it names none; a call without groups is an error that says so."""

    model = nn.Sequential(Plain())
    convert_model(model, grouped_fqns=["0"])
    x = torch.randn(20, 64)
    expected = mxfp8_grouped_mm(x, model[0].w.mT, OFFS, out_dtype=torch.float32)
    assert torch.equal(model[0](x, OFFS), expected) and expected.dtype == torch.float32
    with pytest.raises(ValueError, match="offs, an int32 tensor of shape"):
        model[0](x, None)


@pytest.mark.parametrize("name", ["torch._grouped_mm", "aten", "aten.default", "torch.nn.functional.grouped_mm"])
def test_every_name_of_grouped_mm_is_mxfp8s(name: str) -> None:
    aten = torch.ops.aten._grouped_mm
    named = {"aten": aten, "aten.default": aten.default, "torch._grouped_mm": torch._grouped_mm}
    function = named.get(name, torch.nn.functional.grouped_mm)

    class Twice(Experts):
        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            h = torch._grouped_mm(x, self.w.mT, offs=offs)
            return function(h, self.w, offs=offs)

    model = nn.Sequential(Twice()).bfloat16()
    convert_model(model, grouped_fqns=["0"])
    x = torch.randn(20, 64).bfloat16()
    h = mxfp8_grouped_mm(x, model[0].w.mT, OFFS)
    assert torch.equal(model[0](x, OFFS), mxfp8_grouped_mm(h, model[0].w, OFFS))


@process_group("fake", 4)
def test_only_what_splits_a_gemm_counts_as_a_split() -> None:
    """FSDP on a mesh without names: its shards, here of 24 rows, are put together again before they are used."""
    model = nn.Sequential(nn.Linear(64, 96))
    convert_model(model)
    fully_shard(model[0])
    model.load_state_dict(model.state_dict(), assign=True)
    assert model[0].weight.to_local().shape == (24, 64)


@pytest.mark.integration
@pytest.mark.parametrize("compiled", daily(["two", "all"], "two"))
def test_linears_on_dtensors_equal_those_of_one_process(compiled: str) -> None:
    processes.check(2, "parallel_linears.py", compiled)
