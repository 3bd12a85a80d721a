"""A line chart with two logarithmic axes as SVG text, without a plotting package."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 360, 70, 48, 36, 150
COLORS = ("#c44e52", "#dd8452", "#4c72b0", "#55a868", "#8172b3", "#937860")


def log_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Draw lines through points, x in powers of 2 and y in powers of 10, each named at its end.

    Args:
        series: points (x, y) by name, all positive; names without points are left out.
    """
    points = [point for line in series.values() for point in line] or [(1, 1)]  # empty axes
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = (edge(math.log10(end(y for _, y in points))) for edge, end in ((math.floor, min), (math.ceil, max)))

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(x / x_low) / max(math.log(x_high / x_low), 1e-9)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(y) - y_low) / max(y_high - y_low, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" style="font: 12px sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{(WIDTH - RIGHT + LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>',
    ]
    for power in range(y_low, y_high + 1):
        y = down(10.0**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for x in sorted({x for x, _ in points}):
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    for (name, line), color in zip(series.items(), COLORS * len(series), strict=False):
        if not line:
            continue
        places = [(across(x), down(y)) for x, y in sorted(line)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        x, y = places[-1]
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
