"""Repairs and defaults that do not depend on the device."""

import configparser
import dataclasses
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.utils.checkpoint
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._inductor import config as inductor_config
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _api as dtensor_api
from torchtitan.config import JobConfig
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3
from torchtitan.models.gpt_oss.infra import parallelize as gpt_oss
from torchtitan.models.llama3.infra import parallelize as llama3
from torchtitan.models.llama4.infra import parallelize as llama4
from torchtitan.models.moe.moe import TokenChoiceTopKRouter
from torchtitan.models.qwen3.infra import parallelize as qwen3

import titan_mxfp8.ops.library  # noqa: F401 - registers torch.ops.titan_mxfp8
from titan_mxfp8.plugin.patch import is_patched, patch_of

# wandb's hosted service: the address that `wandb login` has always written, and the one that wandb 0.31 has as default.
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def repair_selective_ac() -> None:
    """Cures: `profiler._record_function_enter_new ... encountered during backward but not found in storage`.

    Selective op-level activation checkpointing replays the forward op by op, and from torch 2.13 on counts FSDP's
    profiler ranges as ops. Under EP the experts are an FSDP unit of their own in the checkpointed block, and opens
    more ranges the second time than the first (torchtitan#3427). The ranges compute nothing: SAC may ignore them.
    """
    if hasattr(torch.utils.checkpoint, "SAC_IGNORED_OPS"):
        torch.utils.checkpoint.SAC_IGNORED_OPS.update(
            {
                torch.ops.profiler._record_function_enter.default,
                torch.ops.profiler._record_function_enter_new.default,
                torch.ops.profiler._record_function_exit.default,
                torch.ops.profiler._record_function_exit._RecordFunction,
            }
        )


def save_gemm_outputs() -> None:
    """Has selective op-level activation checkpointing save the outputs of the MXFP8 GEMMs, in every TorchTitan model.

    Each model has a set of the operators whose outputs are saved, for all others run again in backward. Of TorchTitan's
    own, every second `mm` is left out; of ours none is. The quantised operands are not saved: they are made again from
    the block's inputs, which costs one pass over memory each, where saving them would keep every weight a second time.
    """
    for model in (deepseek_v3, gpt_oss, llama3, llama4, qwen3):
        model._op_sac_save_list.add(torch.ops.titan_mxfp8.gemm_m_grouped.default)


def keep_saved_outputs(job_config: JobConfig) -> None:
    """Keeps compiled op-level activation checkpointing right: without this, gradients are wrong without a word.

    TorchTitan compiles the parts of a MoE block one by one, within the checkpointed block. So checkpointing saves the
    outputs of our GEMMs while compiled code runs, which knows nothing of it and writes its next result into the same
    memory: a rotary embedding over the queries that it is made from. The inductor is told to allocate anew instead;
    memory that is free the allocator gives it again. What that costs has not been measured. TorchTitan's own `mm` is
    never saved from within compiled code.
    """
    checkpointing = job_config.activation_checkpoint
    if checkpointing.mode == "selective" and checkpointing.selective_ac_option == "op":
        inductor_config.inplace_buffers = False
        inductor_config.allow_buffer_reuse = False


def wait_before_compiled_regions() -> None:
    """Cures: `'Tensor' object has no attribute '_local_tensor'` in the backward of tensor parallelism with compile.

    From torch 2.13 on a compiled region waits for those of its inputs that a collective is still filling, and forgets
    that they need a gradient (pytorch#191113): a block behind the embedding dies of it, and a MoE layer's router and
    shared experts lose their part of the gradient without a word. All these inputs come out of DTensor.to_local, so the
    wait is put there. On a GPU it is the compute stream that waits, a little earlier than it would have.
    """
    if not any(field.name == "act_input_indices" for field in dataclasses.fields(ViewAndMutationMeta)):
        return
    to_local = dtensor_api._ToTorchTensor.forward
    if is_patched(to_local):
        return

    @patch_of(to_local)
    def to_local_and_wait(ctx: object, input: DTensor, grad_placements: object) -> torch.Tensor:
        local = to_local(ctx, input, grad_placements)
        return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local

    dtensor_api._ToTorchTensor.forward = staticmethod(to_local_and_wait)


