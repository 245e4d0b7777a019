# Writes redis_password, flower_password and redis.conf into the directory $1, for the services of compose.yaml.
# A password is $REDIS_PASSWORD or $FLOWER_PASSWORD where set, else the one already there, else made up.
set -eu
umask 022

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
    printf %s "$value" >"$file.new"
    mv "$file.new" "$file"
}

DIRECTORY=$1
password redis_password "${REDIS_PASSWORD:-}" REDIS_PASSWORD
password flower_password "${FLOWER_PASSWORD:-}" FLOWER_PASSWORD
printf 'requirepass %s\n' "$(cat "$DIRECTORY/redis_password")" >"$DIRECTORY/redis.conf"
