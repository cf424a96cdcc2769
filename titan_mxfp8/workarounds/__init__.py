"""What this package changes in torch, TorchTitan and wandb: the one list of it, and how to leave something out.

``python -m titan_mxfp8.workarounds`` prints the list. An adapter installs what is needed when it is imported. A config
module of your own can switch workarounds off before:

    from titan_mxfp8 import workarounds
    workarounds.install(leave_out=["run_backward_in_the_calling_thread"])  # or install(False), for all of them
    from titan_mxfp8.plugin import JobConfig
"""

import importlib.metadata
import logging
import pkgutil
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import cache

import torch

logger = logging.getLogger(__name__)

TITAN02, TITAN03 = "0.2.2", "0.3.0"
BOTH = f"{TITAN02} {TITAN03}"


@dataclass(frozen=True, slots=True)
class Workaround:
    """A row of the list.

    Attributes:
        name: of the function that installs it. Its docstring says more.
        module: of this package, which has the function.
        changes: what it changes: dotted names, with spaces between them.
        symptom: what is wrong without it.
        torchtitan: for which versions, with spaces between them; empty: whether or not there is one.
        since, before: for which versions of torch; empty: from the oldest, up to the newest that is supported.
        cpu: only where there is no accelerator.
        by_config: not at import, but where a config is known that needs it.
    """

    name: str
    module: str
    _: KW_ONLY
    changes: str
    symptom: str
    torchtitan: str = ""
    since: str = ""
    before: str = ""
    cpu: bool = False
    by_config: bool = False

    @property
    def versions(self) -> str:
        """In words."""
        bounds = [f"torch {sign} {version}" for sign, version in ((">=", self.since), ("<", self.before)) if version]
        titans = [f"TorchTitan {version}" for version in self.torchtitan.split()]
        return ", ".join([*titans, *bounds] or ["any torch"]) + ", on CPUs" * self.cpu

    def is_for_this_machine(self) -> bool:
        """Whether versions and hardware are those that it is for."""
        return (
            (not self.torchtitan or _version("torchtitan") in self.torchtitan.split())
            and (not self.since or torch.__version__ >= self.since)
            and (not self.before or torch.__version__ < self.before)
            and not (self.cpu and torch.accelerator.is_available())
        )


