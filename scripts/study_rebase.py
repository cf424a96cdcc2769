"""What ``rebase`` costs in accuracy, on the operands of a model that was trained for it: a table and a CSV.

    torchrun --nproc-per-node=1 scripts/study_rebase.py --out results/<date>_<device>_rebase_study \\
        --job.config_file=train_configs/debug_llama4.toml --training.steps=200

Flags but ``--out`` go to TorchTitan, which trains as the TOML says (without rebase; one process, no activation
checkpointing). In the last step the operands of each call of a converted module are kept, and afterwards measured on
the reference backend, whose bits are every backend's:

- ``changed``: share of the elements of an operand, quantised along the axis of a GEMM, whose value ``rebase`` changes.
- ``sums``: of an operand of forward or dgrad, weights in 32x32 blocks, ``testing.sums_per_stage``: in how many sums of
  128 products its scales part them in the exact GEMM of Hopper, 1 to 4.
- per output (y, dx, dw), relative RMS against fp32: ``mxfp8`` and ``rebased``; and ``extra`` = how far the rebased
  output is from the exact MXFP8 one, over MXFP8's own distance from fp32.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from titan_mxfp8.format import reference
from titan_mxfp8.modules import MXConfig
from titan_mxfp8.ops import grouped_mm, linear
from titan_mxfp8.recipe import Recipe
from titan_mxfp8.testing import environment, format_table, relative_rms, sums_per_stage, write_results

Row = dict[str, object]


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a converted module: its operands in fp32, on the CPU."""

    name: str
    recipe: Recipe
    x_MK: torch.Tensor
    w_ENK: torch.Tensor
    offs: torch.Tensor | None
    dy_MN: torch.Tensor | None = None


