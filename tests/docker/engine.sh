#!/usr/bin/env bash
# Runs a command with a Docker engine: the one that answers, else one of its own, which ends with the command.
#
#   bash tests/docker/engine.sh COMMAND...        (WORK=folder keeps packages, images and build cache; build/docker)
#
# Its own engine needs root and Debian: Debian's packages of Engine, Compose and buildx in a folder, a network namespace, so that
# no port of this machine matters, and base images made by mmdebstrap under the names that our Dockerfiles ask for.
set -euo pipefail
docker info >/dev/null 2>&1 && exec "$@"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || ! unshare --net true 2>/dev/null; then
    echo "make docker: skipped, because no Docker engine answers and this machine cannot start one (root and Debian's apt-get)"
    exit 0
fi

HERE=$(realpath "$(dirname "$0")")
WORK=$(realpath -m "${WORK:-$HERE/../../build/docker}") NS=${NS:-pldocker} NET=${NET:-10.214.9}
TOOLS=$WORK/tools LOG=$WORK/log WHEELS=/opt/wheels
mkdir -p "$WORK"/{debs,tools,roots,config/cli-plugins,apt/partial,apt/lists/partial} "$LOG"
export DOCKER_HOST=unix://$WORK/docker.sock DOCKER_CONFIG=$WORK/config PATH=$TOOLS/usr/bin:$TOOLS/usr/sbin:$PATH
say() { echo "make docker: $(date +%T) $*"; }

RULES=("nat POSTROUTING -s $NET.0/24 -o eth0 -j MASQUERADE" "filter FORWARD -i v$NS -j ACCEPT" "filter FORWARD -o v$NS -j ACCEPT"
    "mangle FORWARD -o eth0 -s $NET.0/24 -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --set-mss 1300"
    "mangle FORWARD -i eth0 -d $NET.0/24 -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --set-mss 1300")
