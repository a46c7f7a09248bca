"""A Ray cluster of several nodes on this machine: started, added to, killed. Run as a program.

Ray runs in a process of its own: in this one it would warn, and warnings are errors here. Commands
come by lines on its standard input, answers go back as JSON: see `Cluster`.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import tiny

_TESTS = Path(__file__).parents[1]


class Cluster:
    """A head without room for slices, and nodes."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._nodes: set[int] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.ray_cluster"],
            cwd=_TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**tiny.environment(), "RAY_health_check_failure_threshold": "2",
                 "RAY_health_check_period_ms": "500", "RAY_health_check_initial_delay_ms": "1000",
                 "RAY_DEDUP_LOGS": "0", "RAY_enable_metrics_collection": "0",
                 **(environment or {})},
        )  # fmt: skip
        self.address: str = self._ask("head")["address"]

    def add(self, **options: Any) -> int:
        """Add a node; return its number."""
        node = self._ask("add", **options)["node"]
        self._nodes.add(node)
        return node

    def kill(self, node: int) -> None:
        """Kill a node's raylet, and with it everything that runs there."""
        self._ask("kill", node=node)
        self._nodes.discard(node)

    def kill_all(self) -> None:
        for node in [*self._nodes]:
            self.kill(node)

    def close(self) -> None:
        try:
            self._ask("close")
        finally:
            self.process.terminate()
            self.process.communicate(timeout=30)

    def _ask(self, what: str, **given: Any) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"what": what, **given}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):  # Ray prints, too
                answer = json.loads(line)
                assert "error" not in answer, answer
                return answer
        raise AssertionError(f"the cluster ended ({self.process.wait()})")


def _serve() -> None:
    from ray import cluster_utils  # noqa: PLC0415 - slow, and only the program needs it

    cluster = cluster_utils.Cluster()
    nodes: list[Any] = []
    for line in sys.stdin:
        command = json.loads(line)
        what, answer = command.pop("what"), {}
        try:
            if what == "head":
                cluster.add_node(num_cpus=0, include_dashboard=False)
                answer = {"address": cluster.address}
            elif what == "add":
                nodes.append(cluster.add_node(**command))
                answer = {"node": len(nodes) - 1}
            elif what == "kill":
                node = nodes[command["node"]]
                for process in node.all_processes["raylet"]:
                    process.process.send_signal(signal.SIGKILL)
            elif what == "close":
                cluster.shutdown()
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
