#!/usr/bin/env bash
# Runs a training command until it is done. Preemptions (exit code 143, or killed) start it again at once; errors, up to
# MAX_ERRORS times in a row, after a pause that doubles. A SIGTERM to this script is passed on, and ends it.
#
#     examples/restart/shell.sh python examples/digits.py --dirpath checkpoints/digits
set -u

MAX_RESTARTS=${MAX_RESTARTS:-100}
MAX_ERRORS=${MAX_ERRORS:-3}
PAUSE_S=${PAUSE_S:-5}

if [ $# -eq 0 ]; then
    read -r -a command <<<"${TRAIN:-python examples/digits.py --dirpath checkpoints/digits}"
else
    command=("$@")
fi

# When the cloud says that this machine will be taken away, the training would be started again on it: it ends this script.
export LIGHTNING_SPOT_RESTARTER_PID=$$

child=0
ending=0
pass_on() {
    ending=1
    [ "$child" -ne 0 ] && kill -TERM "$child" 2>/dev/null
}
trap pass_on TERM INT

errors=0
pause=$PAUSE_S
for ((restart = 0; restart <= MAX_RESTARTS; restart++)); do
    "${command[@]}" &
    child=$!
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal to this script ends only the waiting
        wait "$child"
        code=$?
    done
    child=0
    [ "$code" -eq 0 ] && exit 0
    [ "$ending" -eq 1 ] && exit 143
    case "$code" in
        143 | 137) # a notice, or SIGKILL
            errors=0
            pause=$PAUSE_S
            echo "restart: preempted (exit code $code); starting again" >&2
            ;;
        *)
            errors=$((errors + 1))
            if [ "$errors" -ge "$MAX_ERRORS" ]; then
                echo "restart: failed $errors times in a row (exit code $code); giving up" >&2
                exit "$code"
            fi
            echo "restart: exit code $code; starting again in $pause s" >&2
            sleep "$pause"
            pause=$((pause * 2))
            ;;
    esac
done
echo "restart: $MAX_RESTARTS restarts were not enough" >&2
exit 1
