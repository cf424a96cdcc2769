"""README.md: that what it names is there and what it shows runs; its pictures, and its tables and those of
results/README.md."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from script_calls import SHELL_SCRIPTS
from test_plugin import ASSETS
from test_scripts import PROGRAMS
from torch import nn
from torchtitan.config import ConfigManager
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.model_converter import build_model_converters

from scripts.bench.problems import relative_rms
from scripts.study import pictures, tables
from scripts.study.measured import folders
from titan_mxfp8.backends import plan_on, recommend
from titan_mxfp8.backends.hardware import CLUSTER_GPUS
from titan_mxfp8.plugin.converters import GroupedMMConverter

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RANGE = r"(DeepSeek-V3|Llama4|Qwen3-30B-A3B) (\d\.\d\d)(?: to (\d\.\d\d))?"
FIRST_TABLE = re.search(r"(?:^\|.*\n)+", README, re.MULTILINE)[0]
COMMANDS = sorted(set(re.findall(r"\./scripts/[\w./]+|python scripts/[\w./]+|python -m titan_mxfp8[\w.]*", README)))


def test_the_readme_names_what_is_there() -> None:
    quoted = re.findall(r"`([^`\n]+)`", README)
    tops = {path.name for path in ROOT.iterdir()} - {"outputs"}
    paths = [word for text in quoted for word in text.split() if word.removeprefix("./").split("/")[0] in tops]
    paths += [f"results/{text}" for text in quoted if re.fullmatch(r"20\d\d-\d\d-\d\d_\w+", text)]
    assert len(paths) > 12 and not [path for path in paths if not (ROOT / path).exists()]
    assert {"./scripts/train.sh", "./scripts/test.sh", "python -m titan_mxfp8.doctor"} <= set(COMMANDS)


def test_commands_of_the_readme_are_programs_that_have_a_help() -> None:
    """Which test_scripts.py calls."""
    programs = {f"./scripts/{name}" for name in SHELL_SCRIPTS} | {"python -m titan_mxfp8.doctor"}
    programs |= {f"python {path.relative_to(ROOT)}" for path in PROGRAMS}
    assert programs >= set(COMMANDS), set(COMMANDS) - programs


def code(language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return block


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture) -> None:
    """With a small layer for what it leaves open: 2 tokens, the first expert's and the second's."""
    features = 32
    w, w1, w3, w2 = torch.randn(4, 2, features, features).unbind()
    weight, bias = torch.randn(features, features), torch.randn(features)
    x, scores = torch.randn(2, features, requires_grad=True), torch.rand(2, 1)
    linears = {name: nn.Linear(features, features) for name in ("wq", "lm_head")}
    model = nn.ModuleDict({"experts": GroupedExperts(features, features, 2, True), **linears})
    offs, expert_ids, group = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[0], [1]]), None
    given = dict(locals())

    def multiplied(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tk,tnk->tn", rows, weights)  # token t is expert t's

    hidden = F.silu(multiplied(x, w1)) * multiplied(x, w3)
    expected = [multiplied(x, w), F.linear(x, weight, bias), scores * multiplied(hidden, w2)]
    for statement in ast.parse(code("python")).body:
        exec(compile(ast.Module([statement], []), "README.md", "exec"), given)
        if isinstance(statement, ast.Assign):
            value = expected.pop(0)
            assert relative_rms(given["y"], value) < 0.15
            (dx,), (wanted,) = (torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (given["y"], value))
            assert relative_rms(dx, wanted) < 0.15
    assert not expected
    report = capsys.readouterr().out
    assert "converted 1 expert module " in report and "converted 1 Linear " in report and "lm_head (" in report


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    """The TOML, as a flag."""
    (tmp_path / "readme.toml").write_text(code("toml"))
    return f"--job.config_file={tmp_path / 'readme.toml'}"


GIVEN = ["--model.name=llama4", *ASSETS, "--compile.enable"]  # which it lacks


def test_what_the_readme_switches_on_passes_the_plugins_checks(config_file: str) -> None:
    """The TOML, or the flags that do the same. What switches ``dispatch`` off."""
    flags = re.search(r"`(--job.custom_config[^`]+)`", README)[1]
    dispatch = re.search(r"`(--quantize.grouped_mm.mx.dispatch[^`]+)`", README)[1]
    for switch in ([config_file], flags.split()):
        parsed = [ConfigManager().parse_args([*switch, *GIVEN, *more]) for more in ([dispatch], [])]
        assert [config.quantize.grouped_mm.mx.dispatch for config in parsed] == ["off", "auto"]
        config = parsed[1]
        converters = build_model_converters(config, None).converters
        assert [type(converter) for converter in converters] == [GroupedMMConverter]
        with pytest.raises(ValueError, match="unknown recipe 'mxfp9'"):
            ConfigManager().parse_args([*switch, *GIVEN, "--quantize.grouped_mm.mx.recipe_name=mxfp9"])
    whole = re.search(r"--job.custom_config\S+ \\\n.+", README)[0].replace("\\\n", " ").split()
    (converter,) = build_model_converters(ConfigManager().parse_args([*whole, *GIVEN]), None).converters
    assert (type(converter), converter.config.recipe_name) == (GroupedMMConverter, "mxfp8_2d_rebased")


def test_tables_are_those_of_their_csvs() -> None:
    for path in tables.FILES:
        text = path.read_text()
        assert tables.rewritten(text) == text, f"{path}: python scripts/study/tables.py writes its tables anew"
        assert text.count("<!-- table:") == len(tables.MARKER.findall(text)) >= 1


def test_pictures_are_those_of_their_csvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = (ROOT / "results" / "README.md").read_text()  # names those that README does not show
    shown = {*re.findall(r"!\[.+\]\(results/pictures/(.+)\)", README), *re.findall(r"`pictures/(.+?\.png)`", index)}
    assert sorted(shown) == sorted(pictures.PICTURES) == sorted(path.name for path in pictures.OUT.glob("*.png"))
    monkeypatch.setattr(sys, "argv", ["pictures.py"])
    for name, files in ((name, files) for name, (_, files) in pictures.PICTURES.items() if files):
        told = b"Source\0" + pictures.source(files).encode()
        assert told in (pictures.OUT / name).read_bytes(), f"{name}: python scripts/study/pictures.py draws it anew"
    monkeypatch.setattr(pictures, "OUT", tmp_path)
    pictures.main()
    assert {path.name for path in tmp_path.iterdir()} == shown


def cells_of(table: str) -> list[dict[str, str]]:
    """The rows of a Markdown table by their column's name."""
    heads, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    return [dict(zip(heads, line, strict=True)) for line in lines]


