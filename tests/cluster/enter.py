"""Makes a container of the process that runs it, and then the container's command.

Run as root in new namespaces (mounts, names, processes), with a file that says what it is: see
`Cluster.start` in pods.py. The image is a folder, seen through an overlay that is read-only once
the mount points are made.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def enter(container: dict[str, Any]) -> None:
    work, user = Path(container["work"]), str(container["user"])
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(work))
    upper, inner, root = work / "upper", work / "inner", work / "root"
    for folder in (upper, inner, root):
        folder.mkdir()
    layers = f"lowerdir={container['image']},upperdir={upper},workdir={inner}"
    mount("-t", "overlay", "overlay", "-o", layers, str(root))
    # Of this machine, which is no image: its programs lie where others may not look.
    for folder in container["opened"]:
        Path(f"{root}{folder}").chmod(0o755)
    mount("-t", "proc", "proc", f"{root}/proc")
    mount("--bind", "/dev", f"{root}/dev")
    mount("--rbind", "/sys", f"{root}/sys")
    mount("-o", "remount,bind,ro", f"{root}/sys")
    for one in container["mounts"]:
        place = Path(f"{root}{one['path']}")
        place.mkdir(parents=True, exist_ok=True)
        if one["source"] is None:
            mount(
                "-t", "tmpfs", "-o", f"mode=2777,gid={user},{one['options']}", "tmpfs", str(place)
            )
        else:
            mount("--bind", one["source"], str(place))
            if one["read_only"]:
                mount("-o", "remount,bind,ro", str(place))
    for folder in container["kept"]:  # hidden by a mount above them
        place = Path(f"{root}{folder}")
        if not place.exists():
            place.mkdir(parents=True)
            mount("--bind", folder, str(place))
    Path(f"{root}/etc/hosts").touch()
    mount("--bind", container["hosts"], f"{root}/etc/hosts")
    mount("-o", "remount,ro", str(root))
    subprocess.run(["hostname", container["environment"]["HOSTNAME"]], check=True)
    os.chroot(root)
    os.chdir("/")
    become(container)


def become(container: dict[str, Any]) -> None:
    """Never returns: this process is the command now, as the container's user, without rights."""
    user = str(container["user"])
    command = [
        *("setpriv", "--reuid", user, "--regid", user, "--groups", user, "--no-new-privs"),
        *("--bounding-set", "-all", "--inh-caps", "-all", "--", *container["command"]),
    ]
    os.execvpe(command[0], command, container["environment"])


if __name__ == "__main__":
    enter(json.loads(Path(sys.argv[1]).read_text()))
