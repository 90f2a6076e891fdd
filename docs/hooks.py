"""What the site shows of files that are no pages of it.

A page whose only line is `--8<-- "FILE.md"` is that file of the repository. Links in such a file lead to files beside
it; here they are turned to the pages of the site. Pictures and source files that a page links to are added to the site.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
INCLUDED = re.compile(r'--8<-- "(.+\.md)"\s*')
LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")

_places: dict[str, str] = {}  # of files of the repository in the site


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Note which pages are files of the repository, and add what pages link to and is none."""
    pages = list(files.documentation_pages())
    for page in pages:
        if included := INCLUDED.fullmatch(page.content_string):
            _places[included[1]] = page.src_uri
    for page in pages:
        source, text = _source(page.content_string, page)
        for target, _ in LINK.findall(text):
            path = _beside(source, target)
            page = path.endswith(".md") or (path.startswith("docs/") and not path.startswith("docs/examples/"))
            if page or path in _places or not (ROOT / path).is_file():
                continue
            # As text, since a browser shows a page of text and saves a file of code.
            picture = path.endswith(".png")
            _places[path] = f"pictures/{posixpath.basename(path)}" if picture else f"code/{path}.txt"
            files.append(File.generated(config, _places[path], abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The file in place of the line that names it, and each link to where its file is in the site."""
    source, text = _source(markdown, page.file)
    here = posixpath.dirname(page.file.src_uri) or "."

    def turned(link: re.Match[str]) -> str:
        path = _beside(source, link[1])
        if path not in _places and not (path.startswith("docs/") and not source.startswith("docs/")):
            return link[0]  # a page's own link, or one that mkdocs complains of
        return f"]({posixpath.relpath(_places.get(path, path.removeprefix('docs/')), here)}{link[2] or ''})"

    return LINK.sub(turned, text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Source code that a page unfolds is not searched: it would hide what is written about it."""
    return html.replace('"mkdocstrings-source"', '"mkdocstrings-source" data-search-exclude')


def _source(markdown: str, page: File) -> tuple[str, str]:
    """The file of the repository that a page shows, by its path from the top, and its text."""
    if included := INCLUDED.fullmatch(markdown):
        return included[1], (ROOT / included[1]).read_text(encoding="utf-8")
    return f"docs/{page.src_uri}", markdown


def _beside(source: str, target: str) -> str:
    """The path from the top of the repository of a link's target in a file."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
