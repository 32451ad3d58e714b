"""What the texts of one engine share: what its plan allows, and where that is kept."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvcompile.errors import PlanError
from kvcompile.layouts.sharing import Sharing, sharing
from kvcompile.runtime.module import CachedModel
from kvcompile.serve.capacity import Capacity
from kvcompile.serve.disk import Disk
from kvcompile.serve.rows import Rows
from kvcompile.serve.schedule import Scheduler
from kvcompile.serve.tiers import Tiers

log = logging.getLogger(__name__)

_OF_CACHE = 4  # snapshots have this part of the cache's bytes, if nobody says how many


@dataclass(frozen=True)
class Shared:
    """sharing: of the plan; off: why the prefix cache is, "" where it is on; tiers: where pages and snapshots are."""

    sharing: Sharing
    off: str
    tiers: Tiers
    disk: Disk | None

    @staticmethod
    def of(
        module: CachedModel,
        room: Capacity,
        prefix_cache: str,
        host_memory: int,
        snapshot_memory: int | None,
        disk: Disk | None,
    ) -> Shared:
        """
        Args:
            prefix_cache, host_memory, snapshot_memory: as `Engine` has them.

        Raises:
            PlanError: the prefix cache must be on, and cannot be.
        """
        plan = module.plan
        masked = any(decision.mask_rows for decision in plan.decisions)
        own = sharing((decision.layout for decision in plan.decisions), bool(plan.states), masked)
        if snapshot_memory is None:
            snapshot_memory = room.bytes // _OF_CACHE if own.beside else 0
        reason = own.reason
        if not reason and own.until == 0 and not snapshot_memory and disk is None:
            reason = f"{' and '.join(own.beside)} are in no page, and snapshots of them have no memory"
        if prefix_cache == "on" and reason:
            raise PlanError(f"prefix_cache: on, and texts share nothing of this plan: {reason}")
        if prefix_cache == "off":
            reason = "asked for"
        if reason:
            return Shared(own, reason, Tiers(), disk)
        return Shared(own, "", Tiers(host_memory, snapshot_memory, disk), disk)

    @property
    def on(self) -> bool:
        return not self.off

    @property
    def told(self) -> str:
        """As `Stats` has it."""
        return f"off: {self.off}" if self.off else "on"

    def stats(self) -> dict[str, int]:
        """As `Stats` has them."""
        pages, snapshots, disk = self.tiers.pages, self.tiers.snapshots, self.disk
        return {
            "host_pages": len(pages),
            "host_bytes": pages.nbytes + snapshots.nbytes,
            "snapshots": len(snapshots),
            "store_bytes": 0 if disk is None else disk.nbytes,
        }

    def close(self, scheduler: Scheduler, rows: Rows) -> None:
        """Keep what is in the cache and on the host in the store; nothing happens the second time."""
        if self.disk is None or self.disk.closed:
            return
        try:
            if self.on:
                self.tiers.flush()
                for number, pages in enumerate(scheduler.pages):
                    for page, key in pages.found():
                        below = scheduler.key_below(number, key)
                        if not self.disk.lookup(below):
                            self.disk.store(below, rows.page(number, page))
        except Exception:  # what is lost is computed again
            log.exception("not all of the cache could be kept in %s", self.disk.folder)
        finally:
            self.tiers.close()
            self.disk.close()
