"""Builds a text data set and a tokenizer for TorchTitan out of text of your own, or of Debian packages.

    python scripts/make_data.py --text my/*.jsonl --shuffle-seed 0 --held-out 100 --vocab-size 8192 --out outputs/mine

Writes OUT/text/data.jsonl (of packages OUT/<sources>/data.jsonl), one {"text": ...} in each line, with --held-out
held-out/data.jsonl, with --vocab-size tokenizer/, and README.md with sizes, checksums and licences.
Then point TorchTitan at it: dataset = "c4_test", dataset_path = OUT/text, hf_assets_path = OUT/tokenizer. Check a
source's licence before you pass its text on: only kjv is in the public domain.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.html_prose import html_paragraphs
from scripts.progress import ends_in_words, progress

ASSETS = Path(__file__).resolve().parent.parent / "train_configs" / "assets"
BOS = "<|bos|>"
EOS = "<|eos|>"
SMALLEST_VOCAB = 2 + 256  # bos, eos and every byte: with less, some text could not be encoded


class Source(NamedTuple):
    """One corpus: the Debian packages that it comes from, how their extracted files become documents, what it is, its
    licence, and where the package is empty and depends on the real one, what that one's name matches."""

    packages: tuple[str, ...]
    read: Callable[[Path], list[str]]
    about: str
    licence: str
    follow: str | None = None


def read_kjv(root: Path) -> list[str]:
    """One document per chapter, in the Bible's order: a heading, then one verse a line without its number."""
    # "Rev22" would mean Rev22:1 and lose twenty verses. The program, which needs libreadline8, finds bible.data in its
    # working directory.
    return parse_kjv(output_of(str(root / "usr/bin/bible"), "-l", "100000", "Gen1:1-Rev22:21", cwd=root / "usr/lib"))


def parse_kjv(output: str) -> list[str]:
    """Split what `bible` prints ("Genesis 1", a blank line, "  1 In the beginning ...") into chapters."""
    chapters: list[str] = []
    for line in filter(None, map(str.rstrip, output.splitlines())):
        verse = re.fullmatch(r" +\d+ (.+)", line)
        if verse and chapters:
            chapters[-1] += "\n" + " ".join(verse[1].split())
        else:
            chapters.append(line + "\n")
    return chapters


SKIPPED_FOLDERS = {"translations", "_static", "_sources", "_downloads", "_modules"}
SKIPPED_PAGES = re.compile(r"(genindex.*|search|py-modindex)\.html")


def read_html(root: Path, pages: str) -> list[str]:
    """One document per HTML page under the folder that the glob `pages` names, in the order of their paths. Of long
    paragraphs (licence notes, kernel-doc shown on two pages) the first one stays."""
    folders = sorted(root.glob(pages))
    if not folders:
        raise ValueError(f"the package holds no folder {pages}: its layout has changed, adapt SOURCES in make_data.py")
    documents: list[str] = []
    seen: set[str] = set()
    for path in sorted(folders[0].rglob("*.html")):
        inside = path.relative_to(folders[0])
        if path.is_symlink() or SKIPPED_FOLDERS & set(inside.parts) or SKIPPED_PAGES.fullmatch(path.name):
            continue
        kept = []
        for paragraph in html_paragraphs(path.read_text(encoding="utf-8", errors="replace")):
            if paragraph not in seen:
                kept.append(paragraph)
            if len(paragraph) > 80:  # short ones ("Parameters", "Return") repeat as a part of normal text
                seen.add(paragraph)
        documents.append("\n\n".join(kept))
    return [text for text in documents if len(text) >= 200]  # less is a page of links


# Of the kernel's source. Left out are most drivers, whose code repeats itself, and Documentation, which the source
# "linux" has as prose.
CODE_FOLDERS = (
    *("arch/x86", "block", "crypto", "drivers/net", "fs", "include", "init", "io_uring", "ipc", "kernel", "lib"),
    *("mm", "net", "security", "virt"),
)
CODE_ENDINGS = {".c", ".h", ".S", ".py", ".sh", ".txt", ".rst"}
LONGEST_CODE = 400_000  # bytes; longer ones are tables of registers and of other constants