def save_random_states_before_meshes() -> None:
    """Cures: `expected all tensors_saved_with_vc_check to be Tensors, got types: [...DeviceMesh...]`.

    From torch 2.13 on a forward compiled under tensor parallelism saves the DeviceMesh of DTensors for the backward:
    tensors come first, then meshes, then sizes. Where activation checkpointing repeats an op that may draw random
    numbers, as attention on CPUs may, the partitioner puts the generator's state, a tensor, behind the meshes, in the
    outputs of the forward and the inputs of the backward. Both are sorted here. On GPUs such a state is no output.
    """
    if not hasattr(partitioners, "is_opaque_node"):
        return
    functionalize = partitioners.functionalize_rng_ops
    if is_patched(functionalize):
        return

    def place(node: torch.fx.Node) -> int:
        return 2 if partitioners.is_sym_node(node) else int(partitioners.is_opaque_node(node))

    @patch_of(functionalize)
    def functionalize_and_sort(*args: object, **kwargs: object) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        forward, backward = functionalize(*args, **kwargs)
        inputs = list(backward.graph.find_nodes(op="placeholder"))
        saved = next(i for i, node in enumerate(inputs) if "tangents" in node.name)  # how many
        for node in filter(partitioners.is_opaque_node, inputs[:saved]):
            inputs[saved].prepend(node)
        output = forward.graph.output_node()
        values = output.args[0]
        own = len(values) - saved
        output.args = ((*values[:own], *sorted(values[own:], key=place)),)
        forward.recompile()
        backward.recompile()
        return forward, backward

    partitioners.functionalize_rng_ops = functionalize_and_sort


def compile_for_own_rank_only() -> None:
    """Keeps compiled tensor parallelism right: without this, gradients are wrong without a word.

    From torch 2.13 on AOTAutograd's cache on disk takes DTensors whose ranks differ for equal: a process is given the
    code of another rank of its machine, or of an earlier run, and takes that rank's shard. GPUs hide it as long as each
    rank has a device number of its own. Only the tracing is repeated: the inductor's cache of kernels stays in use.
    """
    if hasattr(DTensor, "_stable_hash_for_caching") and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        functorch_config.enable_autograd_cache = False


def initialise_router_bias() -> None:
    """Has routers with a bias, gpt_oss's, start from a bias of 0.

    TorchTitan builds models on meta and initialises the router's weight but not its bias, which keeps whatever the
    memory held: other routing from run to run, or NaN.
    """
    init_weights = TokenChoiceTopKRouter.init_weights
    if is_patched(init_weights):
        return

    @patch_of(init_weights)
    def init_weights_and_bias(self: TokenChoiceTopKRouter, init_std: float) -> None:
        init_weights(self, init_std)
        if self.gate.bias is not None:
            torch.nn.init.zeros_(self.gate.bias)

    TokenChoiceTopKRouter.init_weights = init_weights_and_bias


def default_wandb_offline() -> None:
    """Have wandb log to disk unless its user is logged in, or has chosen a mode.

    Without a login wandb gives one ERROR line and the run goes on unlogged. Set WANDB_MODE to choose.
    Looks at files and the environment only, in the order that wandb does: no network, no prompt, no import of wandb.
    """
    settings = wandb_settings()
    # `wandb offline`, `wandb disabled` and `wandb online` leave their choice in the settings
    if os.environ.get("WANDB_MODE") or "mode" in settings:
        return
    logged_in = (
        os.environ.get("WANDB_API_KEY")
        or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
        or wandb_key_in_netrc(os.environ.get("WANDB_BASE_URL") or settings.get("base_url"))
        or settings.get("api_key")
    )
    if not logged_in:
        os.environ["WANDB_MODE"] = "offline"


def wandb_settings() -> dict[str, str]:
    """What wandb's settings files say: the user's own, overridden by the working folder's."""
    config_folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    run_folder = Path(os.environ.get("WANDB_DIR") or ".").expanduser()
    run_folder /= ".wandb" if (run_folder / ".wandb").exists() else "wandb"
    settings: dict[str, str] = {}
    for path in (config_folder / "settings", run_folder / "settings"):
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(path)
        except (OSError, configparser.Error):
            continue  # wandb warns of an unreadable file and goes on without it
        if parser.has_section("default"):
            settings.update(parser["default"])
    return settings


def wandb_key_in_netrc(base_url: str | None) -> str | None:
    """The API key in the netrc file for a wandb server (None: wandb's own)."""
    host = urlsplit(base_url).netloc if base_url else WANDB_HOSTS[0]
    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    path = next((path for name in paths if (path := Path(name).expanduser()).exists()), None)
    if path is None:
        return None
    try:
        logins = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return None  # wandb warns of an unreadable file and goes on without it
    for name in WANDB_HOSTS if host in WANDB_HOSTS else (host,):
        login = logins.authenticators(name)
        if login:
            return login[2]
    return None
