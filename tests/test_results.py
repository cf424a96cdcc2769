"""results/: what is there does not change, and what texts and code name is there."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
INDEX = (ROOT / "results" / "README.md").read_text()
FOLDER = re.compile(r"20\d\d-\d\d-\d\d_\w+")


def git(repository: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=True).stdout


def base_of(repository: Path) -> str:
    """The commit to compare with: where a branch left main, or the parent of main's last commit. Raises ValueError: a
    shallow clone, or a copy without git, does not have it."""
    for main in ("origin/main", "main"):
        try:
            base = git(repository, "merge-base", "HEAD", main).strip()
        except (OSError, subprocess.CalledProcessError):
            continue
        if base != git(repository, "rev-parse", "HEAD").strip():
            return base
    try:
        return git(repository, "rev-parse", "--verify", "--quiet", "HEAD^1").strip()
    except (OSError, subprocess.CalledProcessError):
        raise ValueError("no earlier commit is here to compare results/ with: git fetch --unshallow") from None


def changed(repository: Path, base: str) -> list[str]:
    """The files of results/ that ``base`` has and that are others now, or gone."""
    paths = "results", ":!results/pictures", ":!results/README.md"
    return git(repository, "diff", "--name-only", "--diff-filter=a", "--no-renames", base, "--", *paths).split()


def test_results_do_not_change() -> None:
    try:
        found = changed(ROOT, base_of(ROOT))
    except ValueError as error:
        pytest.skip(str(error))
    assert not found, "files under results/ stay as they are; a new run is a new folder, see results/README.md"


def test_a_result_that_changes_is_found(tmp_path: Path) -> None:
    """Of a folder a file that is changed or gone, and none that is new."""

    def commit() -> str:
        git(tmp_path, "add", "-A")
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        git(tmp_path, *author, "commit", "-qm", "a commit", "--no-verify", "--allow-empty")
        return git(tmp_path, "rev-parse", "HEAD").strip()

    git(tmp_path, "init", "-q", "-b", "main")
    folder = tmp_path / "results" / "2027-01-01_cpu_a"
    folder.mkdir(parents=True)
    for path in (folder / "data.csv", folder / "README.md", folder.parent / "README.md"):
        path.write_text("a\n")
    base = commit()
    with pytest.raises(ValueError, match="no earlier commit"):
        base_of(tmp_path)
    (folder.parent / "README.md").write_text("b\n")
    (folder / "more.csv").write_text("b\n")
    commit()
    assert base_of(tmp_path) == base and changed(tmp_path, base) == []
    (folder / "data.csv").write_text("b\n")
    (folder / "README.md").unlink()
    assert changed(tmp_path, base) == ["results/2027-01-01_cpu_a/README.md", "results/2027-01-01_cpu_a/data.csv"]
    git(tmp_path, "switch", "-qc", "branch")
    commit()
    assert base_of(tmp_path) == git(tmp_path, "rev-parse", "main").strip()


def test_the_index_has_each_folder_once_and_no_text_or_code_names_one_that_is_gone() -> None:
    there = {path.name for path in (ROOT / "results").iterdir() if path.is_dir()} - {"pictures"}
    cells = [line.split("|")[1] for line in INDEX.splitlines() if line.startswith("| ")]
    assert sorted(name for cell in cells for name in FOLDER.findall(cell)) == sorted(there)
    rooms = ("", "*/", "scripts/**/", "tests/**/", "titan_mxfp8/**/")
    texts = {path for room in rooms for end in ("md", "py", "sh", "toml") for path in ROOT.glob(f"{room}*.{end}")}
    texts -= {*ROOT.glob("results/RULE*.md"), Path(__file__)}  # rules stay as they were
    named = {(name, path.name) for path in texts for name in re.findall(r"results/(20\w+-[\w-]+)", path.read_text())}
    gone = [(name, path) for name, path in named if name not in there | {"2027-01-31_h200_bench"}]
    assert len(named) > 20 and not gone