def read_code(root: Path) -> list[str]:
    """One document per file of the kernel's source, in the order of their paths."""
    archives = sorted(root.glob("usr/src/linux-source-*.tar.xz"))
    if not archives:
        raise ValueError("the package holds no usr/src/linux-source-*.tar.xz: adapt SOURCES in make_data.py")
    documents = {}
    with tarfile.open(archives[0]) as archive:
        for member in archive:
            inside = PurePosixPath(member.name).relative_to(PurePosixPath(member.name).parts[0])
            wanted = member.isfile() and 200 <= member.size <= LONGEST_CODE and inside.suffix in CODE_ENDINGS
            if wanted and any(inside.is_relative_to(folder) for folder in CODE_FOLDERS):
                documents[inside] = archive.extractfile(member).read().decode(errors="replace")
    return [documents[inside] for inside in sorted(documents)]


DOC = "usr/share/doc"
SOURCES = {
    "kjv": Source(
        ("bible-kjv", "bible-kjv-text"),
        read_kjv,
        "King James Bible, a row per chapter, 4 MB",
        f"text in the public domain ({DOC}/bible-kjv-text/copyright); the program printing it is GPL-2+",
    ),
    "linux": Source(
        ("linux-doc",),
        lambda root: read_html(root, f"{DOC}/linux-doc-*/html"),
        "Linux kernel documentation, a row per page, 23 MB",
        f"GPL-2, some files under other licences ({DOC}/linux-doc-*/copyright)",
        follow=r"linux-doc-[\d.]+",
    ),
    "handbook": Source(
        ("debian-handbook",),
        lambda root: read_html(root, f"{DOC}/debian-handbook/html/en-US"),
        "The Debian Administrator's Handbook, a row per section, 1 MB",
        f"GPL-2+ or CC-BY-SA-3.0 ({DOC}/debian-handbook/copyright)",
    ),
    "python": Source(
        ("python3-doc",),
        lambda root: read_html(root, f"{DOC}/python3.*/html"),
        "Python documentation, a row per page, 7 MB",
        f"PSF ({DOC}/python3.*/html/license.html)",
        follow=r"python3\.\d+-doc",
    ),
    "anarchism": Source(
        ("anarchism",),
        lambda root: read_html(root, f"{DOC}/anarchism/html"),
        "An Anarchist FAQ, a row per section, 11 MB",
        f"GPL-2 ({DOC}/anarchism/copyright)",
    ),
    "code": Source(
        ("linux-source",),
        read_code,
        "Linux kernel's source without most drivers, a row per file, 270 MB",
        f"GPL-2, some files under other licences ({DOC}/linux-source-*/copyright)",
        follow=r"linux-source-[\d.]+",
    ),
}


def read_rows(path: Path) -> list[str]:
    """The texts of a JSON Lines file in UTF-8, whose lines may be empty. Raises ValueError if a line is no such row."""
    texts = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode("utf-8-sig"))["text"]
                if not isinstance(text, str):
                    raise TypeError(f"its text is {text!r:.40}")
                text.encode()  # JSON can name half of a surrogate pair, which is no character
            except (ValueError, TypeError, LookupError) as error:
                wanted = 'each line must be a JSON object in UTF-8 whose "text" is a string'
                raise ValueError(f"{path}, line {number}: {wanted} ({type(error).__name__}: {error})") from error
            texts.append(text)
    return texts


