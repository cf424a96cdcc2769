"""What ``rebase`` costs in accuracy, on the operands of a model that was trained for it: a table and a CSV.

    torchrun --nproc-per-node=1 scripts/study/study_rebase.py --out results/<date>_<device>_rebase_study \\
        --job.config_file=train_configs/debug_llama4.toml --training.steps=200

Flags but ``--out`` go to TorchTitan, which trains as the TOML says (without rebase; one process, no activation
checkpointing, and experts GEMM by GEMM, ``dispatch`` off). In the last step the operands of each call of a converted
module are kept, and afterwards measured on the reference backend, whose bits are every backend's:

- ``changed``: share of the elements of an operand, quantised along the axis of a GEMM, whose value ``rebase`` changes.
- ``sums``: of an operand of forward or dgrad, weights in 32x32 blocks, ``testing.sums_per_stage``: in how many sums of
  128 products its scales part them in the exact GEMM of Hopper, 1 to 4.
- per output (y, dx, dw), relative RMS against fp32: ``mxfp8`` and ``rebased``; and ``extra`` = how far the rebased
  output is from the exact MXFP8 one, over MXFP8's own distance from fp32.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from scripts.bench.problems import relative_rms, sums_per_stage
from scripts.result_files import environment, format_table, write_results
from titan_mxfp8.backends.reference import specs
from titan_mxfp8.format.reference import changed_elements, quantize
from titan_mxfp8.modules import ConvertedModule
from titan_mxfp8.ops import grouped_mm, linear
from titan_mxfp8.recipe import Recipe

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
            if isinstance(module, ConvertedModule):
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
    rows = call.x_MK.shape[0] if call.offs is None else int(call.offs[-1])
    tensors = {"activations": call.x_MK[:rows], "gradients": call.dy_MN[:rows], "weights": call.w_ENK}
    rebased = dict(zip(tensors, specs(call.recipe.rebased()), strict=True))
    squares = dict(zip(tensors, specs(replace(call.recipe, weight_block="32x32")), strict=True))
    for operand, gemm, axis in (
        ("activations", "forward", 1),
        ("weights", "forward", 2),
        ("gradients", "dgrad", 1),
        ("weights", "dgrad", 1),
        ("gradients", "wgrad", 0),
        ("activations", "wgrad", 0),
    ):
        x, spec = tensors[operand], rebased[operand]
        # Along the tokens each group starts a block of its own: groups are quantised one by one.
        parts = x.tensor_split(call.offs.tolist()[:-1]) if axis == 0 and call.offs is not None else [x]
        pairs = ((quantize(part, axis, spec.exact), quantize(part, axis, spec)) for part in parts if part.numel())
        changed = sum(int(changed_elements(*pair).sum()) for pair in pairs)
        row: Row = {"module": call.name, "gemm": gemm, "operand": operand, "changed": changed / x.numel()}
        if gemm != "wgrad":
            row["sums"] = sums_per_stage(quantize(x, axis, replace(squares[operand], stored="coalesced")))
        yield row


def outputs(call: Call, recipe: Recipe | None) -> dict[str, torch.Tensor]:
    """y, dx and dw in fp32; ``recipe`` None: of the unquantised operands."""
    x, w = call.x_MK.clone().requires_grad_(), call.w_ENK.clone().requires_grad_()
    if recipe is None:
        y = x @ w[0].mT if call.offs is None else torch._grouped_mm(x, w.mT, offs=call.offs)
    else:
        y = grouped_mm.mx_matmul(x, w, None, call.offs, recipe, torch.float32, "reference", True)
    y.backward(call.dy_MN)
    rows = x.shape[0] if call.offs is None else int(call.offs[-1])
    out = {"y": y.detach()[:rows], "dx": x.grad[:rows], "dw": w.grad}
    if call.offs is not None:  # an expert without rows has no gradient
        out["dw"] = out["dw"][call.offs.diff(prepend=call.offs.new_zeros(1)) > 0]
    return out


def error_rows(call: Call) -> Iterator[Row]:
    """Errors of the three outputs."""
    fp32, exact, rebased = (outputs(call, recipe) for recipe in (None, call.recipe, call.recipe.rebased()))
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
    gemm_by_gemm = "--quantize.grouped_mm.mx.dispatch=off", "--quantize.grouped_mm.mx.dispatch_rows=counted"
    config = ConfigManager().parse_args([*flags, "--activation_checkpoint.mode=none", *gemm_by_gemm])
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
