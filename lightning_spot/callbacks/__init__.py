"""The callbacks: Lightning's hooks, forwarded to what one ``fit`` has of resume, snapshots and exit."""

from lightning_spot.callbacks.auto_resume import AutoResume
from lightning_spot.callbacks.preemption_guard import PreemptionGuard
from lightning_spot.callbacks.remote_snapshot import RemoteSnapshot
from lightning_spot.callbacks.spot_checkpoint import SpotCheckpoint
from lightning_spot.session.selection import ResumedFrom

__all__ = ["AutoResume", "PreemptionGuard", "RemoteSnapshot", "ResumedFrom", "SpotCheckpoint"]
