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
        # The open tags named as the element that is skipped, and as the one with role="main", these included.
        self._hidden: list[str] = []
        self._main: list[str] = []
        self._done = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden:
            self._hidden += [tag] * (tag == self._hidden[0])
            return
        attributes = dict(attrs)
        if tag in BLOCK_TAGS:
            self.flush()
        if is_hidden(tag, attributes):
            self._hidden = [tag] * (tag not in VOID_TAGS)
        elif attributes.get("role") == "main":
            self.paragraphs.clear()
            self._main = [tag]
        elif self._main:
            self._main += [tag] * (tag == self._main[0])

    def handle_endtag(self, tag: str) -> None:
        if self._hidden:
            del self._hidden[len(self._hidden) - (tag == self._hidden[0]) :]
            return
        if tag in BLOCK_TAGS:
            self.flush()
        if self._main and tag == self._main[0]:
            self._main.pop()
            self._done |= not self._main

    def handle_data(self, data: str) -> None:
        if not self._hidden and not self._done:
            self._pieces.append(data)

    def flush(self) -> None:
        """End the paragraph being read."""
        text = " ".join("".join(self._pieces).split())
        self._pieces.clear()
        if is_prose(text):
            self.paragraphs.append(text)


def is_hidden(tag: str, attributes: dict[str, str | None]) -> bool:
    classes = HIDDEN_CLASSES.intersection((attributes.get("class") or "").split())
    is_named = attributes.get("id") in HIDDEN_IDS or attributes.get("role") in {"navigation", "search"}
    return tag in HIDDEN_TAGS or is_named or bool(classes)


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