def read_own(path: Path) -> list[str]:
    """The rows of a JSON Lines file, or the text of any other one as one document. Raises ValueError if it is not
    UTF-8."""
    try:
        return read_rows(path) if path.suffix == ".jsonl" else [path.read_text(encoding="utf-8-sig")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def output_of(*command: str, cwd: Path) -> str:
    """What a command prints. Raises ValueError if it failed, and OSError if there is none."""
    how = {"env": os.environ | {"LC_ALL": "C.UTF-8"}, "stdin": subprocess.DEVNULL, "encoding": "utf-8"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, **how)
    if done.returncode:
        raise ValueError(f"`{shlex.join(command)}` failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def fetch_package(package: str, downloads: Path, debs: Path | None) -> Path:
    """The package's .deb, out of the folder `debs` where one is given, else downloaded with apt-get."""
    if debs is None:
        output_of("apt-get", "download", package, cwd=downloads)
    folder = debs or downloads
    found = sorted(folder.glob(f"{package}_*.deb"))
    if len(found) != 1:
        raise ValueError(f"{folder} holds {len(found)} files {package}_*.deb, where exactly one is needed")
    return found[0].resolve()


def fetch_source(name: str, work: Path, debs: Path | None) -> tuple[list[str], dict[str, str]]:
    """The documents of one source and the version of each package they came from; files go to the folder `work`."""
    source, root, downloads = SOURCES[name], work / name, work / f"{name}_debs"
    root.mkdir()
    downloads.mkdir()

    def field(deb: Path, name: str) -> str:
        return output_of("dpkg-deb", "-f", str(deb), name, cwd=work).strip()

    versions = {}
    for package in source.packages:
        deb = fetch_package(package, downloads, debs)
        if source.follow:
            real = re.search(source.follow, field(deb, "Depends"))
            if real is None:
                raise ValueError(f"{package} depends on no {source.follow} package: adapt SOURCES in make_data.py")
            deb = fetch_package(real[0], downloads, debs)
        output_of("dpkg", "-x", str(deb), str(root), cwd=work)
        versions[field(deb, "Package")] = field(deb, "Version")
    documents = source.read(root)
    if not documents:
        raise ValueError(f"{', '.join(versions)} gave no text: its layout has changed, adapt SOURCES in make_data.py")
    return documents, versions


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab_size` tokens: bos is 0, eos is 1, then the 256 bytes, then the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    if (size := tokenizer.get_vocab_size()) != vocab_size:
        raise ValueError(f"--vocab-size {vocab_size}: bos, eos, the 256 bytes and the merges of this text are {size}")
    return tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    tokens = {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "add_eos_token": True}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokens
    return {
        "tokenizer/tokenizer.json": (tokenizer.to_str(pretty=False) + "\n").encode(),
        "tokenizer/tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def count_tokens(tokenizer: Tokenizer, documents: list[str]) -> int:
    """Tokens of a whole pass as TorchTitan feeds them: with one bos and one eos a row."""
    total = 2 * len(documents)
    # In batches: all encodings of a large set at once would need gigabytes.
    for start in range(0, len(documents), 256):
        encodings = tokenizer.encode_batch_fast(documents[start : start + 256], add_special_tokens=False)
        total += sum(len(encoding) for encoding in encodings)
    return total


def jsonl(documents: Iterable[str]) -> bytes:
    return "".join(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents).encode()


def readme(
    files: dict[str, bytes], data: str, rows: int, tokens: int, sources: dict[str, dict[str, str]], command: str
) -> str:
    """README.md: every file's size and sha256, where it came from and how to make it again."""
    text = f"""# Text data and tokenizer

Made, this file included, by the following command in the repository's root
(Python's `tokenizers` {tokenizers.__version__}); the same packages give the same bytes:

```sh
{command}
```

| file | bytes | rows | tokens | sha256 |
|---|---|---|---|---|
"""
    for name, content in files.items():
        rows_and_tokens = f"{rows} | {tokens}" if name == data else "- | -"
        text += f"| `{name}` | {len(content)} | {rows_and_tokens} | `{hashlib.sha256(content).hexdigest()}` |\n"
    text += "\nTokens are those of one pass, with one bos and one eos a row.\n"
    text += "\n| source | Debian packages | licence |\n|---|---|---|\n" if sources else ""
    for name, versions in sources.items():
        packages = ", ".join(map(" ".join, versions.items()))
        text += f"| {name} | {packages} | {SOURCES[name].licence} |\n"
    if "kjv" in sources:  # with the legend that its author asks to go along
        text += "\n## The King James Bible" + (ASSETS / "README.md").read_text().partition("## The King James Bible")[2]
    return text


def build(args: argparse.Namespace, command: str) -> None:
    """Fetch, read, dedupe, shuffle, train, count; write only when all of it is there."""
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"{args.out} is a file: --out names a folder")
    names = [] if args.text else list(dict.fromkeys(args.sources))
    documents = [document for path in args.text for document in read_own(path) if document.strip()]
    sources = {}
    with tempfile.TemporaryDirectory(prefix="make_data_") as work, progress(len(names), "reading", "source") as bar:
        for name in names:
            bar.set_postfix_str(name)
            of_source, sources[name] = fetch_source(name, Path(work), args.debs)
            documents += of_source
            bar.update()
    if not documents:
        raise ValueError(f"there is no text in {', '.join(map(str, args.text))}")
    documents = list(dict.fromkeys(documents))
    if args.shuffle_seed is not None:
        random.Random(args.shuffle_seed).shuffle(documents)

    kept = len(documents) - args.held_out
    if not 0 < kept <= len(documents):
        raise ValueError(f"--held-out {args.held_out} of {len(documents)} rows: some must be left to train on")
    if not args.held_out and (stale := args.out / "held-out" / "data.jsonl").exists():
        raise ValueError(f"{stale} is of an earlier call, and rows of it may be here: remove it, or name another --out")
    documents, held_out = documents[:kept], documents[kept:]
    data = f"{'-'.join(names) or 'text'}/data.jsonl"
    files = {data: jsonl(documents)}
    if held_out:
        files["held-out/data.jsonl"] = jsonl(held_out)
    if args.vocab_size:
        print(f"training a tokenizer of {args.vocab_size} tokens", flush=True)
        tokenizer = train_tokenizer(documents, args.vocab_size)
        files |= tokenizer_files(tokenizer)
    else:
        tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer" / "tokenizer.json"))
    tokens = count_tokens(tokenizer, documents)
    files["README.md"] = readme(files, data, len(documents), tokens, sources, command).encode()
    for name, content in files.items():
        (args.out / name).parent.mkdir(parents=True, exist_ok=True)
        (args.out / name).write_bytes(content)
        print(f"{args.out / name}: {len(content)} bytes")
    print(f"{len(documents)} rows, {tokens} tokens of a tokenizer of {tokenizer.get_vocab_size()}")


def parse_args(argv: list[str]) -> argparse.Namespace:
    listing = "\n".join(f"  {name:10} {source.about}; {source.licence}" for name, source in SOURCES.items())
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog=f"sources, all Debian packages, fetched with `apt-get download`:\n{listing}",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="where to write; files of these names are replaced")
    add("--sources", nargs="+", choices=SOURCES, default=["kjv"], help="one or more, in this order [kjv]")
    help_text = 'text of your own in place of --sources: .jsonl with a {"text": ...} a line, or files of one document'
    add("--text", nargs="+", type=Path, default=[], metavar="FILE", help=help_text)
    add("--vocab-size", type=int, metavar="N", help="train a tokenizer of exactly N tokens on this text")
    add("--shuffle-seed", type=int, metavar="N", help="shuffle the rows with this seed [natural order]")
    help_text = "put the last ROWS rows, after the shuffle, into a set of their own for validation [0]"
    add("--held-out", type=int, default=0, metavar="ROWS", help=help_text)
    add("--debs", type=Path, metavar="FOLDER", help="take the .deb files from here, do not download any")
    args = parser.parse_args(argv)
    if args.vocab_size is not None and args.vocab_size < SMALLEST_VOCAB:
        parser.error(f"--vocab-size {args.vocab_size} is too small: bos, eos and the 256 bytes need {SMALLEST_VOCAB}")
    if args.held_out < 0:
        parser.error(f"--held-out {args.held_out} is no number of rows")
    return args


def main(argv: list[str]) -> None:
    with ends_in_words("make_data.py", "nothing was written; the same command begins anew"):
        build(parse_args(argv), shlex.join(["python", "scripts/make_data.py", *argv]))


if __name__ == "__main__":
    main(sys.argv[1:])
