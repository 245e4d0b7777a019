"""Does a Dockerfile's steps in roots of its own, where there is no Docker engine.

The bases are stand-ins: Debian's release of python:3.12-slim-bookworm by mmdebstrap, with Debian's
Python (3.11) where that image has its own; of vllm/vllm-openai the same, without vLLM. Everything
after FROM is done as it stands, by its own lines: RUN in a chroot, with mounts that end with it.
Needs root, mmdebstrap, and the package registries.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.harness.compose_file import ROOT
from tests.images.dockerfile import Image, Instruction, Stage, expanded, flags, pairs, stages, words

RELEASE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
WHEELS = Path("/opt/wheels")  # where a workplace has torch's CPU build, which PyPI has not
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_RUN = r"""
set -e
root=$1 folder=$2 user=$3; shift 3
mount --make-rprivate /
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
while [ "$1" != -- ]; do
    mount --bind "$1" "$root$2"
    mount -o remount,bind,ro "$root$2"
    shift 2
done
shift
exec chroot --userspec="$user" "$root" /bin/sh -c 'cd "$0" && exec /bin/sh -c "$1"' "$folder" "$1"
"""


class Builder:
    """Builds images below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._base = folder / "base.tar"
        self.log: list[str] = []

    def build(self, dockerfile: Path, arguments: Mapping[str, str] | None = None) -> Image:
        """The last stage's image. RuntimeError: a step failed; says which, and its output."""
        built: dict[str, Image] = {}
        given = dict(arguments or {})
        for stage in stages(dockerfile.read_text(), given):
            built[stage.name] = self._stage(dockerfile.stem.partition(".")[0], stage, built, given)
        return built["final"]

    def _stage(
        self, image_name: str, stage: Stage, built: Mapping[str, Image], given: Mapping[str, str]
    ) -> Image:
        root = self._folder / image_name / stage.name
        shutil.rmtree(root, ignore_errors=True)
        self._unpack(root)
        image = Image(root, {"PATH": _PATH})
        arguments: dict[str, str] = {}
        for one in stage.instructions:
            text = one.text
            match one.name:
                case "ARG":
                    name, _, default = text.partition("=")
                    arguments[name] = given.get(name, default)
                case "ENV":
                    image.environment |= pairs(expanded(text, image.environment | arguments))
                case "LABEL":
                    image.labels |= pairs(expanded(text, image.environment | arguments))
                case "WORKDIR":
                    image.folder = text
                    Path(f"{root}{text}").mkdir(parents=True, exist_ok=True)
                case "USER":
                    image.user = text
                case "COPY":
                    _copy(text, image, built)
                case "RUN":
                    self._run(one, image, built, arguments)
                case "HEALTHCHECK":
                    image.health = words(flags(text)[1].removeprefix("CMD "))
                case "ENTRYPOINT":
                    image.entrypoint = words(text)
                case "CMD":
                    image.command = words(text)
        return replace(image)

    def _unpack(self, root: Path) -> None:
        if not self._base.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            seed = self._folder / "seed"
            _done(
                ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", RELEASE, str(seed)],
                "mmdebstrap",
            )
            shutil.copy(AUTHORITIES, f"{seed}{AUTHORITIES}")
            # As in the image `python`: its own Python and pip come first, and may install.
            _done(["chroot", str(seed), "python3", "-m", "venv", "/usr/local"], "venv")
            _done(["tar", "-C", str(seed), "-cf", str(self._base), "."], "tar")
            shutil.rmtree(seed)
        root.mkdir(parents=True)
        _done(["tar", "-C", str(root), "-xf", str(self._base)], "tar")

    def _run(
        self,
        step: Instruction,
        image: Image,
        built: Mapping[str, Image],
        arguments: Mapping[str, str],
    ) -> None:
        given, command = flags(step.text)
        mounts = {"/opt/wheels": str(WHEELS)} if WHEELS.is_dir() else {}
        for name, value in given:
            mount = dict(part.split("=", 1) for part in value.split(","))
            assert (name, mount["type"]) == ("mount", "bind"), step.text
            top = built[mount["from"]].root if "from" in mount else ROOT
            mounts[mount["target"]] = f"{top}/{mount['source'].lstrip('/')}"
        made = [path for path in mounts if not Path(f"{image.root}{path}").exists()]
        for path in made:
            Path(f"{image.root}{path}").mkdir(parents=True)
        environment = {
            "HOME": "/root" if image.user == "root" else f"/home/{image.user}",
            "PIP_CERT": str(AUTHORITIES),
            "PIP_FIND_LINKS": "/opt/wheels",
            "PIP_RETRIES": "1",  # an index that a workplace does not reach
            "PIP_ROOT_USER_ACTION": "ignore",
            **arguments,
            **image.environment,
        }
        binds = [word for path, source in mounts.items() for word in (source, path)]
        self.log.append(step.text)
        _done(
            [
                *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", _RUN, "run"),
                *(str(image.root), image.folder, image.user, *binds, "--", command),
            ],
            f"RUN {command}",
            environment,
        )
        for path in made:
            Path(f"{image.root}{path}").rmdir()


def _copy(text: str, image: Image, built: Mapping[str, Image]) -> None:
    """From the checkout as .dockerignore lets it through, or from a stage."""
    given, rest = flags(text)
    *sources, target = rest.split()
    top = built[dict(given)["from"]].root if given else ROOT
    place = Path(os.path.normpath(f"{image.root}{os.path.join(image.folder, target)}"))
    for source in sources:
        path = Path(f"{top}/{source.lstrip('/')}")
        if path.is_dir():
            shutil.copytree(
                path,
                place,
                symlinks=True,
                dirs_exist_ok=True,
                ignore=None if given else shutil.ignore_patterns("__pycache__"),
            )
        elif target.endswith("/") or len(sources) > 1:
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)
        else:
            shutil.copy2(path, place)


def _done(command: list[str], what: str, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
