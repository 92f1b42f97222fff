"""Hooks of MkDocs: pages from files outside of docs/, and no requests to other hosts.

Links between Markdown files name files of the repository, so that they also work without the site.
In the site they lead to pages. A link to a file that is not a page, such as an example, becomes its
label.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# By file of the repository: its page.
PAGES = {"benchmarks/README.md": "benchmarks.md", "CONTRIBUTING.md": "contributing.md"}
_LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
_LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    sources = {page: source for source, page in PAGES.items()}
    folder = posixpath.dirname(sources.get(here, f"docs/{here}"))

    def in_site(link: re.Match[str]) -> str:
        label, path, anchor = link[1], link[2], link[3] or ""
        if "://" in path:
            return link[0]
        target = posixpath.normpath(posixpath.join(folder, path))
        if target in PAGES:
            target = f"docs/{PAGES[target]}"
        if not target.startswith("docs/"):
            if not (ROOT / target).exists():
                raise ValueError(f"{here} links to {path}, which does not exist.")
            return label
        return f"[{label}]({posixpath.relpath(target, posixpath.dirname(f'docs/{here}'))}{anchor})"

    return _LINK.sub(in_site, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    if found := _LOADED.search(output):
        raise ValueError(f"{page.file.src_uri} loads a file from another host: {found[0]}")
    return output
