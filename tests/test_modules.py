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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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


def test_converts_experts_and_linears_and_tells_them_apart(caplog: pytest.LogCaptureFixture) -> None:
    model = Layer()
    converted = convert_model(model, grouped_fqns=["experts"], linear_filter_fqns=["wk"], recipe="mxfp8_2d")
    assert converted == ["experts", "shared_experts", "attention.wq"]
    assert isinstance(model.experts, Experts) and isinstance(model.shared_experts, modules.MXFP8Linear)
    assert type(model.head) is nn.Linear and type(model.attention["wk"]) is nn.Linear
    log = caplog.text
    assert "converted 1 expert module (recipe mxfp8_2d, backend reference)" in log
    assert "converted 2 Linears (recipe mxfp8_2d, backend reference); left: head" in log
    assert "head (64 -> 4 features, not multiples of 32), attention.wk (linear_filter_fqns has 'wk')" in log


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


def test_any_number_of_recipes_compile_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile compiles a forward for at most 8 states of the world, of which each recipe takes some."""
    monkeypatch.setitem(modules.EXPERT_CLASSES, Experts, CompiledExperts)
    torch._dynamo.reset()
    for recipe in [*dict.fromkeys(RECIPES.values())][:9]:
        model = nn.ModuleDict({"experts": Experts(), "linear": nn.Linear(64, 64)})
        convert_model(model, recipe=recipe, grouped_fqns="experts")
        for module, args in ((model["experts"], (OFFS,)), (model["linear"], ())):
            assert isinstance(module, modules.ConvertedModule) and isinstance(module, CompiledExperts | nn.Linear)
            compiled = torch.compile(module, backend="eager", fullgraph=True)
            for rows in (20, 24):
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


def test_a_function_of_the_users_that_computes_experts_again_is_refused() -> None:
    """Nobody can know that its backward will; without gradients there is none."""
    model = nn.ModuleList([Recomputed("own function")])
    convert_model(model, grouped_fqns=["0"])
    with pytest.raises(RuntimeError, match=r"^0: its forward, .* calls torch._grouped_mm with gradients off"):
        gradients(model[0])
    with torch.no_grad():
        model[0](torch.randn(20, 64), OFFS)


def test_modules_with_a_forward_of_their_own_are_not_converted() -> None:
    """accelerate's hooks put one into the module, past which no class can reach."""

    def hooked(module: nn.Module) -> nn.Module:
        module.forward = functools.partial(type(module).forward, module)
        return module

    model = nn.Sequential(hooked(nn.Linear(64, 64)), nn.Linear(64, 64))
    report = convert_model(model)
    assert report == ["1"] and "0 (has a forward of its own, as from accelerate's hooks" in str(report)
    model = Layer()
    hooked(model.experts)
    with pytest.raises(ValueError, match=r"experts has a forward of its own.*convert before"):
        convert_model(model, grouped_fqns=["experts"])
    assert type(model.shared_experts) is nn.Linear  # all or nothing


def test_subclasses_of_linear_keep_their_forward(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(64, 64), nn.Linear(64, 64))
    assert convert_model(model) == ["1"] and type(model[0]) is Scaled
    assert "left: 0 (Scaled, not nn.Linear itself)" in caplog.text
    with pytest.raises(ValueError, match=r"Linears: 0 \(Scaled, not nn.Linear itself\), 1 \(converted already\)"):
        convert_model(model)


def test_what_comes_back_shows_what_the_log_says(caplog: pytest.LogCaptureFixture) -> None:
    """INFO is shown to nobody who did not set logging up."""
    model = Layer()
    converted = convert_model(model, grouped_fqns=["experts"])
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 3 and str(converted).splitlines() == logged
    assert converted == ["experts", "shared_experts", "attention.wq", "attention.wk"]
    again = copy.deepcopy(converted)
    assert str(again) == str(converted) and again == converted


