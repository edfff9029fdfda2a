"""The plots of a report, each as PNG and SVG, in the manner of the paper's Figures 4 and 5."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..data.glue import GLUE_TASKS
from .topics import needed


MARKERS = "osD^vPX*<>"


def draw(folder: Path, name: str, labels: tuple[str, str, str], fill: Callable[[Any], None]) -> list[Path]:
    """The files of a plot with a title and labels of its axes, after `fill` has drawn into it."""
    needed("matplotlib").use("Agg")
    plt = needed("matplotlib.pyplot")
    with plt.rc_context({"svg.hashsalt": "hf_recurrence", "font.size": 11}):
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        fill(axes)
        title, across, up = labels
        axes.set_title(title)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:  # beside the plot, where it hides nothing
            axes.legend(fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
    return paths


def file_name(text: str) -> str:
    """The text with all that may trouble a file name replaced."""
    return re.sub(r"[^A-Za-z0-9]+", "_", text)


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points than which none is as cheap and as good, from the cheapest on: the Pareto frontier.

    >>> frontier([(3, 9), (1, 10), (2, 11), (4, 9)])
    [(1, 10), (3, 9)]
    """
    best: list[tuple[float, float]] = []
    for cost, value in sorted(points):
        if not best or value < best[-1][1]:
            best.append((cost, value))
    return best


def curves(rows: list[dict[str, Any]], across: str) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Points of perplexity a word for each run and overlap, from the smallest window to the largest."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["window_size"]):
        if row[across] is not None and row["word_perplexity"] is not None:
            found.setdefault((row["run"], row["overlap"]), []).append((row[across], row["word_perplexity"]))
    return dict(sorted(found.items()))


def draw_curves(axes: Any, lines: dict[tuple[str, int], list[tuple[float, float]]]) -> None:
    """Draws a line for each run and overlap: runs differ by colour, overlaps by marker."""
    runs, overlaps = sorted({run for run, _ in lines}), sorted({overlap for _, overlap in lines})
    for (run, overlap), points in lines.items():
        color, marker = f"C{runs.index(run) % 10}", MARKERS[overlaps.index(overlap) % len(MARKERS)]
        axes.plot(*zip(*points), color=color, marker=marker, label=f"{run}, overlap {overlap}")


def draw_perplexities(folder: Path, rows: list[dict[str, Any]]) -> list[Path]:
    """Perplexity against window size, and against FLOPs with the frontier, for each data set and split."""
    paths = []
    for data, split in dict.fromkeys((row["data"], row["split"]) for row in rows):
        some = [row for row in rows if (row["data"], row["split"]) == (data, split)]
        windows, costs = curves(some, "window_size"), curves(some, "flops_per_token")
        up, of = "perplexity a word", f"{data}, {split}"
        if any(len(points) > 1 for points in windows.values()):

            def fill_windows(axes: Any, lines: dict[tuple[str, int], Any] = windows) -> None:
                draw_curves(axes, lines)

            labels = (f"Window size and perplexity: {of}", "window size (tokens)", up)
            paths += draw(folder, f"perplexity_by_window_{file_name(data)}_{split}", labels, fill_windows)
        if costs:

            def fill_costs(axes: Any, lines: dict[tuple[str, int], Any] = costs) -> None:
                draw_curves(axes, lines)
                best = frontier(point for points in lines.values() for point in points)
                axes.plot(*zip(*best), "--", color="gray", linewidth=3, alpha=0.5, zorder=0, label="Pareto frontier")

            labels = (f"Cost and perplexity: {of}", "FLOPs a token", up)
            paths += draw(folder, f"perplexity_by_flops_{file_name(data)}_{split}", labels, fill_costs)
    return paths


def draw_gains(folder: Path, gains: dict[str, dict[str, Any]]) -> list[Path]:
    """What the state gives, by position in the window and by distance."""

    def by_position(axes: Any) -> None:
        for label, found in gains.items():
            values = found["gain_by_position"]
            width = max(1, len(values) // 30)
            places = range(found["first_position"], found["first_position"] + len(values))
            axes.plot(places, running_mean(values, width), label=f"{label}, means of {width}")
        axes.axhline(0, color="gray", linewidth=1)

    def by_distance(axes: Any) -> None:
        for number, (label, found) in enumerate(gains.items()):
            values = found["gain_by_distance"]
            axes.plot(range(1, len(values) + 1), values, marker=MARKERS[number % len(MARKERS)], label=label)
        axes.axhline(0, color="gray", linewidth=1)
        axes.xaxis.get_major_locator().set_params(integer=True)

    up = "loss without the state - with it (nats a token)"
    first = ("What the state gives, by position", "position in the window (tokens)", up)
    second = ("What lies so far back and further gives", "distance (windows)", up)
    return draw(folder, "state_gain_by_position", first, by_position) + draw(
        folder, "state_gain_by_distance", second, by_distance
    )


def running_mean(values: list[float], width: int) -> list[float]:
    """The means of `width` values around each, fewer at the ends."""
    return [
        sum(values[max(0, n - width // 2) : n - width // 2 + width])
        / len(values[max(0, n - width // 2) : n - width // 2 + width])
        for n in range(len(values))
    ]


def draw_blocks(folder: Path, points: list[dict[str, Any]]) -> list[Path]:
    """Bits a token against relative step time of block-recurrent models."""

    def fill(axes: Any) -> None:
        for number, point in enumerate(points):
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(point["time"], point["bits"], marker, markersize=9, label=f"{point['run']}, {point['data']}")

    labels = ("Block-recurrent models", "time of a training step (that of the first = 1)", "bits a token")
    return draw(folder, "block_recurrent", labels, fill)


def draw_scores(folder: Path, scores: list[dict[str, Any]]) -> list[Path]:
    """The score of each GLUE task against the learning rate, with the spread over runs."""
    paths = []
    for task in dict.fromkeys(point["task"] for point in scores):
        of_task = [point for point in scores if point["task"] == task and point["learning_rate"]]
        if not of_task:
            continue

        def fill(axes: Any, points: list[dict[str, Any]] = of_task) -> None:
            for number, kind in enumerate(dict.fromkeys(point["model"] for point in points)):
                some = [point for point in points if point["model"] == kind]
                rates, means, spreads = zip(*((p["learning_rate"], p["mean"], p["spread"]) for p in some))
                axes.errorbar(rates, means, spreads, marker=MARKERS[number % len(MARKERS)], capsize=4, label=kind)
            ticks = sorted({point["learning_rate"] for point in points})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{rate:g}" for rate in ticks], minor=False)
            axes.set_xticks([], minor=True)

        metric = GLUE_TASKS[task].metric.replace("_", " ")
        labels = (f"{task}, mean and standard deviation over runs", "learning rate", metric)
        paths += draw(folder, f"glue_{task}", labels, fill)
    return paths


def draw_all(
    folder: Path,
    rows: list[dict[str, Any]],
    gains: dict[str, dict[str, Any]],
    blocks: list[dict[str, Any]],
    scores: list[dict[str, Any]],
) -> list[Path]:
    """The files of all plots that there are numbers for."""
    timed = [point for point in blocks if point["time"] is not None]
    paths = draw_perplexities(folder, rows)
    if gains:
        paths += draw_gains(folder, gains)
    if timed:
        paths += draw_blocks(folder, timed)
    return paths + draw_scores(folder, scores)


__all__ = ["draw_all", "frontier"]