# fmt: off
WORKAROUNDS = (
    Workaround("ignore_profiler_ranges", "pytorch", since="2.13",
        changes="torch.utils.checkpoint.SAC_IGNORED_OPS",
        symptom="`profiler._record_function_enter_new ... not found in storage`: selective checkpointing under EP"),
    Workaround("wait_before_compiled_regions", "pytorch", since="2.13", before="2.14",
        changes="torch.distributed.tensor._api._ToTorchTensor.forward",
        symptom="`'Tensor' object has no attribute '_local_tensor'`, or lost gradients: TP with compile"),
    Workaround("save_random_states_before_meshes", "pytorch", since="2.13",
        changes="torch._functorch.partitioners.functionalize_rng_ops",
        symptom="`expected all tensors_saved_with_vc_check to be Tensors`: TP, compile and checkpointing on CPUs"),
    Workaround("infer_shapes_without_a_trace", "pytorch", since="2.13",
        changes="torch.distributed.pipelining.stage.PipelineStage._forward_metadata_inference",
        symptom="pipelines of MoE layers with expert biases route differently from run to run, without a word"),
    Workaround("compile_for_own_rank_only", "pytorch", since="2.13",
        changes="torch._functorch.config.enable_autograd_cache",
        symptom="wrong gradients without a word: a process is given the compiled code of another rank"),
    Workaround("compile_for_own_edition_only", "pytorch",
        changes="torch.compiler.config.cache_key_tag",
        symptom="`expected size 147456==32768` of an operator: code that another edition of this package compiled"),
    Workaround("run_backward_in_the_calling_thread", "pytorch",
        changes="torch.autograd.set_multithreading_enabled",
        symptom="forward and backward take the host twice as long together as each alone, on GPUs"),
    Workaround("keep_saved_outputs", "pytorch", torchtitan=TITAN02, by_config=True,
        changes="torch._inductor.config.inplace_buffers torch._inductor.config.allow_buffer_reuse",
        symptom="wrong gradients without a word: compiled code and op-level activation checkpointing"),
    Workaround("log_offline_where_wandb_is_out_of_reach", "wandb_offline", torchtitan=BOTH,
        changes="torchtitan.components.metrics.WandBLogger.__init__",
        symptom="a run goes on unlogged where nobody is logged in to wandb, or wandb cannot start"),
    Workaround("initialise_router_bias", "torchtitan02", torchtitan=TITAN02,
        changes="torchtitan.models.moe.moe.TokenChoiceTopKRouter.init_weights",
        symptom="gpt_oss routes differently from run to run, or to NaN: its router's bias is uninitialised"),
    Workaround("validate_every_model", "torchtitan02", torchtitan=TITAN02,
        changes="torchtitan.models.deepseek_v3.get_train_spec torchtitan.models.gpt_oss.get_train_spec",
        symptom="an AssertionError without words where `validation.enable` is set for deepseek_v3 or gpt_oss"),
    Workaround("validate_as_it_trains", "torchtitan02", torchtitan=TITAN02,
        changes="torchtitan.components.validate.Validator.post_dataloading_process",
        symptom="`assert attention_masks is None` where llama4 or deepseek_v3 is validated"),
    Workaround("export_contiguous_tensors", "torchtitan02", torchtitan=TITAN02,
        changes="torchtitan.models.llama4.model.state_dict_adapter.Llama4StateDictAdapter.to_hf",
        symptom="`non contiguous tensor`: llama4's last save with `checkpoint.last_save_in_hf`"),
    Workaround("export_dense_layers", "torchtitan02", torchtitan=TITAN02,
        changes="torchtitan.models.llama4.model.state_dict_adapter.Llama4StateDictAdapter.__init__",
        symptom="without a word, llama4's exports lack the feed-forward of its dense layers"),
    Workaround("hide_grouped_mm_warning", "torchtitan02", torchtitan=TITAN02, by_config=True,
        changes="torchtitan.tools.logging.logger.filters",
        symptom="`Failed to use grouped mm, which is only supported on SM90 or later`, of converted experts"),
    Workaround("let_parts_be_overridden_too", "torchtitan03", torchtitan=TITAN03,
        changes="torchtitan.config.override._collect_claims",
        symptom="`claims 'model_spec.model', an ancestor of ...` where another override has a part of the model"),
    Workaround("set_timeouts_of_process_groups", "torchtitan03", torchtitan=TITAN03, before="2.14",
        changes="torch.distributed.set_timeout",
        symptom="`module 'torch.distributed' has no attribute 'set_timeout'` after the first step"),
    Workaround("use_cpu_device", "cpu", torchtitan=BOTH, cpu=True,
        changes="torchtitan.tools.utils.device_type "
                "torchtitan.tools.utils.device_module "
                "torchtitan.tools.utils.get_device_info",
        symptom="`module 'torch._C' has no attribute '_cuda_setDevice'` at the start of the Trainer"),
    Workaround("claim_no_mfu", "cpu", torchtitan=BOTH, cpu=True,
        changes="torchtitan.tools.utils.get_peak_flops",
        symptom="an MFU in the logs that is a share of an A100"),
    Workaround("reduce_gradients_by_sum", "cpu", torchtitan=BOTH, cpu=True,
        changes="torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor",
        symptom="`Cannot use ReduceOp.PREMUL_SUM with Gloo` in FSDP's first reduce-scatter"),
    Workaround("draw_full_tensor_at_random_init", "cpu", torchtitan=BOTH, cpu=True,
        changes="torch.distributed.tensor.DTensor.normal_ torch.distributed.tensor.DTensor.uniform_",
        symptom="without a word, every rank of FSDP, EP or TP starts with the same shard"),
    Workaround("permute_tokens_without_triton", "torchtitan02", torchtitan=TITAN02, cpu=True,
        changes="torchtitan.models.moe.utils.generate_permute_indices",
        symptom="`0 active drivers` from the Triton kernel that orders tokens by expert"),
    Workaround("count_integers_with_histc", "torchtitan02", torchtitan=TITAN02, cpu=True,
        changes="torch.histc",
        symptom='`"histogram_cpu" not implemented for \'Long\'` in the MoE router'),
    Workaround("profile_without_device_activity", "torchtitan02", torchtitan=TITAN02, cpu=True,
        changes="torch.profiler.profile.__init__",
        symptom="`profiling.enable_profiling` dies: TorchTitan passes an activity of None"),
    Workaround("attend_without_cuda", "torchtitan03", torchtitan=TITAN03, cpu=True,
        changes="torchtitan.models.common.attention.varlen_attn",
        symptom="`Could not run 'aten::_flash_attention_forward'`: variable-length attention is CUDA's only"),
)
# fmt: on