def test_requantised_inputs_reach_the_ops() -> None:
    """Backward then starts from FP8 rows: the gradients of the weights are other ones, of inputs of several sizes."""
    w, x = torch.randn(96, 64), torch.randn(70, 64) * torch.exp2(torch.randint(-8, 1, (70, 1)).float())
    grads = {}
    for requantize_input in (False, True):
        model = nn.Sequential(nn.Linear(64, 96, bias=False))
        model[0].weight = nn.Parameter(w.clone())
        convert_model(model, requantize_input=requantize_input)
        model(x).square().sum().backward()
        grads[requantize_input] = model[0].weight.grad
    assert 0 < relative_rms(grads[True], grads[False]) < 1e-2


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


def test_converting_twice_is_an_error_that_says_so() -> None:
    model = Layer()
    convert_model(model, grouped_fqns=["experts"])
    with pytest.raises(ValueError, match=r"expert modules: experts \(converted already\)"):
        convert_model(model, grouped_fqns=["experts"])
    with pytest.raises(ValueError, match=r"Linears: shared_experts, attention.wq, attention.wk \(converted already\)"):
        modules.convert_linears(model, recipe="mxfp8")


def test_converting_nothing_lists_what_could_have_matched() -> None:
    match = r"^convert_model: .* grouped_fqns \['expert_bank'\].*expert modules: experts \(Experts\)"
    with pytest.raises(ValueError, match=match):
        convert_model(Layer(), grouped_fqns=["expert_bank"])
    with pytest.raises(ValueError, match=r"shared_experts, head, .* \(linear_filter_fqns has 'a'\)"):
        convert_model(Layer(), linear_filter_fqns=["a"])
    with pytest.raises(ValueError, match="The model's Linears: none"):
        convert_model(nn.Sequential(nn.LayerNorm(4)))


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (
            {"grouped_fqns": "experts"},
            r"^convert_model: bad_experts holds w of shape \(4, 40, 64\).*multiples of 32.*leave .* out of grouped",
        ),
        ({"linear_filter_fqns": "linear"}, "no nn.Linear was converted"),
        ({"recipe": "mxfp9"}, "unknown recipe"),
        ({"recipe": "bf16"}, "recipe 'bf16' quantises nothing"),
        ({"backend": "sm90"}, "unknown backend"),
        ({"backend": 1}, "backend = 1: it must be a string"),
        ({"requantize_input": "false"}, "requantize_input = 'false': it must be true or false"),
        ({"linear_filter_fqns": 3}, "linear_filter_fqns = 3: it must be a list of strings"),
        ({"grouped_fqns": [nn.Linear]}, "grouped_fqns = .*Linear.*: it must be a list of strings"),
        ({"grouped_fqns": "good_experts", "rebase": None}, "rebase is True or False"),
        ({"rebase": "false"}, "rebase is True or False, got 'false'"),
    ],
)
def test_what_cannot_be_is_an_error_that_leaves_the_whole_model_as_it_was(kwargs: dict, message: str) -> None:
    parts = {"good_experts": Experts(), "bad_experts": Experts(hidden=40), "linear": nn.Linear(64, 64)}
    model = nn.ModuleDict(parts)
    with pytest.raises(ValueError, match=message):
        convert_model(model, **kwargs)
    assert [type(module) for module in model.values()] == [Experts, Experts, nn.Linear]
    assert not any(hasattr(module, "mxfp8") for module in model.values())


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


def test_classes_are_made_before_the_first_module_is_swapped() -> None:
    model = nn.ModuleDict({"first_experts": Experts(), "closed_experts": Closed(), "linear": nn.Linear(64, 64)})
    with pytest.raises(ValueError, match=r"no class can be derived from Closed, that of closed_experts: .*'kind'"):
        convert_model(model, grouped_fqns="experts")
    assert [type(module) for module in model.values()] == [Experts, Closed, nn.Linear]
    model["closed_experts"] = Frozen()
    assert convert_model(model, grouped_fqns="experts") == ["first_experts", "closed_experts", "linear"]


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


def test_experts_that_nobody_named_are_in_the_report() -> None:
    report = str(convert_model(Layer()))
    assert "converted 0 expert modules" in report
    assert "left: experts (Experts, unless grouped_fqns names it)" in report
    assert "expert" not in str(convert_model(nn.Sequential(nn.Linear(64, 64))))


