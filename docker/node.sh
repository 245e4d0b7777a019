#!/bin/sh
# `proofline` in the image proofline-node: as the owner of the model cache, or as root where root must write to it.
#
# MLNode is root, and so are the models that it has downloaded. A cache that has one other owner alone is that user's.
set -eu
set -- python3 -P -c "from cli.main import app; app(prog_name='proofline')" "$@"
export HOME=/data/home USER=proofline # compiled kernels go here; the cache gets nothing but models
cache=${HF_HOME:=/root/.cache}
export HF_HOME
if [ "$(id -u)" = 0 ]; then
    mkdir -p "$cache" "$HOME"
    owner=$(stat -c %u:%g "$cache")
    if [ -n "$(find "$cache" -maxdepth 2 ! -uid "${owner%:*}" -print -quit)" ]; then
        owner=0:0
    fi
    if [ "$(stat -c %u:%g /data /data/home | sort -u)" != "$owner" ]; then
        chown -R "$owner" /data
    fi
    [ "$owner" = 0:0 ] || set -- setpriv --reuid "${owner%:*}" --regid "${owner#*:}" --clear-groups "$@"
fi
exec "$@"
