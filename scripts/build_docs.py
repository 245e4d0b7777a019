"""Builds the documentation site, or serves it: `make docs`, `make docs-serve`.

The pages are the Markdown files of docs/ and the main pages of the repository. Their paths stay the
same, so links work here as on GitHub. Without --serve any warning is an error. Needs no network.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AT_THE_TOP = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = ROOT / "build" / "docs" / "pages"  # docs_dir of zensical.toml
ADDRESS = "127.0.0.1:8001"  # 8000 is the API's
LOOK_S = 0.5  # seconds between two checks for changes, with --serve


def sources() -> list[Path]:
    """Returns the files of the site, including pictures."""
    below = [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    return [*(path for name in AT_THE_TOP if (path := ROOT / name).exists()), *sorted(below)]


def put_together() -> None:
    """Copies changed files into zensical's folder, because it does not notice changes of links."""
    for source in sources():
        page = PAGES / source.relative_to(ROOT)
        if not page.exists() or page.stat().st_mtime_ns != source.stat().st_mtime_ns:
            page.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, page)


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    put_together()
    serve = "--serve" in sys.argv[1:]
    arguments = ["serve", "--dev-addr", ADDRESS] if serve else ["build", "--clean", "--strict"]
    # -m puts this folder first on sys.path, where zensical finds scripts.mathml.
    os.chdir(ROOT)
    with subprocess.Popen([sys.executable, "-m", "zensical", *arguments]) as zensical:
        while serve and zensical.poll() is None:
            time.sleep(LOOK_S)
            put_together()
    raise SystemExit(zensical.returncode)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # how one stops serving
        sys.exit(130)
