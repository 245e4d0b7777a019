"""Builds the documentation site: `scripts/build_docs.py [--serve]`, what `make docs` and `make docs-serve` run.

The pages are the Markdown files as they stand: those of docs/, and of the top what GitHub shows there. They keep their
places, so links between them hold here as on GitHub. Without --serve any warning is an error. Needs no network.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AT_THE_TOP = ("README.md", "SECURITY.md", "CONTRIBUTING.md")
PAGES = ROOT / "build" / "docs" / "pages"  # docs_dir of zensical.toml
ADDRESS = "127.0.0.1:8001"  # 8000 is the API's


def sources() -> list[Path]:
    """What the site is made of, pictures included."""
    below = [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    return [*(path for name in AT_THE_TOP if (path := ROOT / name).exists()), *sorted(below)]


def put_together() -> None:
    """Links to the sources, in one folder of their own: zensical takes a folder, and follows links to files only."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for source in sources():
        page = PAGES / source.relative_to(ROOT)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.symlink_to(source)


def main() -> None:
    put_together()
    arguments = ["serve", "--dev-addr", ADDRESS] if "--serve" in sys.argv[1:] else ["build", "--clean", "--strict"]
    # -m puts this folder first on sys.path, where zensical finds scripts.mathml.
    os.chdir(ROOT)
    raise SystemExit(subprocess.run([sys.executable, "-m", "zensical", *arguments]).returncode)


if __name__ == "__main__":
    main()
