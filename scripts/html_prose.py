"""The prose of an HTML page, for make_data.py: headings, paragraphs and list items."""

from html.parser import HTMLParser

HIDDEN_TAGS = {"head", "script", "style", "nav", "header", "footer", "form", "pre", "table", "svg"}
HIDDEN_CLASSES = set("headerlink sig docnav toctree-wrapper contents toc sphinxsidebar related page-links".split())
HIDDEN_IDS = {"banner", "title"}  # the Debian handbook's page head
BLOCK_TAGS = set("address article blockquote body br dd div dl dt h1 h2 h3 h4 h5 h6 hr li main ol p section ul".split())
VOID_TAGS = {"br", "hr", "img", "input", "link", "meta", "wbr"}


class ProseParser(HTMLParser):
    """Collects a page's headings, paragraphs and list items; code, tables, signatures and navigation are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._pieces: list[str] = []
        self._hidden: tuple[str, int] | None = None  # tag being skipped, and how many of that tag are open
        self._main: tuple[str, int] | None = None  # same for the element with role="main"
        self._done = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden:
            self._hidden = reopen(self._hidden, tag)
            return
        attributes = dict(attrs)
        if tag in BLOCK_TAGS:
            self.flush()
        if is_hidden(tag, attributes):
            self._hidden = None if tag in VOID_TAGS else (tag, 1)
        elif attributes.get("role") == "main":
            self.paragraphs.clear()
            self._main = (tag, 1)
        elif self._main:
            self._main = reopen(self._main, tag)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden:
            self._hidden = reclose(self._hidden, tag)
            return
        if tag in BLOCK_TAGS:
            self.flush()
        if self._main:
            self._main = reclose(self._main, tag)
            self._done = self._done or self._main is None

    def handle_data(self, data: str) -> None:
        if not self._hidden and not self._done:
            self._pieces.append(data)

    def flush(self) -> None:
        """End the paragraph being read."""
        text = " ".join("".join(self._pieces).split())
        self._pieces.clear()
        if is_prose(text):
            self.paragraphs.append(text)


def reopen(element: tuple[str, int], tag: str) -> tuple[str, int]:
    return (element[0], element[1] + (tag == element[0]))


def reclose(element: tuple[str, int], tag: str) -> tuple[str, int] | None:
    depth = element[1] - (tag == element[0])
    return (element[0], depth) if depth else None


def is_hidden(tag: str, attributes: dict[str, str | None]) -> bool:
    classes = set((attributes.get("class") or "").split())
    return bool(
        tag in HIDDEN_TAGS
        or classes & HIDDEN_CLASSES
        or attributes.get("id") in HIDDEN_IDS
        or attributes.get("role") in {"navigation", "search"}
    )


def is_prose(text: str) -> bool:
    """Mostly letters and spaces: keeps sentences and headings, drops rulers, dumps of numbers, lone symbols."""
    letters = sum(character.isalpha() or character == " " for character in text)
    return bool(text) and letters >= 0.7 * len(text)


def html_paragraphs(page: str) -> list[str]:
    """The prose of one HTML page, one string per paragraph."""
    parser = ProseParser()
    parser.feed(page)
    parser.close()
    parser.flush()
    return parser.paragraphs
