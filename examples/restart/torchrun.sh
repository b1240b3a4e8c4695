#!/usr/bin/env bash
# Several ranks on this host, started again by torchrun when one of them ends. In the script: Trainer(strategy="ddp",
# devices=…). torchrun restarts all ranks together; they resume from one snapshot. After a SIGTERM, and when the machine is
# taken away, it ends with 143.
#
#     RANKS=2 examples/restart/torchrun.sh train.py fit --config callbacks/spot.yaml
set -eu

# torchrun passes a SIGTERM on and kills the ranks 30 s later.
export LIGHTNING_SPOT_GRACE_PERIOD_S=${LIGHTNING_SPOT_GRACE_PERIOD_S:-30}

# When the cloud says that this machine will be taken away, ranks would be started again on it: they end this script.
export LIGHTNING_SPOT_RESTARTER_PID=$$

# torchrun itself ends with 1 when it was told to end, as after an error: who starts this again could not tell which.
child=0
ending=0
pass_on() {
    ending=1
    [ "$child" -eq 0 ] || kill -TERM "$child" 2>/dev/null || true
}
trap pass_on TERM

# Ranks on one host find each other at a free port. On several hosts, give --nnodes, --rdzv-backend=c10d and
# --rdzv-endpoint instead of --standalone. Hosts may come and go (--nnodes=1:2): see
# docs/how-to/torchrun.md for what the script and gloo need then.
torchrun --standalone --nproc-per-node "${RANKS:-2}" --max-restarts "${MAX_RESTARTS:-10}" "$@" &
child=$!
[ "$ending" -eq 0 ] || kill -TERM "$child"
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do # a signal to this script ends only the waiting
    code=0
    wait "$child" || code=$?
done
[ "$code" -eq 0 ] || [ "$ending" -eq 0 ] || code=143
exit "$code"
