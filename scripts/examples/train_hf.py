"""Trains a mixture-of-experts model of Hugging Face Transformers in MXFP8 with its Trainer: a recipe to begin from.

    pip install -e ".[hf]"
    python scripts/examples/train_hf.py                                  # a tiny random Qwen3-MoE, on a GPU or the CPU
    python scripts/examples/train_hf.py --recipe bf16                    # the same without MXFP8
    python scripts/examples/train_hf.py --model Qwen/Qwen3-30B-A3B --text my.jsonl --recipe mxfp8_2d --seq_len 4096

The other flags are those of transformers.TrainingArguments, such as --max_steps, --learning_rate, --output_dir and
--gradient_checkpointing. Several GPUs: torchrun --nproc-per-node=... scripts/examples/train_hf.py. Run on CPUs so far.
"""

from argparse import RawDescriptionHelpFormatter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers as hf

import titan_mxfp8
from scripts.make_data import read_rows

ASSETS = Path(__file__).parents[2] / "train_configs" / "assets"


@dataclass
class Run:
    recipe: str = field(default="mxfp8", metadata={"help": "of titan_mxfp8.RECIPES, or bf16"})
    model: str = field(default="", metadata={"help": "name or folder, as for from_pretrained; empty: tiny and random"})
    text: str = field(default=str(ASSETS / "kjv" / "data.jsonl"), metadata={"help": 'a {"text": "..."} in each line'})
    seq_len: int = field(default=128, metadata={"help": "tokens of one sequence"})


def tiny_model(vocab_size: int) -> torch.nn.Module:
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    sizes = {"vocab_size": vocab_size, "hidden_size": 128, "num_hidden_layers": 2} | attention | experts
    return hf.AutoModelForCausalLM.from_config(hf.Qwen3MoeConfig(**sizes))


def sequences(text: Path, tokenizer: hf.PreTrainedTokenizerBase, seq_len: int) -> list[dict[str, torch.Tensor]]:
    """The text as one stream of tokens, cut into sequences. Raises ValueError if the text cannot be read, or is shorter
    than a sequence."""
    texts = read_rows(text)
    tokens = torch.tensor([token for row in tokenizer(texts)["input_ids"] for token in row] if texts else [])
    if not 1 < seq_len <= len(tokens):
        raise ValueError(f"--seq_len {seq_len}: a sequence has 2 tokens or more, and {text} has {len(tokens)}")
    return [{"input_ids": part, "labels": part} for part in tokens.split(seq_len) if len(part) == seq_len]


def main(argv: list[str] | None = None) -> None:
    how = {"description": __doc__, "formatter_class": RawDescriptionHelpFormatter}
    parser = hf.HfArgumentParser((Run, hf.TrainingArguments), **how)
    parser.set_defaults(output_dir="outputs/train_hf", max_steps=60, learning_rate=1e-3, logging_steps=5)
    parser.set_defaults(bf16=True, report_to="none", save_strategy="no", use_cpu=not torch.accelerator.is_available())
    run, args = parser.parse_args_into_dataclasses(argv)
    hf.set_seed(args.seed)
    tokenizer = hf.AutoTokenizer.from_pretrained(run.model or ASSETS / "tokenizer")
    model = hf.AutoModelForCausalLM.from_pretrained(run.model) if run.model else tiny_model(len(tokenizer))
    model.to(args.device)  # before it is converted: recipe and kernels are chosen for this device
    if run.recipe != "bf16":  # routers stay as they are; before the Trainer wraps or compiles the model
        left = {"linear_filter_fqns": ["lm_head"]}
        print(titan_mxfp8.convert_model(model, recipe=run.recipe, grouped_fqns=["experts"], **left))
    try:
        dataset = sequences(Path(run.text), tokenizer, run.seq_len)
    except (ValueError, OSError) as error:
        raise SystemExit(f"train_hf: {error}") from error
    trainer = hf.Trainer(model, args, hf.default_data_collator, dataset, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()  # an ordinary checkpoint: convert again after from_pretrained
    if trainer.is_world_process_zero():
        print(f"saved model and tokenizer to {args.output_dir}: --model {args.output_dir} goes on with it")


if __name__ == "__main__":
    main()
