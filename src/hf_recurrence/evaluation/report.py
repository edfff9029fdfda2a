"""Tables and plots of what runs have measured, from their metrics.json files and nothing else."""

import csv
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..data.glue import GLUE_TASKS
from . import plots


class Record(NamedTuple):
    """One record of a run, and the learning rate, seeds and seconds a step that any of the run's records tells."""

    run: str
    name: str
    content: dict[str, Any]
    learning_rate: float | None
    step_seconds: float | None

    @property
    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = self.content["results"]
        return found

    @property
    def data(self) -> str:
        return str(self.content.get("data", {}).get("name", ""))

    @property
    def split(self) -> str:
        return str(self.content.get("data", {}).get("split", ""))

    @property
    def model_type(self) -> str:
        return str(self.content.get("settings", {}).get("model_type", ""))


class Table(NamedTuple):
    """A table with a title; its cells are texts and numbers."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[Any]]

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]
        lines += [f"| {' | '.join(shown(cell) for cell in row)} |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def write_csv(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([self.columns, *self.rows])


def shown(cell: Any) -> str:
    """A cell as people read it."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.2e}" if abs(cell) >= 1e6 else f"{cell:.4g}" if abs(cell) < 1 else f"{cell:.2f}"
    return str(cell).replace("|", "\\|").replace("\n", " ")


def find_values(content: Any, name: str) -> Iterator[float]:
    """The numbers under this name, anywhere in a record."""
    if isinstance(content, dict):
        value = content.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield float(value)
        for inner in content.values():
            yield from find_values(inner, name)


def read_runs(runs: Sequence[str | os.PathLike[str]]) -> list[Record]:
    """The records of folders with metrics.json, or of such files; what is not one is refused."""
    records = []
    names = run_names(runs)
    for run, label in zip(runs, names, strict=True):
        path = Path(run)
        path = path / "metrics.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"`runs` must be folders with metrics.json, or such files, got {str(run)!r}.")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"`runs` must be files of JSON, got {str(path)!r}: {error}.") from error
        whole = isinstance(content, dict) and all(
            isinstance(record, dict) and isinstance(record.get("results"), dict) for record in content.values()
        )
        if not whole:
            raise ValueError(f"`runs` must be files of records by name, each with results, got {str(path)!r}.")
        rate = next(find_values(content, "learning_rate"), None)
        step = step_seconds(content)
        records += [Record(label, name, record, rate, step) for name, record in content.items()]
    return records


def step_seconds(records: dict[str, Any]) -> float | None:
    """The seconds of a training step: those of the run over its steps; None without a record of training."""
    for name, record in records.items():
        found = record["results"]
        if name.startswith("train") and found.get("seconds") and found.get("steps"):
            return float(found["seconds"]) / float(found["steps"])
    return None


