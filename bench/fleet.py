"""A fleet of preemptible workers, in simulated time: `python bench/fleet.py --workers 1000`.

The ledger, the picker, the heartbeats and the bucket's client are the shipped ones. Steps take
random times. The bucket has random latencies, throttles 1% of the requests and loses 0.1% of the
answers. Workers are preempted every two hours on average (`tests/simulator/preemptible.py`).

    ideal           the time in which the live workers could have computed every unit exactly once
    duplicated      share of the computed seconds spent on units that another worker committed
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from simulator.preemptible import Fleet, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--units", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=1, help="number of runs")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--shares", action="store_true", help="each worker has a share")
    arguments = parser.parse_args()
    fleet = Fleet(workers=arguments.workers, units=arguments.units, shares=arguments.shares)
    met = True
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        report = simulate(fleet, seed, lambda line: print(f"  {line}", file=sys.stderr, flush=True))
        print(report, flush=True)
        met = met and report.within_target
    sys.exit(not met)


if __name__ == "__main__":
    main()