def name_of(line: dict[str, str]) -> str:
    """A model's, without its size behind a space and the number of its layers."""
    return re.split("[ ,]", line["model"])[0]


def test_what_the_readme_recommends_is_what_was_measured() -> None:
    """Its first table says what training with ``dispatch`` gains, with TorchTitan 0.2.2: by GPU and model the range of
    the medians, for the recipe and the control, of the newest folder in the table end to end that has both in a row."""
    query = re.search(r"<!-- table: (end_to_end .+) -->", README)[1]
    measured = [row for row in cells_of(tables.table_of(query)) if "`dispatch`" in row["model"]]
    measured = [row for row in measured if row[tables.OURS] and "TorchTitan 0.3" not in row["model"]]
    timed = [row for row in cells_of(FIRST_TABLE) if "timed" in row["state"]]
    order = [f"`{folder.name}`" for folder in folders(ROOT / "results")]
    measured.sort(key=lambda line: order.index(line["folder"]))
    assert {row["GPU"].split()[1] for row in timed} == {row["GPUs"].split()[1] for row in measured}
    for row in timed:
        control, own = (text for name, text in row.items() if "speed" in name)
        for text, column in ((control, tables.OURS), (own, row["recipe"])):
            found: dict[str, list[str]] = {}
            here = [line for line in measured if line[column] and line["GPUs"].split()[1] == row["GPU"].split()[1]]
            newest = {name_of(line): line["folder"] for line in here}
            for line in here:
                if line["folder"] == newest[model := name_of(line)]:
                    found.setdefault(model, []).append(line[column].split()[0])
            said = {model: (low, high or low) for model, low, high in re.findall(RANGE, text)}
            assert said == {model: (min(values), max(values)) for model, values in found.items()}, (row["GPU"], column)


