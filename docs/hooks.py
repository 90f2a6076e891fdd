"""Pages of the site that are a file of the repository: those whose only line is `--8<-- "FILE.md"`.

Links in such a file lead to files beside it. Here they are turned to the pages of the site, and its pictures are added.
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
DIAGRAM = re.compile(r"```mermaid\n.*?```", re.DOTALL)  # which would fetch a script from elsewhere

_places: dict[str, str] = {}  # of files of the repository in the site


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Note which pages are files of the repository, and add the pictures of these."""
    for page in list(files.documentation_pages()):
        if included := INCLUDED.fullmatch(page.content_string):
            _places[included[1]] = page.src_uri
    for source in list(_places):
        for target, _ in LINK.findall((ROOT / source).read_text(encoding="utf-8")):
            path = _beside(source, target)
            if path.endswith(".png") and path not in _places:
                _places[path] = f"pictures/{posixpath.basename(path)}"
                files.append(File.generated(config, _places[path], abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str | None:
    """The file in place of the line that names it."""
    if not (included := INCLUDED.fullmatch(markdown)):
        return None
    source, here = included[1], posixpath.dirname(page.file.src_uri)

    def turned(link: re.Match[str]) -> str:
        path = _beside(source, link[1])
        # A file that is no page of the site stays as it is, and mkdocs complains of the link.
        place = _places.get(path, path.removeprefix("docs/"))
        return f"]({posixpath.relpath(place, here or '.')}{link[2] or ''})"

    text = LINK.sub(turned, (ROOT / source).read_text(encoding="utf-8"))
    picture = posixpath.relpath("pictures/step.svg", here or ".")
    return DIAGRAM.sub(f"![one step: drafts become a tree, one pass of the model verifies it]({picture})", text)


def _beside(source: str, target: str) -> str:
    """The path from the top of the repository of a link's target in a file."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
