"""The parts of a run, put together once: device, job, cuts, estimate, batches, step and worker.

`extract`, `stream` and `rehearse` differ only in where units come from and where rows go.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spile.core.config import Recipe
from spile.corpus.pack import Batch, PackedUnit
from spile.corpus.tokenize import use_threads
from spile.models.forward.ops import gpu_capability
from spile.models.layout import Cuts
from spile.plan.chips import chip_of
from spile.plan.estimate import Estimate, estimate, planned_cuts, row_quantum
from spile.plan.job import ExtractionJob
from spile.plan.residency import Machine
from spile.plan.resolve import resolve, store_table
from spile.run.pipeline.pickers import Picker
from spile.run.pipeline.sink import Taker
from spile.run.pipeline.worker import Worker
from spile.run.step.load import StepLoader
from spile.run.step.step import Step
from spile.run.world.devices import devices_here, memory_limit
from spile.run.world.world import RunContext

_log = logging.getLogger("spile.run")


@dataclass(frozen=True)
class Assembly:
    """The parts of one process's run."""

    context: RunContext
    job: ExtractionJob
    device: Any
    cuts: Cuts
    cost: Estimate

    @classmethod
    def of(cls, context: RunContext, recipe: Recipe, device: Any) -> "Assembly":
        """Resolve a recipe against the store and plan its work; nothing is written."""
        runtime, world, ledger = context.runtime, context.world, context.ledger
        use_threads(runtime.threads)
        _, devices, _ = devices_here()
        job = resolve(
            recipe, ledger, device.platform, capability=gpu_capability(), cache=runtime.cache
        )
        memory = memory_limit(device)
        cuts = planned_cuts(job, runtime, device.platform, devices, memory, world.processes)
        if devices > 1:
            _log.info("%d devices (%s), mesh %s", devices, device.device_kind, cuts.layout)
        chip = chip_of(device.device_kind)
        cost = estimate(
            job,
            runtime,
            Machine(device.platform, memory, chip, world.processes, cuts),
            done=ledger.done_units(),
            free_bytes=ledger.objects.free_bytes(),
            out=ledger.objects,
        )
        return cls(context, job, device, cuts, cost)

    def stored(self) -> "Assembly":
        """Store the unit table, unless another worker has; return the parts with the stored one."""
        return replace(self, job=store_table(self.job, self.context.ledger))

    @property
    def batches(self) -> Callable[[PackedUnit], Iterator[Batch]]:
        """A function that cuts a packed unit into steps."""
        cost, layout, processes = self.cost, self.cuts.layout, self.context.world.processes
        # A unit's last step may be smaller; on a CPU, compiling a smaller one would take longer.
        on_cpu = self.device.platform == "cpu"
        fewest = cost.batch_rows if on_cpu else max(1, cost.batch_rows // 8)
        if cost.residency.streams:  # a sweep compiles its programs for its own batches
            fewest = min(fewest, cost.residency.batch_rows * layout.groups)
        quantum = row_quantum(layout, processes)
        return partial(
            PackedUnit.batches,
            rows=cost.batch_rows,
            fewest=fewest,
            parts=processes,
            quantum=quantum,
        )

    def load(self) -> Step:
        """Begin to load the model; return the step that runs it."""
        cost = self.cost
        loader = StepLoader(
            self.context, self.job, self.device, self.cuts, cost.residency, cost.recomputes
        )
        return loader.step(self.batches)

    def worker(
        self,
        step: Step,
        picker: Picker,
        *,
        made_by: Mapping[str, Any] | None = None,
        sink: Taker | None = None,
    ) -> Worker:
        """Return a worker that runs the picker's units; see `Worker` for the others."""
        return Worker(
            self.context, self.job, step, self.batches, picker, made_by=made_by, sink=sink
        )
