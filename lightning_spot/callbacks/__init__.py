"""Top floor: the callbacks. Thin glue between Lightning's hooks and the floors below."""

from lightning_spot.callbacks.auto_resume import AutoResume, ResumedFrom
from lightning_spot.callbacks.preemption_guard import PreemptionGuard
from lightning_spot.callbacks.remote_snapshot import RemoteSnapshot
from lightning_spot.callbacks.spot_checkpoint import SpotCheckpoint

__all__ = ["AutoResume", "PreemptionGuard", "RemoteSnapshot", "ResumedFrom", "SpotCheckpoint"]
