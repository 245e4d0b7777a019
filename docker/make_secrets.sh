# Generates the passwords of a node, for the services of compose.yaml, and lets each service see its own alone.
#
#   sh make_secrets.sh ALL EACH USERS [ACL]
#
# ALL      directory of all of them: redis_password (the operator's), NAME_password for each user of Redis and
#          flower_password and grafana_password; and what redis-server reads: redis.conf
# EACH     directory with one for each service, in which is put what it may know
# USERS    the users' rights, users.acl beside this file
# ACL      directory for users.acl where Redis may write, so that it keeps the users of joined hosts (`proofline hosts`); ALL
#
# A password is what the file redis_password, flower_password or grafana_password in the folder $GIVEN holds, or without such
# a folder $REDIS_PASSWORD, $FLOWER_PASSWORD or $GRAFANA_PASSWORD; else the one already there, else generated.
set -eu
umask 022
ALL=$1 EACH=$2 USERS=$3 ACL=${4:-$1}

if [ -n "${GIVEN:-}" ] && [ -n "${REDIS_PASSWORD:-}${FLOWER_PASSWORD:-}${GRAFANA_PASSWORD:-}${METRICS_KEY:-}" ]; then
    echo "Take REDIS_PASSWORD, FLOWER_PASSWORD, GRAFANA_PASSWORD and METRICS_KEY out of .env, which every container gets;" \
        "each is a file of docker/secrets: redis_password, flower_password, grafana_password, metrics_key." >&2
    exit 1
fi

given() { # file's name, value from the environment
    if [ -z "$2" ] && [ -s "${GIVEN:-/nowhere}/$1" ]; then
        tr -d '\r\n' <"$GIVEN/$1"
    else
        printf %s "$2"
    fi
}

put() { # value, file
    printf %s "$1" >"$2.new"
    mv "$2.new" "$2"
}

password() { # file's name, value from the environment, variable's name
    file="$ALL/$1"
    if [ -z "$2" ] && [ -s "$file" ]; then
        kept=$(tr -d '\r\n' <"$file")
        [ -z "$kept" ] || return 0
    fi
    value=${2:-$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')}
    case $value in
        *[!A-Za-z0-9._~-]*)
            echo "$3 may hold letters, digits and . _ ~ - only: choose another." >&2
            exit 1
            ;;
    esac
    put "$value" "$file"
}

hashed() { # file's name
    printf '#%s' "$(tr -d '\r\n' <"$ALL/$1" | sha256sum | cut -d ' ' -f 1)"
}

user() { # name, its passwords
    printf 'user %s on %s %s\n' "$1" "$2" "$(sed -n "s/^user $1 //p" "$USERS" | tr '\n' ' ')"
}

# Variables, because `set -e` ends this script if an assignment fails, but not if an argument does.
redis=$(given redis_password "${REDIS_PASSWORD:-}")
flower=$(given flower_password "${FLOWER_PASSWORD:-}")
grafana=$(given grafana_password "${GRAFANA_PASSWORD:-}")
key=$(given metrics_key "${METRICS_KEY:-}")
password redis_password "$redis" REDIS_PASSWORD
password flower_password "$flower" FLOWER_PASSWORD
password grafana_password "$grafana" GRAFANA_PASSWORD
rights=$(user default "$(hashed redis_password)")
for name in api worker courier flower; do
    password "${name}_redis_password" "" ""
    passwords=$(hashed "${name}_redis_password")
    # Further hosts of before there were users have the operator's password; as workers they may do what workers may.
    [ "$name" = worker ] && passwords="$passwords $(hashed redis_password)"
    rights=$(printf '%s\n%s' "$rights" "$(user "$name" "$passwords")")
    mkdir -p "$EACH/$name"
    put "$(cat "$ALL/${name}_redis_password")" "$EACH/$name/redis_password"
done
mkdir -p "$EACH/prometheus" "$EACH/grafana"
put "$(cat "$ALL/flower_password")" "$EACH/flower/flower_password"
put "$(cat "$ALL/flower_password")" "$EACH/prometheus/flower_password"
put "$key" "$EACH/prometheus/metrics_key"
put "$(cat "$ALL/grafana_password")" "$EACH/grafana/grafana_password"
hosts=$(sed -n '/^user host-/p' "$ACL/users.acl" 2>/dev/null || true)
put "$rights
${hosts:+$hosts
}" "$ACL/users.acl"
put "aclfile $ACL/users.acl
" "$ALL/redis.conf"
