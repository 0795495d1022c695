"""Hooks of Hatch: a wheel records its commit, and the repository that `scripts/wheel` names."""

import os
import re
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(\]\()(?!https?:|#)")
_PICTURE = re.compile(r'(\bsrc(?:set)?=")(?!https?:)')
_PAGES = {"Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}


class CommitHook(BuildHookInterface):
    """Puts the guide and the commit into a wheel; those of a clone change after an install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the pages of the guide, and a file with the commit, if there is one."""
        root = Path(self.root)
        if version != "editable":
            for file in (root / "mkdocs.yml", *root.glob("docs/**/*.md")):
                build_data["force_include"][str(file)] = f"gateway/guide/{file.relative_to(root)}"
        installation = runpy.run_path(str(root / "paceline" / "installation.py"))
        commit = installation["commit_of"](root)
        if version != "editable" and commit:
            self._folder = tempfile.TemporaryDirectory()
            file = Path(self._folder.name) / "commit"
            file.write_text(commit)
            build_data["extra_metadata"][str(file)] = Path(installation["COMMIT_FILE"]).name


class RepositoryHook(MetadataHookInterface):
    """Names the pages of the repository that a release is made in, also in the README of PyPI."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in `urls` and `readme`."""
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["urls"] = {}
        if repository := os.environ.get("PACELINE_REPOSITORY"):
            metadata["urls"] = {name: repository + path for name, path in _PAGES.items()}
            tag = f"v{metadata['version']}/"
            readme = _LINK.sub(rf"\1{repository}/blob/{tag}", readme)
            readme = _PICTURE.sub(rf"\1{repository}/raw/{tag}", readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