def test_the_readme_recommends_what_the_plugin_takes() -> None:
    """For each GPU that has a backend row, and by a flag that names it."""
    for row in cells_of(FIRST_TABLE):
        for name in set(re.findall(r"\w+", row["GPU"])) & set(CLUSTER_GPUS):
            assert row["recipe"].strip("`") == recommend("auto", "auto", CLUSTER_GPUS[name]).name, name
        flags = re.search(r"recipe_name=(\w+)", row["flags"])
        assert flags is None or flags[1] == row["recipe"].strip("`")


def test_the_readme_shows_the_results_that_count() -> None:
    shown = {path for query in re.findall(r"<!-- table: (.+) -->", README) for path in re.findall(r"20[\w-]+", query)}
    assert shown and shown <= {folder.name for folder in folders(ROOT / "results")}


def test_what_the_readme_installs_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"train", "train03", "hf"} == set(re.findall(r'pip install -e "\.\[(\w+)\]"', README)) <= set(extras)


def test_the_log_of_the_readme_is_that_of_its_config(config_file: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its first two lines: the recipe's, on an H200, and the experts', of which another model has another number."""
    lines = re.search(r"```\n(MXFP8: .*?)```", README, re.DOTALL)[1].splitlines()
    (name,) = re.findall(r'recipe_name = "(\w+)"', code("toml"))
    recipe = recommend(name, "auto", CLUSTER_GPUS["H200"])
    plan = plan_on(recipe, "auto", CLUSTER_GPUS["H200"])
    mma = ", ".join(f"{name} {gemm.mma_dtype}" for name, gemm in plan.gemms.items())
    assert lines[0] == f"MXFP8: recipe {recipe.name}, backend hopper (for NVIDIA H200); MMA {mma}"
    config = ConfigManager().parse_args([config_file, *GIVEN])
    model = nn.ModuleDict({"experts": GroupedExperts(32, 32, 2, True), "wq": nn.Linear(32, 32)})
    with caplog.at_level("INFO"):
        build_model_converters(config, None).convert(model)
    (logged,) = (record.message for record in caplog.records if "converted 1 expert module " in record.message)
    logged = logged.replace("1 expert module ", "3 expert modules ").replace("reference", "hopper")
    assert lines[1] == logged.replace("recipe mxfp8,", f"recipe {recipe.name},").replace("wq", "none")


def test_a_table_that_was_typed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    query = "convergence 2026-11-24_h200_moe_320m_seeds_4_5/table.csv"
    right = f"text\n\n<!-- table: {query} -->\n{tables.table_of(query)}\nmore\n"
    copy = tmp_path / "README.md"
    monkeypatch.setattr(tables, "FILES", (copy,))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    copy.write_text(right)
    tables.main(["--check"])
    assert "0 tables differ" in capsys.readouterr().out
    copy.write_text(right.replace("| +0.0105 |", "| +0.0205 |"))
    with pytest.raises(SystemExit, match=r"README.md: convergence .*\n.*\n(.*\n)*.*0.0205"):
        tables.main(["--check"])
    tables.main([])
    assert copy.read_text() == right
    for wrong, message in (
        ("speeds x.csv", "unknown kind 'speeds', use one of end_to_end"),
        ("convergence none.csv", "none.csv"),
        (f"{query} recipes=mxfp8", "unexpected keyword argument 'recipes'"),
    ):
        copy.write_text(f"<!-- table: {wrong} -->\n")
        with pytest.raises(SystemExit, match=message):
            tables.main([])


def test_most_layers_are_the_largest_number_and_empty_columns_are_left_out(tmp_path: Path) -> None:
    text = (ROOT / "results/2026-11-27_4xh200_training/titan02_ep2/table.csv").read_text()
    (tmp_path / "table.csv").write_text(text.replace("_7layers", "_12layers"))
    found = tables.end_to_end(tmp_path / "table.csv", layers="most")
    assert {row["model"].partition(",")[0] for row in found} == {"16B_12layers"}, "not 4, whose digit comes later"
    assert tables.render([{"a": "1", "b": ""}, {"a": "", "c": "2"}]) == "| a | c |\n|---|---|\n| 1 | |\n| | 2 |\n"