def run_names(runs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The last parts of the runs' paths, as many as tell them apart."""
    paths = [Path(run).absolute() for run in runs]
    paths = [path.parent if path.suffix == ".json" and path.name == "metrics.json" else path for path in paths]
    if len(set(paths)) < len(paths):
        raise ValueError(f"`runs` must be different, got {', '.join(map(str, runs))}.")
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def perplexity_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """What was measured for each run, data, split, window and overlap."""
    return [
        {"run": record.run, "data": record.data, "split": record.split, **row}
        for record in records
        for row in record.results.get("perplexity", {}).values()
    ]


def perplexity_tables(rows: list[dict[str, Any]]) -> list[Table]:
    """A table for each data set: runs with their windows and overlaps, perplexities a word by split, FLOPs."""
    tables = []
    for data in unique(row["data"] for row in rows):
        of_data = [row for row in rows if row["data"] == data]
        splits = sorted(unique(row["split"] for row in of_data), key=lambda split: (split == "test", split))
        columns = ["model", "window", "overlap", *(f"{split} perplexity a word" for split in splits)]
        columns += [f"{split} bits a token" for split in splits] + ["FLOPs a token"]
        cells = []
        for run, window, overlap in unique((row["run"], row["window_size"], row["overlap"]) for row in of_data):
            key = (run, window, overlap)
            same = [row for row in of_data if (row["run"], row["window_size"], row["overlap"]) == key]
            by_split = {row["split"]: row for row in same}
            line = [by_split.get(split, {}).get("word_perplexity") for split in splits]
            line += [by_split.get(split, {}).get("bits_per_token") for split in splits]
            cells.append([run, window, overlap, *line, same[0]["flops_per_token"]])
        tables.append(Table(f"perplexity_{plots.file_name(data)}", f"Results on {data}", columns, cells))
    return tables


def answer_tables(records: list[Record]) -> list[Table]:
    """A table for each data set of questions: F1 and exact match, of all and of each class of answer."""
    found = [(record, record.results["answers"]) for record in records if "answers" in record.results]
    tables = []
    for data in unique(record.data for record, _ in found):
        of_data = [(record, scores) for record, scores in found if record.data == data]
        classes = unique(kind for _, scores in of_data for kind in scores.get("by_class", {}))
        columns = ["method", "F1", "exact match"]
        columns += [f"{kind}: {score}" for kind in classes for score in ("F1", "exact match")] + ["examples"]
        cells = []
        for record, scores in of_data:
            by_class = [scores.get("by_class", {}).get(kind, {}) for kind in classes]
            more = [values.get(name) for values in by_class for name in ("f1", "exact_match")]
            cells.append([record.run, scores["f1"], scores["exact_match"], *more, scores.get("count")])
        tables.append(Table(f"answers_{plots.file_name(data)}", f"Answers on {data}", columns, cells))
    return tables


def block_points(records: list[Record]) -> list[dict[str, Any]]:
    """Bits a token and seconds a training step of the block-recurrent runs, the latter over the first run's."""
    found = [
        {"run": record.run, "data": f"{record.data} {record.split}", "bits": row["bits_per_token"]}
        | {"word_perplexity": row["word_perplexity"], "flops": row["flops_per_token"], "seconds": record.step_seconds}
        | {"parameters": record.content.get("settings", {}).get("parameters")}
        for record in records
        for row in record.results.get("perplexity", {}).values()
        if row["model_type"] == "block_recurrent"
    ]
    base = next((point["seconds"] for point in found if point["seconds"]), None)
    return [point | {"time": point["seconds"] / base if base and point["seconds"] else None} for point in found]


def score_points(records: list[Record]) -> list[dict[str, Any]]:
    """The ranking score of each GLUE task, mean and spread over the runs of a type of model and learning rate."""
    scores: dict[tuple[str, str, float | None], list[float]] = {}
    for record in records:
        for task in GLUE_TASKS:
            if task in record.results:
                score = record.results[task][GLUE_TASKS[task].metric]
                scores.setdefault((task, record.model_type, record.learning_rate), []).append(float(score))
    return [
        {"task": task, "model": kind, "learning_rate": rate, "mean": statistics.mean(values), "runs": len(values)}
        | {"spread": statistics.stdev(values) if len(values) > 1 else 0.0}
        for (task, kind, rate), values in sorted(scores.items(), key=lambda item: (*item[0][:2], item[0][2] or 0))
    ]


def block_tables(points: list[dict[str, Any]]) -> list[Table]:
    """The table of block-recurrent runs."""
    columns = [
        "model",
        "data",
        "bits a token",
        "perplexity a word",
        "relative step time",
        "FLOPs a token",
        "parameters",
    ]
    keys = ("run", "data", "bits", "word_perplexity", "time", "flops", "parameters")
    cells = [[point[key] for key in keys] for point in points]
    return [Table("block_recurrent", "Block-recurrent models", columns, cells)] if cells else []


def score_tables(points: list[dict[str, Any]]) -> list[Table]:
    """The table of GLUE's scores by learning rate."""
    columns = ["task", "model", "learning rate", "score", "standard deviation", "runs"]
    keys = ("task", "model", "learning_rate", "mean", "spread", "runs")
    cells = [[point[key] for key in keys] for point in points]
    return [Table("glue", "GLUE", columns, cells)] if cells else []


def gain_tables(records: list[Record]) -> list[Table]:
    """The table of gains from the state."""
    columns = ["model", "data", "gain from the state, nats a token", "loss with it", "loss without it"]
    keys = ("gain", "loss_with_state", "loss_without_state")
    found = [(record, record.results["state_gain"]) for record in records if "state_gain" in record.results]
    cells = [[record.run, f"{record.data} {record.split}", *(gain[key] for key in keys)] for record, gain in found]
    tables = [Table("state_gain", "What the state gives", columns, cells)] if cells else []
    columns = [columns[0], columns[1], "gain from the state, nats an example", *columns[3:]]
    answers = [
        (record, record.results["answer_state_gain"]) for record in records if "answer_state_gain" in record.results
    ]
    cells = [[record.run, f"{record.data} {record.split}", *(gain[key] for key in keys)] for record, gain in answers]
    return (
        [*tables, Table("answer_state_gain", "What the state gives to answers", columns, cells)] if cells else tables
    )


def masked_tables(records: list[Record]) -> list[Table]:
    """The table of pseudo-perplexities."""
    columns = ["model", "data", "pseudo-perplexity a token", "tokens masked"]
    found = [
        (record, record.results["pseudo_perplexity"]) for record in records if "pseudo_perplexity" in record.results
    ]
    cells = [[r.run, f"{r.data} {r.split}", row["pseudo_perplexity"], row["tokens"]] for r, row in found]
    return [Table("pseudo_perplexity", "Masked language models", columns, cells)] if cells else []


def topic_tables(records: list[Record]) -> list[Table]:
    """The table of topics, and that of contexts and continuations side by side."""
    columns = ["model", "divergence, bits", "baseline's", "share of contexts that are nearer", "p-value", "contexts"]
    found = [(record, record.results["topics"]) for record in records if "topics" in record.results]
    cells = []
    for record, topics in found:
        means = topics["divergence"]
        p_value = f"{topics['p_value']:.2g}"
        cells.append([record.run, means["recurrent"], means["baseline"], topics["share"], p_value, topics["contexts"]])
    samples = [
        [f"... {sample['context'][-300:]}{sample['token']}", sample["recurrent"], sample["baseline"]]
        for _, topics in found
        for sample in topics["samples"]
    ]
    if not cells:
        return []
    return [
        Table("topics", "Topics of continuations", columns, cells),
        Table("samples", "Continuations", ["context", "recurrent", "baseline"], samples),
    ]


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def report(runs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> dict[str, Any]:
    """The files of a report on what these runs have measured: report.md, a CSV a table, PNG and SVG a plot.

    Args:
        runs: folders with metrics.json, or such files.
        output: the folder for the report.

    ```python
    >>> report(["gpt2-books", "recurrent-books"], "report")["files"]
    ['report/report.md', 'report/perplexity_books.csv', 'report/perplexity_by_window_books_test.png', ...]
    ```"""
    records = read_runs(runs)
    rows, blocks, scores = perplexity_rows(records), block_points(records), score_points(records)
    tables = perplexity_tables(rows) + answer_tables(records) + block_tables(blocks) + score_tables(scores)
    tables += gain_tables(records) + masked_tables(records) + topic_tables(records)
    if not tables:
        raise ValueError(f"`runs` must hold something that was evaluated, got {', '.join(map(str, runs))} without.")
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for table in tables:
        table.write_csv(folder / f"{table.name}.csv")
        files.append(folder / f"{table.name}.csv")
    gains = {f"{r.run}, {r.data} {r.split}": r.results["state_gain"] for r in records if "state_gain" in r.results}
    pictures = plots.draw_all(folder, rows, gains, blocks, scores)
    text = "\n".join(["# Report\n", *(table.markdown() for table in tables)])
    text += "".join(f"\n![{path.stem.replace('_', ' ')}]({path.name})\n" for path in pictures if path.suffix == ".png")
    (folder / "report.md").write_text(text, encoding="utf-8")
    return {"files": [str(path) for path in (folder / "report.md", *files, *pictures)]}


__all__ = ["report"]
