#!/usr/bin/env bash
# Several ranks on this host, started again by torchrun when one of them ends. In the script: Trainer(strategy="ddp",
# devices=…). torchrun restarts all ranks together; they resume from one snapshot.
#
#     RANKS=2 examples/restart/torchrun.sh train.py fit --config callbacks/spot.yaml
set -eu

# torchrun passes a SIGTERM on and kills the ranks 30 s later.
export LIGHTNING_SPOT_GRACE_PERIOD_S=${LIGHTNING_SPOT_GRACE_PERIOD_S:-30}

# torchrun would start ranks again on a machine that the cloud takes away, and ends with 1 when it was told to end:
# lightning-spot ends it then, with 143.
#
# Ranks on one host find each other at a free port. On several hosts, give --nnodes, --rdzv-backend=c10d and
# --rdzv-endpoint instead of --standalone. Hosts may come and go (--nnodes=1:2): see
# docs/how-to/torchrun.md for what the script and gloo need then.
exec lightning-spot run --max-restarts 0 -- \
    torchrun --standalone --nproc-per-node "${RANKS:-2}" --max-restarts "${MAX_RESTARTS:-10}" "$@"
