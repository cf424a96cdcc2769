"""The shipped text and tokenizer (train_configs/assets) and the script that makes them (scripts/make_data.py)."""

import hashlib
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import datasets
import pytest
from script_calls import programs
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

from scripts import html_prose, make_data

ROOT = Path(__file__).resolve().parent.parent
ASSETS = ROOT / "train_configs" / "assets"
VOCAB_SIZE = 2048
BOS_ID, EOS_ID = 0, 1

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="builds small .deb files with dpkg-deb")


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(ASSETS / "tokenizer"))


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows() -> list[str]:
    return texts_of(ASSETS / "kjv" / "data.jsonl")


# The shipped tokenizer and text


@pytest.mark.parametrize("asked", [{}, {"add_bos": True, "add_eos": True}])
def test_torchtitan_reads_the_vocabulary_and_adds_bos_and_eos_once(tokenizer, asked):
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (BOS_ID, EOS_ID)
    ids = tokenizer.encode("In the beginning", **asked)
    assert ids[0] == BOS_ID and ids[-1] == EOS_ID
    assert not {BOS_ID, EOS_ID} & set(ids[1:-1])
    assert ids[1:-1] == tokenizer.encode("In the beginning", add_bos=False, add_eos=False)


def test_readme_describes_the_files_beside_it(tokenizer, rows):
    text = (ASSETS / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith(("| `", "| file"))]
    header, *body = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines)
    table = {row[0]: dict(zip(header, row, strict=True)) for row in body}
    files = {str(path.relative_to(ASSETS)) for path in ASSETS.rglob("*") if path.is_file()}
    assert {"kjv/data.jsonl", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"} == set(table)
    assert set(table) | {"README.md"} <= files
    for name, cells in table.items():
        content = (ASSETS / name).read_bytes()
        assert int(cells["bytes"]) == len(content), name
        assert cells["sha256"] == hashlib.sha256(content).hexdigest(), name
    encodings = tokenizer.tokenizer.encode_batch_fast(rows)
    tokens = sum(map(len, encodings)) + 2 * len(rows)  # bos and eos
    assert [int(table["kjv/data.jsonl"][name]) for name in ("rows", "tokens")] == [len(rows), tokens]
    assert re.search(r"bible-kjv-text \d+\.\d+", text)
    assert "usr/share/doc/bible-kjv-text/copyright" in text and "public domain" in text
    assert "python scripts/make_data.py --sources kjv --vocab-size 2048 --out train_configs/assets\n" in text
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|usr|var|opt)\b|://|debian\.org", text), "no machine"