rules() { for rule in "${RULES[@]}"; do iptables -t "${rule%% *}" "$1" ${rule#* } 2>/dev/null || true; done; }
ended() { # what this script started, by its id
    set +e
    docker ps -aq 2>/dev/null | xargs -r docker rm -f >/dev/null 2>&1
    for file in "$WORK"/*.pid; do
        [ -f "$file" ] && kill "$(cat "$file")" 2>/dev/null && tail --pid="$(cat "$file")" -f /dev/null
    done
    rm -f "$WORK"/*.pid
    umount "$WORK"/exec/netns/* 2>/dev/null
    rm -rf "$WORK/exec"
    rules -D
    ip link del "v$NS" 2>/dev/null
    ip netns del "$NS" 2>/dev/null
    say "ended; $(du -sh "$WORK" | cut -f1) are kept in $WORK"
}
trap ended EXIT

say "packages"
if ! command -v iptables >/dev/null || ! command -v runc >/dev/null || ! command -v mmdebstrap >/dev/null || ! [ -x /usr/bin/tini-static ]; then
    apt-get update -qq
    apt-get install -yqq --no-install-recommends iptables runc tini mmdebstrap iproute2 >"$LOG/apt" 2>&1
fi
if [ ! -x "$TOOLS/usr/sbin/dockerd" ]; then # unpacked, not installed
    echo "deb http://deb.debian.org/debian trixie main" >"$WORK/apt/sources.list"
    from=(-o "Dir::Etc::sourcelist=$WORK/apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::Lists=$WORK/apt/lists" -o APT::Sandbox::User=root)
    apt-get "${from[@]}" update -qq
    (cd "$WORK/debs" && apt-get "${from[@]}" download -qq docker.io docker-cli docker-compose docker-buildx containerd)
    for package in "$WORK"/debs/*.deb; do dpkg -x "$package" "$TOOLS"; done
    ln -sf "$TOOLS"/usr/libexec/docker/cli-plugins/* "$DOCKER_CONFIG/cli-plugins/"
fi

say "engine"
ip netns add "$NS"
ip link add "v$NS" mtu 1400 type veth peer name eth0 netns "$NS"
ip addr add "$NET.1/24" dev "v$NS"
ip link set "v$NS" up
for step in "link set lo up" "link set eth0 mtu 1400 up" "addr add $NET.2/24 dev eth0" "route add default via $NET.1"; do ip -n "$NS" $step; done
sysctl -qw net.ipv4.ip_forward=1
rules -I
echo '{}' >"$WORK/daemon.json"
setsid nsenter --net="/run/netns/$NS" "$TOOLS/usr/sbin/dockerd" --config-file "$WORK/daemon.json" --data-root "$WORK/data" --exec-root "$WORK/exec" \
    -H "$DOCKER_HOST" -p "$WORK/dockerd.pid" --mtu 1400 --init-path /usr/bin/tini-static --userland-proxy-path "$TOOLS/usr/sbin/docker-proxy" \
    </dev/null >"$LOG/dockerd" 2>&1 &
for _ in $(seq 60); do docker info >/dev/null 2>&1 && break; sleep 1; done
docker version --format 'make docker: Engine {{.Server.Version}}'

say "base images"
base() { mmdebstrap --mode=root --variant=minbase --include="$3" "$2" "$WORK/roots/$1" http://deb.debian.org/debian >"$LOG/root-$1" 2>&1; }
imported() { # folder, name, changes...
    local root=$1 name=$2 changes=()
    shift 2
    for change in "$@"; do changes+=(-c "$change"); done
    tar -C "$root" -c . | docker import "${changes[@]}" - "$name" >/dev/null
}
PLACES='ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin'
if ! docker image inspect python:3.12-slim-bookworm redis:7.2-alpine nginx:1.28-alpine >/dev/null 2>&1; then
    rm -rf "$WORK"/roots/*
    base slim bookworm ca-certificates,netbase,tzdata,libssl3,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,zlib1g,libreadline8,libncursesw6,libuuid1,libexpat1,libcrypt1 &
    slim=$!
    base other trixie redis-server,nginx-light,curl,busybox-static,ca-certificates &
    other=$!
    wait "$slim"
    wait "$other"
    root=$WORK/roots/slim
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    rm -f "$root/etc/apt/sources.list"
    printf 'Types: deb\nURIs: http://deb.debian.org/debian\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' >"$root/etc/apt/sources.list.d/debian.sources"
    for found in 3.12 3.11; do # this machine's own builds of Python, at /usr/local as in the image python
        version=$(ls "$HOME/.pyenv/versions" | grep "^${found//./\\.}\." | tail -1)
        from=$HOME/.pyenv/versions/$version root=$WORK/roots/py$found
        cp -a "$WORK/roots/slim" "$root"
        cp -a "$from/bin/python$found" "$root/usr/local/bin/"
        cp -a "$from"/lib/libpython* "$root/usr/local/lib/"
        tar -C "$from/lib" -cf - --exclude test --exclude __pycache__ --exclude 'site-packages/*' --exclude '*.a' "python$found" | tar -C "$root/usr/local/lib" -xf -
        sed -i "s#$from#/usr/local#g" "$root/usr/local/lib/python$found"/_sysconfigdata_*.py
        ln -sf "python$found" "$root/usr/local/bin/python3"
        ln -sf python3 "$root/usr/local/bin/python"
        echo /usr/local/lib >"$root/etc/ld.so.conf.d/local.conf"
        chroot "$root" /sbin/ldconfig
        chroot "$root" /usr/local/bin/python -m ensurepip >/dev/null 2>&1
        ln -sf pip3 "$root/usr/local/bin/pip"
        find "$root/usr/local" -name '*.pyc' -delete # that image has none either
        printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ndefault-timeout = 180\nroot-user-action = ignore\n' >"$root/etc/pip.conf"
        # torch's CPU build, where a workplace has it
        [ ! -d $WHEELS ] || printf 'find-links = http://172.17.0.1:8899/\ntrusted-host = 172.17.0.1\n' >>"$root/etc/pip.conf"
        imported "$root" "python:$found-slim-bookworm" "$PLACES" 'ENV LANG=C.UTF-8' 'CMD ["python3"]'
    done
    root=$WORK/roots/other
    mkdir -p "$root/data"
    chroot "$root" chown redis:redis /data
    chroot "$root" useradd --system --home /var/cache/nginx nginx
    for applet in sh od tr head sha256sum cut sed mv mkdir cat wget grep; do ln -sf /usr/bin/busybox "$root/usr/local/bin/$applet"; done # as in Alpine
    ln -sf /usr/bin/busybox "$root/usr/bin/sh"
    imported "$root" redis:7.2-alpine "$PLACES" 'WORKDIR /data' 'VOLUME /data' 'CMD ["redis-server"]'
    docker tag redis:7.2-alpine nginx:1.28-alpine
fi
if [ -d $WHEELS ]; then
    setsid nsenter --net="/run/netns/$NS" python3 -m http.server 8899 --bind 172.17.0.1 --directory $WHEELS >"$LOG/wheels" 2>&1 </dev/null &
    echo $! >"$WORK/wheels.pid"
    export PROOFLINE_DOCKER_PYTHON=python:3.11-slim-bookworm # of which torch's build is there
fi

say "tests"
"$@"
