#!/usr/bin/env bash
# Several ranks on this host, started again by torchrun when one of them ends. In the script: Trainer(strategy="ddp",
# devices=…). torchrun restarts all ranks together; they resume from one snapshot.
#
#     RANKS=2 examples/restart/torchrun.sh train.py fit --config callbacks/spot.yaml
set -eu

# torchrun passes a SIGTERM on and kills the ranks 30 s later.
export LIGHTNING_SPOT_GRACE_S=${LIGHTNING_SPOT_GRACE_S:-30}

# Ranks on one host find each other at a free port. On several hosts, give --nnodes, --rdzv-backend=c10d and
# --rdzv-endpoint instead of --standalone. Hosts may come and go (--nnodes=1:2): see "Many GPUs, many hosts" in
# docs/guide.md for what the script and gloo need then.
exec torchrun --standalone --nproc-per-node "${RANKS:-2}" --max-restarts "${MAX_RESTARTS:-10}" "$@"
