"""What this process asks of buckets and sites: counted for all of them together."""

from spile.metrics.counters import Counters

COUNTED = Counters()  # retries; uploaded, in bytes; uploading and spooled, as they are now
