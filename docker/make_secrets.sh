# Writes redis_password, flower_password, grafana_password and redis.conf into the directory $1, for the services of
# compose.yaml, and what Prometheus and Grafana may know into directories of theirs in $2.
# A password is $REDIS_PASSWORD, $FLOWER_PASSWORD or $GRAFANA_PASSWORD where set, else the one already there, else made up.
set -eu
umask 022

put() { # value, file
    printf %s "$1" >"$2.new"
    mv "$2.new" "$2"
}

password() { # file's name, value from the environment
    file="$DIRECTORY/$1"
    if [ -z "$2" ] && [ -s "$file" ]; then
        return
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

DIRECTORY=$1 EACH=$2
password redis_password "${REDIS_PASSWORD:-}" REDIS_PASSWORD
password flower_password "${FLOWER_PASSWORD:-}" FLOWER_PASSWORD
password grafana_password "${GRAFANA_PASSWORD:-}" GRAFANA_PASSWORD
printf 'requirepass %s\n' "$(cat "$DIRECTORY/redis_password")" >"$DIRECTORY/redis.conf"
mkdir -p "$EACH/prometheus" "$EACH/grafana"
put "$(cat "$DIRECTORY/flower_password")" "$EACH/prometheus/flower_password"
put "${METRICS_KEY:-}" "$EACH/prometheus/metrics_key"
put "$(cat "$DIRECTORY/grafana_password")" "$EACH/grafana/grafana_password"