# What the adapters change besides, to have a part in TorchTitan at all: by dotted name, what for. Not to be left out.
HOOKS = {
    "torchtitan.protocols.model_converter._registry_model_converter_cls": "our converters in the place of TorchTitan's",
    "torchtitan.models.*.infra.parallelize._op_sac_save_list": "selective checkpointing saves outputs of our operators",
    "torchtitan.config.manager.ConfigManager._validate_config": "refuses a config of ours that cannot run",
    "torchtitan.distributed.expert_parallel.ExpertParallel._apply": "not for layers that dispatch their own tokens",
    "torchtitan.models.*.infra.parallelize.apply_fsdp": "FSDP takes no experts that nothing shards, and gathers in FP8",
    "torchtitan.models.*.infra.parallelize.apply_compile": "MoE blocks that dispatch their own tokens are one region",
    "torchtitan.components.metrics.MetricsProcessor.should_log": "health_every and hopper_rebase_report",
    "torchtitan.components.checkpoint.CheckpointManager.__init__": "captures a trainer's steps (0.2.2)",
    "torchtitan.components.checkpoint.CheckpointManager.close": "destroys the graphs",
    "torchtitan.components.metrics.WandBLogger.__init__": "a run's name, tags and commit (0.2.2)",
    "torchtitan.distributed.activation_checkpoint.SelectiveAC.get_save_ops": "as _op_sac_save_list (0.3.0)",
    "torchtitan.trainer.Trainer.Config._validate_cuda_graphs": "expert parallelism is left to us (0.3.0)",
    "torchtitan.trainer.wrap_with_cuda_graph": "no capture where the host waits; health runs eagerly (0.3.0)",
    "torchtitan.*.apply_fsdp_to_decoder": "as apply_fsdp (0.3.0)",
    "torchtitan.trainer.Trainer.__init__": "its config is known to the model that it builds (0.3.0)",
}

_left_out: set[str] = set()


def install(enabled: bool = True, *, leave_out: Iterable[str] = ()) -> None:
    """Installs the workarounds that this machine needs, with its versions of torch and TorchTitan.

    Each adapter calls it when it is imported. Whoever calls it before says what stays out in this process, for then
    too. What is installed stays so; a second call changes nothing.

    Args:
        enabled: False leaves all of them out.
        leave_out: names of those to leave out.

    Raises:
        ValueError: an unknown name.
    """
    names, leave_out = {row.name for row in WORKAROUNDS}, set(leave_out)
    if unknown := leave_out - names:
        raise ValueError(
            f"no workarounds are named {', '.join(sorted(unknown))}: use some of {', '.join(sorted(names))}"
        )
    _left_out.update(leave_out if enabled else names)
    for row in WORKAROUNDS:
        if not row.by_config:
            apply(row.name)


def apply(name: str, *arguments: object) -> None:
    """Calls the function of a workaround, if this machine needs it and nobody has left it out."""
    row = next(row for row in WORKAROUNDS if row.name == name)
    if name in _left_out or not row.is_for_this_machine():
        return
    try:
        pkgutil.resolve_name(f"{__name__}.{row.module}.{name}")(*arguments)
    except (AttributeError, ImportError) as error:  # much of what they change is private
        logger.warning(f"MXFP8: the workaround {name} does not fit torch {torch.__version__}: {error}")


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