def test_torchtitan_feeds_the_text(tokenizer, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    data = HuggingFaceTextDataset("c4_test", str(ASSETS / "kjv"), tokenizer, seq_len=128)
    inputs, labels = next(iter(data))
    expected = tokenizer.encode(rows[0])[:129]
    assert inputs["input"].tolist() == expected[:-1] and labels.tolist() == expected[1:]


# scripts/make_data.py

PAGE = """<html><head><title>Not this</title><style>p {{ color: red }}</style></head><body>
<div class="sphinxsidebar"><div>A sidebar.</div></div><p>Outside of the main part.</p>
<div role="main"><h1>{title}<a class="headerlink" href="#">¶</a></h1>
<p>The <em>first</em>&nbsp;paragraph &amp; its
  <code>inline</code> code.<br/>After a break.</p>
<ul><li>An item</li><li><p>Another item</p></li></ul>
<pre>int code(void);</pre><table><tr><td>A table cell</td></tr></table>
<dl><dt class="sig">int signature(void)</dt><dd>What it does.</dd></dl>
<p>0x00 0x01 0x02 0x03</p>
<p>{repeated}</p>
<div>Text of a div, <b>bold</b>.</div></div><p>Below the main part.</p></body></html>"""
REPEATED = "This long paragraph is on every one of the pages, and only the first of them is to keep it for the data."


def write_pages(root: Path) -> None:
    """Two pages with text, one with too little, one in a folder of translations, an index."""
    root.mkdir(parents=True)
    (root / "translations").mkdir()
    (root / "b.html").write_text(PAGE.format(title="Second page " * 20, repeated=REPEATED), encoding="utf-8")
    (root / "a.html").write_text(PAGE.format(title="First page é", repeated=REPEATED), encoding="utf-8")
    (root / "c.html").write_text("<p>Too short.</p>", encoding="utf-8")
    for name in ("translations/d.html", "genindex-A.html"):
        (root / name).write_text(PAGE.format(title="Skipped page " * 20, repeated="x"), encoding="utf-8")


def make_deb(folder: Path, package: str, pages: str | None = None, depends: str | None = None) -> None:
    """A small .deb in `folder`, with write_pages() under the path `pages`."""
    root = folder / f"tree_{package}"
    (root / "DEBIAN").mkdir(parents=True)
    fields = [f"Package: {package}", "Version: 1.5-2", "Architecture: all", "Maintainer: x <x@y>", "Description: x"]
    fields += [f"Depends: {depends}"] if depends else []
    (root / "DEBIAN" / "control").write_text("\n".join(fields) + "\n")
    if pages:
        write_pages(root / pages)
    command = ["dpkg-deb", "-Znone", "--build", str(root), str(folder / f"{package}_1.5-2_all.deb")]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def debs(tmp_path) -> Path:
    folder = tmp_path / "debs"
    make_deb(folder, "debian-handbook", pages="usr/share/doc/debian-handbook/html/en-US")
    make_deb(folder, "linux-doc", depends="linux-doc-9.9 (= 1.5-2)")
    make_deb(folder, "linux-doc-9.9", pages="usr/share/doc/linux-doc-9.9/html")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_html_paragraphs_keep_prose_only():
    assert html_prose.html_paragraphs(PAGE.format(title="A title", repeated=REPEATED)) == [
        "A title",
        "The first paragraph & its inline code.",
        "After a break.",
        "An item",
        "Another item",
        "What it does.",
        REPEATED,
        "Text of a div, bold.",
    ]
    whole = "<p id=title>Site</p><ul class='docnav top'><li>Next</li></ul><div class=para>Unclosed text"
    assert html_prose.html_paragraphs(whole) == ["Unclosed text"], "without a main part"


def test_read_html_orders_dedupes_and_skips(tmp_path):
    write_pages(tmp_path / "x" / "html")
    documents = make_data.read_html(tmp_path, "*/html")
    assert [document[:11] for document in documents] == ["First page ", "Second page"]
    assert [document.count(REPEATED) for document in documents] == [1, 0]
    assert all("An item\n\nAnother item" in document for document in documents)  # short paragraphs may repeat
    with pytest.raises(ValueError, match="holds no folder y/html"):
        make_data.read_html(tmp_path, "y/html")


def test_parse_kjv_reads_chapters():
    output = (
        "\nGenesis 1\n\n  1 In the  beginning. \n  2 And the earth.\n\nGenesis 2\n\n  1 So.\n\n1 John 1\n\n 10 If\n"
    )
    documents = ["Genesis 1\n\nIn the beginning.\nAnd the earth.", "Genesis 2\n\nSo.", "1 John 1\n\nIf"]
    assert make_data.parse_kjv(output) == documents


def test_a_tokenizer_has_the_exact_size_or_says_why_not():
    documents = ["the cat sat on the mat, the rat sat on the cat"] * 3
    tokenizer = make_data.train_tokenizer(documents, 265)
    assert tokenizer.get_vocab_size() == 265
    assert tokenizer.to_str() == make_data.train_tokenizer(documents, 265).to_str()
    assert tokenizer.decode(tokenizer.encode("ß \n\t中").ids) == "ß \n\t中"
    for size in (257, 4000):
        with pytest.raises(ValueError, match=f"--vocab-size {size}: .* merges of this text are"):
            make_data.train_tokenizer(documents, size)
    tokenizer = make_data.train_tokenizer(["nothing here repeats"], 258)
    assert make_data.count_tokens(tokenizer, ["abc", "é"] * 300) == 300 * (3 + 2) + 600 * 2, "of several batches"


@needs_dpkg
def test_a_whole_set_is_the_same_twice(debs, tmp_path):
    command = ["--sources", "linux", "handbook", "--vocab-size", "280", "--debs", str(debs)]
    command += ["--out", str(tmp_path / "out")]
    make_data.main(command)
    first = contents(tmp_path / "out")
    data = "linux-handbook/data.jsonl"
    assert set(first) == {data, "README.md", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    texts = texts_of(tmp_path / "out" / data)
    assert [text[:11] for text in texts] == ["First page ", "Second page"]  # the handbook's pages are the same two
    assert "é".encode() in first[data]

    readme = first["README.md"].decode()
    assert "| linux | linux-doc-9.9 1.5-2 | GPL-2" in readme and "| handbook | debian-handbook 1.5-2 |" in readme
    assert hashlib.sha256(first[data]).hexdigest() in readme
    trained = HuggingFaceTokenizer(str(tmp_path / "out" / "tokenizer"))
    tokens = sum(len(trained.encode(text)) for text in texts)
    assert f"| `{data}` | {len(first[data])} | 2 | {tokens} |" in readme and trained.get_vocab_size() == 280

    make_data.main(command)
    assert contents(tmp_path / "out") == first


def test_shuffle_follows_its_seed_and_held_out_rows_are_in_no_other_file(tmp_path):
    documents = [f"document {number}" for number in range(50)] + ["qqqqqqqq"]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))

    def made(*flags: str) -> list[str]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        make_data.main(["--text", str(tmp_path / "own.jsonl"), "--out", str(out), *flags])
        return texts_of(out / "text" / "data.jsonl")

    natural, one, one_again, two = made(), *(made("--shuffle-seed", seed) for seed in "112")
    assert {path.name for path in (tmp_path / "out1").iterdir()} == {"text", "README.md"}, "no tokenizer was asked for"
    assert natural == documents and sorted(one) == sorted(two) == sorted(natural)
    assert one == one_again and one != two and one != natural
    assert made("--held-out", "1", "--vocab-size", "260") == documents[:-1]
    out = tmp_path / "out5"
    assert texts_of(out / "held-out" / "data.jsonl") == documents[-1:]
    assert "qq" not in HuggingFaceTokenizer(str(out / "tokenizer")).get_vocab(), "which it did not see"
    assert "`held-out/data.jsonl`" in (out / "README.md").read_text()
    with pytest.raises(SystemExit, match="--held-out 51 of 51 rows: some must be left"):
        made("--held-out", "51")
    with pytest.raises(SystemExit, match=r"out5/held-out/data\.jsonl is of an earlier call"):
        make_data.main(["--text", str(tmp_path / "own.jsonl"), "--out", str(out)])
    assert texts_of(out / "text" / "data.jsonl") == documents[:-1]