class Recorder:
    """Within, keeps the operands of every call of the modules of ``model``, their gradients too."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: list[Call] = []
        self._model, self._fqn, self._hooks = model, "", []
        self._matmul = grouped_mm.mx_matmul

    def __enter__(self) -> "Recorder":
        for fqn, module in self._model.named_modules():
            if isinstance(getattr(module, "mxfp8", None), MXConfig):
                self._hooks.append(module.register_forward_pre_hook(lambda *_, fqn=fqn: self._enter(fqn)))
        grouped_mm.mx_matmul = linear.mx_matmul = self._record
        return self

    def __exit__(self, *_) -> None:
        for hook in self._hooks:
            hook.remove()
        grouped_mm.mx_matmul = linear.mx_matmul = self._matmul

    def _enter(self, fqn: str) -> None:
        self._fqn, self._index = fqn, 0

    def _record(self, x, w_ENK, bias_EN, offs, recipe, *args) -> torch.Tensor:
        y = self._matmul(x, w_ENK, bias_EN, offs, recipe, *args)
        # TorchTitan's experts call w1, w3 and then w2
        name = self._fqn if offs is None else f"{self._fqn}.{('w1', 'w3', 'w2')[self._index]}"
        self._index += 1
        copies = [None if t is None else t.detach().cpu().clone() for t in (x, w_ENK, offs)]
        call = Call(name=name, recipe=recipe, x_MK=copies[0].float(), w_ENK=copies[1].float(), offs=copies[2])
        y.register_hook(lambda dy: setattr(call, "dy_MN", dy.detach().cpu().float()))
        self.calls.append(call)
        return y


def changed_rows(call: Call) -> Iterator[Row]:
    """Share of the elements that change, of each operand of the three GEMMs."""
    act = {"rounding": call.recipe.rounding, "elem_dtype": torch.float8_e4m3fn, "block": "1x32"}
    weight, grad = act | {"block": call.recipe.weight_block}, act | {"elem_dtype": call.recipe.grad_dtype}
    rows = call.x_MK.shape[0] if call.offs is None else int(call.offs[-1])
    like = call.recipe.weight_block, True, call.x_MK.device
    act_form, weight_form = reference.operand_forms("m_grouped", *like)
    dy_form, x_form = reference.operand_forms("k_grouped", *like)
    for operand, gemm, x, axis, form, options in (
        ("activations", "forward", call.x_MK[:rows], 1, act_form, act),
        ("weights", "forward", call.w_ENK, 2, weight_form, weight),
        ("gradients", "dgrad", call.dy_MN[:rows], 1, act_form, grad),
        ("weights", "dgrad", call.w_ENK, 1, weight_form, weight),
        ("gradients", "wgrad", call.dy_MN[:rows], 0, dy_form, grad),
        ("activations", "wgrad", call.x_MK[:rows], 0, x_form, act),
    ):
        changed = torch.zeros((), dtype=torch.int64)
        offs = call.offs if axis == 0 else None
        reference.quantize_operand(x, axis, offs=offs, form=form, changed=changed, **options)
        row: Row = {"module": call.name, "gemm": gemm, "operand": operand, "changed": int(changed) / x.numel()}
        if gemm != "wgrad":
            squares = options | {"block": "32x32" if operand == "weights" else "1x32"}
            row["sums"] = sums_per_stage(reference.quantize_operand(x, axis, offs=None, form="even", **squares))
        yield row


def outputs(call: Call, recipe: Recipe | None, rebase: bool = False) -> dict[str, torch.Tensor]:
    """y, dx and dw in fp32; ``recipe`` None: of the unquantised operands."""
    x, w = call.x_MK.clone().requires_grad_(), call.w_ENK.clone().requires_grad_()
    if recipe is None:
        y = x @ w[0].mT if call.offs is None else torch._grouped_mm(x, w.mT, offs=call.offs)
    else:
        y = grouped_mm.mx_matmul(x, w, None, call.offs, recipe, torch.float32, "reference", rebase, True)
    y.backward(call.dy_MN)
    rows = x.shape[0] if call.offs is None else int(call.offs[-1])
    out = {"y": y.detach()[:rows], "dx": x.grad[:rows], "dw": w.grad}
    if call.offs is not None:  # an expert without rows has no gradient
        out["dw"] = out["dw"][call.offs.diff(prepend=call.offs.new_zeros(1)) > 0]
    return out


def error_rows(call: Call) -> Iterator[Row]:
    """Errors of the three outputs."""
    fp32, exact = outputs(call, None), outputs(call, call.recipe)
    rebased = outputs(call, call.recipe, rebase=True)
    for gemm, name in (("forward", "y"), ("dgrad", "dx"), ("wgrad", "dw")):
        own = (exact[name] - fp32[name]).double().norm().item()
        yield {
            "module": call.name,
            "gemm": gemm,
            "operand": name,
            "mxfp8": relative_rms(exact[name], fp32[name]),
            "rebased": relative_rms(rebased[name], fp32[name]),
            "extra": (rebased[name] - exact[name]).double().norm().item() / own,
        }


def summary(rows: list[Row]) -> list[Row]:
    """Mean and largest over the modules."""
    table = []
    for key in dict.fromkeys((row["gemm"], row["operand"]) for row in rows):
        of_key = [row for row in rows if (row["gemm"], row["operand"]) == key]
        line: Row = {"gemm": key[0], "of": key[1], "modules": len(of_key)}
        for name in ("changed", "sums", "mxfp8", "rebased", "extra"):
            values = [row[name] for row in of_key if name in row]
            if values and name == "sums":
                line |= {"sums, mean": f"{sum(values) / len(values):.2f}", "sums, most": f"{max(values):.2f}"}
            elif values:
                line |= {f"{name}, mean": f"{sum(values) / len(values):.2e}", f"{name}, most": f"{max(values):.2e}"}
        table.append(line)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for data.csv and env.json")
    args, flags = parser.parse_known_args()
    init_logger()
    config = ConfigManager().parse_args([*flags, "--activation_checkpoint.mode=none"])
    trainer = Trainer(config)
    train_step = trainer.train_step
    recorder = Recorder(trainer.model_parts[0])

    def recorded_step(*batch) -> None:
        if trainer.step < config.training.steps:
            return train_step(*batch)
        with recorder:
            train_step(*batch)

    trainer.train_step = recorded_step
    trainer.train()
    trainer.close()
    rows = [row for call in recorder.calls for rows in (changed_rows, error_rows) for row in rows(call)]
    print(format_table(summary(rows)))
    write_results(args.out, rows, environment("cpu") | {"steps": str(config.training.steps)})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
