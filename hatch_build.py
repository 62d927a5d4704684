"""Metadata that depends on where the repository is: the project's URLs, and the README's links.

The release workflow says where in KAGENT_REPOSITORY_URL, for example "https://example.org/kagent".
Links and pictures of the README then lead to the files of the version's tag. Without it there are
no URLs, and the README has no relative links: on an index they would lead nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "KAGENT_REPOSITORY_URL"
_RELATIVE = r"\((?!https?:|#)([^)\s]+)\)"


class RepositoryMetadataHook(MetadataHookInterface):
    """Sets `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add to the metadata of pyproject.toml."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        url = os.environ.get(VARIABLE, "").rstrip("/")
        if url and not url.startswith(("https://", "http://")):
            raise ValueError(f"{VARIABLE} is {url!r}: expected a URL that begins with https://")
        if url:
            tag = f"v{metadata['version']}"
            metadata["urls"] = {
                "Source": url,
                "Documentation": f"{url}/blob/{tag}/docs/index.md",
                "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
            text = re.sub(rf"(!\[[^\]]*\]){_RELATIVE}", rf"\1({url}/raw/{tag}/\2)", text)
            text = re.sub(rf"(\[[^\]]+\]){_RELATIVE}", rf"\1({url}/blob/{tag}/\2)", text)
        else:
            text = re.sub(rf"!\[[^\]]*\]{_RELATIVE}\s*", "", text)
            text = re.sub(rf"\[([^\]]+)\]{_RELATIVE}", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