def test_text_of_ones_own_is_split_and_gets_a_tokenizer(tmp_path):
    """Three rows of two files, a document of another, and nothing of an empty one."""
    files = {"a.jsonl": '\ufeff{"text": "one"}\n\n{"text": "two", "id": 2}\n', "b.jsonl": '{"text": "three é"}'}
    files |= {"c.txt": "four\nlines\n", "empty.txt": "\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = ["--out", str(tmp_path / "out"), "--text", *(str(tmp_path / name) for name in files)]
    make_data.main([*command, "--held-out", "1", "--vocab-size", "259"])
    names = {"text/data.jsonl", "held-out/data.jsonl", "README.md"}
    assert set(contents(tmp_path / "out")) == names | {"tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    rows, held_out = (texts_of(tmp_path / "out" / name / "data.jsonl") for name in ("text", "held-out"))
    assert (rows, held_out) == (["one", "two", "three é"], ["four\nlines\n"])
    assert HuggingFaceTokenizer(str(tmp_path / "out" / "tokenizer")).get_vocab_size() == 259
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "| 3 |" in readme and "Debian" not in readme
    for row in ('{"body": "b"}', '{"text": 2}', r'{"text": "\ud800"}'):
        (tmp_path / "b.jsonl").write_text(f'{{"text": "a"}}\n{row}\n')
        with pytest.raises(SystemExit, match=r"make_data.py: .*b.jsonl, line 2: each line must be .*Error: "):
            make_data.main(command)
    (tmp_path / "c.txt").write_bytes("é".encode("latin-1"))
    for path, message in (("c.txt", "is no text in UTF-8"), ("none", "No such file"), ("empty.txt", "no text in ")):
        with pytest.raises(SystemExit, match=message):
            make_data.main(["--out", str(tmp_path / "out"), "--text", str(tmp_path / path)])


def test_read_code_takes_what_people_read_in_the_order_of_paths(tmp_path):
    files = {"mm/b.c": "int b;\n" * 50, "mm/a.h": "int a;\n" * 50, "mm/short.c": "int c;\n", "mm/table.bin": "x" * 500}
    files |= {"mm/long.c": "x" * (make_data.LONGEST_CODE + 1), "mmx/other.c": "int d;\n" * 50}
    for name, text in files.items():
        path = tmp_path / "linux-source-9.9" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.raises(ValueError, match=r"no usr/src/linux-source-\*.tar.xz"):
        make_data.read_code(tmp_path)
    folder = tmp_path / "usr" / "src"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "linux-source-9.9.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "linux-source-9.9", "linux-source-9.9")
    assert make_data.read_code(tmp_path) == [files["mm/a.h"], files["mm/b.c"]]


def test_failing_apt_get_says_why_and_nothing_is_written(tmp_path, monkeypatch):
    programs(tmp_path, {"apt-get": "echo E: Unable to locate package $2 >&2; exit 100"})
    monkeypatch.setenv("PATH", str(tmp_path))
    for out, message in (("out", "Unable to locate package bible-kjv"), ("apt-get", "apt-get is a file")):
        with pytest.raises(SystemExit, match=message):
            make_data.main(["--out", str(tmp_path / out)])
    assert not (tmp_path / "out").exists()


@needs_dpkg
def test_bad_packages_say_what_to_do_and_write_nothing(debs, tmp_path):
    def error(*arguments: str) -> str:
        with pytest.raises(SystemExit) as raised:
            make_data.main(["--debs", str(debs), "--out", str(tmp_path / "out"), *arguments])
        assert not (tmp_path / "out").exists()
        return str(raised.value)

    assert "holds 0 files anarchism_*.deb" in error("--sources", "handbook", "anarchism")
    assert "--vocab-size 5000: bos, eos" in error("--sources", "handbook", "--vocab-size", "5000")
    (debs / "linux-doc-9.9_1.5-2_all.deb").write_bytes(b"half a download")
    assert "dpkg -x" in error("--sources", "linux") and "failed" in error("--sources", "linux")
    make_deb(debs, "python3-doc", depends="something-else")
    assert "depends on no python3" in error("--sources", "python")


@pytest.mark.parametrize("flags, message", [("--vocab-size 257", "is too small"), ("--held-out -1", "-1 is no number")])
def test_wrong_numbers_are_refused_before_any_download(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_data, "fetch_source", None)
    with pytest.raises(SystemExit, match="2"):
        make_data.main(["--out", str(tmp_path), *flags.split()])
    assert message in capsys.readouterr().err