@pytest.mark.parametrize("thing", [nn.Linear(64, 64).state_dict(), [nn.Linear(64, 64)], None])
def test_what_is_no_model_is_refused_with_what_to_do(thing: object) -> None:
    with pytest.raises(ValueError, match=r"^convert_model: takes a model, .*: load saved weights into a model"):
        convert_model(thing)


def test_experts_are_converted_where_the_filter_leaves_no_linear(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"experts": Experts(), "output": nn.Linear(64, 64)})
    assert convert_model(model, grouped_fqns="experts", linear_filter_fqns="output") == ["experts"]
    assert "converted 0 Linears" in caplog.text and "left: output (linear_filter_fqns has 'output')" in caplog.text
    assert type(model["output"]) is nn.Linear


def test_a_linear_with_two_names_is_left_alone_if_one_is_filtered(caplog: pytest.LogCaptureFixture) -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"decoder": shared, "wq": nn.Linear(64, 64), "lm_head": shared})
    assert convert_model(model, linear_filter_fqns="lm_head") == ["wq"]
    assert type(shared) is nn.Linear
    assert "left: decoder (also named lm_head, and linear_filter_fqns has 'lm_head')" in caplog.text
    model = nn.ModuleDict({"experts": Experts(), "linear": nn.Linear(64, 64)})
    model["bank"] = model["experts"]
    assert convert_model(model, grouped_fqns="bank$") == ["experts", "linear"]


def named(names: str) -> nn.Module:
    """A tree with a linear of 64 features for each of these names."""
    root = nn.Module()
    for name in names.split():
        *parents, last = name.split(".")
        module = root
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        module.add_module(last, nn.Linear(64, 64))
    return root


@pytest.mark.parametrize(
    "filters, converted",
    [
        (["gate"], "a.wq"),
        (["gate$"], "a.gate_proj a.wq"),
        ([".gate$", "wq"], "a.gate_proj own_gate"),
        ("own_gate$,a.gate$", "a.gate_proj a.wq"),
        (["a$"], "a.gate a.gate_proj a.wq own_gate"),
    ],
)
def test_a_filter_names_a_part_or_an_end(filters: list[str] | str, converted: str) -> None:
    model = named("a.gate a.gate_proj a.wq own_gate")
    assert sorted(convert_model(model, linear_filter_fqns=filters)) == converted.split()


class TopRouter(nn.Sequential):
    """Named as Transformers and TorchTitan name theirs."""


def test_routers_are_left_alone_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """As Transformers 4.57 has them, linears beside experts, and as modules of a class of their own."""
    model = named("0.gate 0.experts.0.up 1.router.proj 2.gate 2.up")
    model.get_submodule("1").bank = Experts()
    model.chooser = TopRouter(nn.Linear(64, 64))
    converted = convert_model(model)
    assert converted == ["0.experts.0.up", "2.gate", "2.up"], "a gated linear unit's gate is no router"
    assert "left: 0.gate, 1.router.proj, chooser.0 (router)" in caplog.text


def test_lora_adapters_are_left_alone_and_those_of_many_layers_counted(caplog: pytest.LogCaptureFixture) -> None:
    model = named(" ".join(f"{i}.q.base_layer {i}.q.lora_A.default {i}.q.lora_B.default" for i in range(6)) + " out")
    assert convert_model(model, linear_filter_fqns="out") == [f"{i}.q.base_layer" for i in range(6)]
    assert "3.q.lora_B.default and 4 more (LoRA adapter), out (linear_filter_fqns has 'out')" in caplog.text


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


def test_a_linear_whose_weight_attention_reads_itself_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 2), "wq": nn.Linear(64, 64)})
    model["attention"].out_proj = nn.Linear(64, 64)
    assert convert_model(model) == ["wq"]
    assert "left: attention.out_proj (nn.MultiheadAttention reads its weight itself)" in caplog.text


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


def test_a_linear_that_is_the_whole_model_has_a_name() -> None:
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
def test_linears_on_dtensors_equal_those_of_one_process() -> None:
    processes.check(2, "parallel_linears.py")
