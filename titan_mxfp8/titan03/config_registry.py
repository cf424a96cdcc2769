"""Models of TorchTitan 0.3, cut to a few layers, in bf16: debug models for CPUs and GPUs, and what benchmarks train.

    --module titan_mxfp8.titan03 --config debug_deepseek_v3

The tokenizer and the text are the repository's, the settings of debug models those of
``train_configs/debug_<model>.toml``.
"""

from collections.abc import Callable
from functools import partial

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import deepseek_v3, gpt_oss, llama3, qwen3
from torchtitan.models.deepseek_v3 import config_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

VOCABULARY = 2048  # of the repository's tokenizer
TOKENIZER, TEXT = "./train_configs/assets/tokenizer", "./train_configs/assets/kjv"
SPMD = "partial_dtensor"  # TorchTitan's default, spmd_types, needs an FSDP newer than torch 2.13's


def _deepseek_v3_16b(layers: int) -> Trainer.Config:
    config = config_registry.deepseek_v3_16b()
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    config.hf_assets_path, config.dataloader.dataset, config.dataloader.dataset_path = TOKENIZER, "c4_test", TEXT
    config.activation_checkpoint, config.compile.components = None, ["model", "loss"]
    config.parallelism = ParallelismConfig(spmd_backend=SPMD)
    return config


def _debug(model_registry: Callable[..., ModelSpec], flavor: str) -> Trainer.Config:
    on_gpus = torch.accelerator.is_available()
    spec = model_registry(flavor, attn_backend="flex" if on_gpus else "varlen")  # flex has no backward on CPUs
    model = spec.model
    model.layers = model.layers[:2]
    model.vocab_size = model.lm_head.out_features = model.tok_embeddings.num_embeddings = VOCABULARY
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=TOKENIZER,
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=TEXT),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)),
        optimizer=default_adamw(lr=5e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5, decay_ratio=0.5, min_lr_factor=0.1),
        # CUDA graphs: in bf16 the all-to-all of expert parallelism waits for the host
        training=TrainingConfig(local_batch_size=2, seq_len=512, steps=60, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend=SPMD),
        metrics=MetricsProcessor.Config(log_freq=1, enable_tensorboard=True, enable_wandb=True),
        checkpoint=CheckpointManager.Config(interval=20, last_save_model_only=False),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0, save_config_file="job_config.json"),
    )


# Layer 0 is dense, layer 1 the MoE one, of 8 experts; two MoE layers of 64 experts; two of 8 experts, with biases and
# attention sinks; dense, its linears alone can be converted.
debug_deepseek_v3 = partial(_debug, deepseek_v3.model_registry, "debugmodel")
debug_qwen3 = partial(_debug, qwen3.model_registry, "debugmodel_moe")
debug_gpt_oss = partial(_debug, gpt_oss.model_registry, "debugmodel")
debug_llama3 = partial(_debug, llama3.model_registry, "debugmodel")

# DeepSeek-V3 16B cut to one dense layer and three or six MoE layers, compiled.
deepseek_v3_16b_4layers = partial(_deepseek_v3_16b, 4)
deepseek_v3_16b_7layers = partial(_deepseek_v3_16b, 7)


def deepseek_v3_16b_4layers_full_ac() -> Trainer.Config:
    """With all activations of a block made again in backward."""
    config = _deepseek_v3_16b(4)
    config.activation_checkpoint = FullAC.Config()
    return config


def deepseek_v3_16b_4layers_full_ac_minimal_async_ep() -> Trainer.Config:
    """The same with TorchTitan's MinimalAsyncEP, which demands such checkpointing, and its fused SwiGLU."""
    config = deepseek_v3_16b_4layers_full_ac()
    spec = deepseek_v3.model_registry("16B", attn_backend="flex", moe_comm_backend="minimal_async_ep")
    spec.model.layers = spec.model.layers[:4]
    config.model_spec = spec
    config_registry.enable_fused_swiglu(config)
    return config
