"""Draw the log of `examples/train_sae.py` as a small SVG: explained variance over steps.

python scripts/draw_curve.py sae/log.jsonl docs/sae-curve.svg
"""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BELOW = 640, 260, 44, 32
TEXT = 'font-family="sans-serif" font-size="12" fill="#555"'


def drawn(points: list[tuple[float, float]], name: str) -> str:
    """Return an SVG of a line in a frame; values range from 0 to 1."""
    last = points[-1][0]

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 12) * x / last
        return across, 10 + (HEIGHT - BELOW - 10) * (1 - min(1, max(0, y)))

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">']
    for y in (0, 0.25, 0.5, 0.75, 1):
        (x1, at), (x2, _) = place(0, y), place(last, y)
        parts.append(f'<path d="M{x1:.0f} {at:.1f}H{x2:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x1 - 6:.0f}" y="{at + 4:.1f}" text-anchor="end" {TEXT}>{y}</text>')
    for x in (0, last / 2, last):
        at, _ = place(x, 0)
        parts.append(
            f'<text x="{at:.0f}" y="{HEIGHT - 12}" text-anchor="middle" {TEXT}>{x:.0f}</text>'
        )
    line = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#2a6f97" stroke-width="2"/>')
    end, height = place(*points[-1])
    parts.append(
        f'<text x="{end - 4:.0f}" y="{height + 18:.1f}" text-anchor="end" {TEXT}>'
        f"{name}, by step: {points[-1][1]:.2f}</text></svg>"
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    found = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    name = "explained variance"
    Path(sys.argv[2]).write_text(drawn([(line["step"], line[name]) for line in found], name))
