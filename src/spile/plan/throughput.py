"""Rate at which text becomes tokens here, and at which devices read them: `spile plan`. No jax."""

import os
import time
from contextlib import closing
from dataclasses import dataclass

from spile.core.config import Runtime
from spile.models.layout import Cuts
from spile.plan.chips import Chip
from spile.plan.estimate import batch_rows, step_of
from spile.plan.job import ExtractionJob, prepare_documents
from spile.plan.roofline import Roofline


@dataclass(frozen=True)
class Throughput:
    """Rates in tokens per second."""

    text_rate_per_core: float | None  # of reading, tokenizing and packing; measured on a sample
    device_rate: float | None  # upper bound over all devices; None for unknown chips
    cores: int  # of this machine

    @property
    def cores_needed(self) -> float | None:
        """Cores needed so that the devices never wait for text."""
        if not self.text_rate_per_core or not self.device_rate:
            return None
        return self.device_rate / self.text_rate_per_core

    def rows(self) -> list[tuple[str, str]]:
        """Labels and values for display."""
        if not self.text_rate_per_core:
            return []
        shown = [("text to tokens", f"{self.text_rate_per_core:,.0f} tok/s a core")]
        if self.device_rate and self.cores_needed:
            need = f"{self.cores_needed:.1f} cores (of {self.cores} here)"
            shown.append(("  the devices need", f"{need} at {self.device_rate:,.0f} tok/s"))
        return shown


def measure_throughput(
    job: ExtractionJob, runtime: Runtime, platform: str, cuts: Cuts, chip: Chip | None
) -> Throughput:
    """Measure the text rate on the corpus's head, in CPU seconds; compute the devices' rate."""
    with closing(job.reader()) as reader:
        documents, _ = reader.sample(0)
        prepare_documents(job.recipe, job.tokenizer, documents)  # warm up: start threads, compile
        began = time.process_time()
        documents, _ = reader.sample(0)
        packed = prepare_documents(job.recipe, job.tokenizer, documents).packed
        spent = time.process_time() - began
    rate = None
    if chip and job.recipe.compute_dtype == "bfloat16":
        work = step_of(job, batch_rows(job, runtime, platform, None, cuts), platform, cuts)
        rate = work.tokens / Roofline.of(work, 0.0, chip).seconds
    measured = packed.num_tokens / spent if packed.num_tokens and spent else None
    return Throughput(measured, rate, os.cpu_count() or 1)
