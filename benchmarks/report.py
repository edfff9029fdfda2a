"""Writes the table of results into the README: `python -m benchmarks.report`."""

import json
from pathlib import Path

from benchmarks.common import RESULTS
from hf_recurrence.data import glue_task


README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- results: written by python -m benchmarks.report -->", "<!-- end of results -->"


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def table() -> str:
    """The rows, from the files that the runs wrote."""
    memory, times, generation = load("training_memory"), load("training_time"), load("generation")
    cases = memory["cases"]
    rows = [
        ("peak memory of a training step, 60 windows over 5", f"{memory['summary']['peak_60_over_peak_5']:.4f}"),
        ("the same, a further window", f"{memory['summary']['mb_a_window']['two_pass_5_to_60']:.3f} MB"),
        (
            "peak memory at 20 windows of 300: window checkpointing, plain backpropagation, full attention",
            ", ".join(f"{cases[case]['20']['peak_mb']:.0f} MB" for case in cases),
        ),
    ]
    for shape, values in times.items():
        base = next(iter(values))
        for name, value in values.items():
            if name != base and "plain" not in name:
                rows.append((f"time of a training step over {base}, {shape}: {name}", f"{value['ratio']:.2f}"))
    rows += [
        (
            "tokens a second over plain GPT-2's inside its context",
            f"{generation['recurrent_over_plain_tokens_per_second']:.2f}",
        ),
        ("time a token at 20,000 over that at 500", f"{generation['time_at_20000_over_time_at_500']:.2f}"),
    ]
    block = load("block_recurrent")
    for name, value in block["training"].items():
        if value["ratio"] != 1:
            least = f", FLOPs alone {value['flops_ratio']:.2f}" if "flops_ratio" in value else ""
            rows.append(
                (
                    f"time of a training step over block-recurrent's Slide, 7 layers, 256 wide: {name}{least}",
                    f"{value['ratio']:.2f}",
                )
            )
    after = block["generation"]["after_a_prompt_of_512"]
    rows += [
        (f"block-recurrent's tokens a second after a prompt of 512 over those of {name}", f"{value['ratio']:.2f}")
        for name, value in after.items()
        if name != "ours"
    ]
    lengths = block["length_times"]
    rows.append(
        (
            f"block-recurrent's time a token of a training step at {' / '.join(lengths)} tokens",
            " / ".join(f"{value['ratio_a_token']:.2f}" for value in lengths.values()),
        )
    )
    rows.append(
        (
            "block-recurrent's peak memory of such a step",
            " / ".join(f"{value['peak_mb']:.0f}" for value in block["length_memory"].values()) + " MB",
        )
    )
    copied = load("copy_distance")
    for distance, value in copied.items():
        last = [curve[-1] for curve in value["accuracy_of_every_100_steps"].values()]
        share = ", ".join(f"{accuracy:.0%}" for accuracy in last)
        rows.append((f"copy task over {distance} windows of 8, answers right after 1500 steps, a seed each", share))
    rows += encoder_rows() + sru_bert_rows() + quality_rows() + evaluation_rows() + pipeline_rows()
    return "\n".join(["| what | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)])


def pipeline_rows() -> list[tuple[str, str]]:
    """The rows of training and tokenising, of what has been measured."""
    rows = []
    if (RESULTS / "pipeline.json").exists():
        share = load("pipeline")["pipeline_over_bare_tokens_per_second"]
        rows.append(
            ("training with lanes, Trainer and CarryState: tokens a second over the bare step's", f"{share:.3f}")
        )
    if (RESULTS / "tokenising.json").exists():
        sizes = load("tokenising")["sizes"]
        for part, name in (("build", "tokenising"), ("lanes", "reading lanes of")):
            values = " / ".join(f"{size[part]['peak_anonymous_mb']:.0f} MB" for size in sizes)
            texts = " / ".join(f"{size['megabytes']:.0f}" for size in sizes)
            rows.append((f"peak memory of {name} {texts} MB of text, mapped files left out", values))
    return rows


def encoder_rows() -> list[tuple[str, str]]:
    """The rows of RecurrentRoberta, of what has been measured."""
    rows = []
    if (RESULTS / "recurrent_roberta.json").exists():
        found = load("recurrent_roberta")
        growth = found["mb_a_window"]["window_checkpointing_5_to_60"]
        rows += [
            (
                "RecurrentRoberta: peak memory of a training step, 60 windows over 5",
                f"{found['peak_60_over_peak_5']:.4f}",
            ),
            ("the same, a further window", f"{growth:.3f} MB"),
        ]
        beyond = found["answer_mb_beyond_tokenising"]
        rows.append(
            (
                f"RecurrentRoberta's answer over {' / '.join(beyond)} pages: peak memory beyond tokenising them",
                " / ".join(f"{value:.1f}" for value in beyond.values()) + " MB",
            )
        )
        for name, value in found["task"].items():
            last = ", ".join(f"{curve[-1]:.0%}" for curve in value["accuracy_of_every_100_steps"].values())
            rows.append((f"a fact of an earlier window asked for ({name}), answers right, a seed each", last))
    if (RESULTS / "hotpotqa.json").exists():
        for arm, scores in load("hotpotqa")["summary"].items():
            f1, exact = (f"{scores[name]['mean']:.1f} ± {scores[name]['standard_deviation']:.1f}" for name in scores)
            what = "recurrent less disjoint, by seed" if arm == "difference" else arm
            rows.append((f"a part of HotpotQA, MiniLM as a RoBERTa, {what}: F1, exact match", f"{f1}, {exact}"))
    return rows


def evaluation_rows() -> list[tuple[str, str]]:
    """The rows of evaluation, of what has been measured."""
    if not (RESULTS / "evaluation.json").exists():
        return []
    rows = []
    for name, found in load("evaluation").items():
        ratio = found["evaluation_over_bare_tokens_per_second"]
        rows.append((f"evaluation, {name} GPT-2: tokens a second over those of a bare loop", f"{ratio:.2f}"))
        times, windows = found["time_over_that_without_overlap"], found["windows_over_those_without_overlap"]
        for overlap in list(times)[1:]:
            what = f"the same with an overlap of {overlap} of 300: time, and windows, over those without"
            rows.append((what, f"{times[overlap]:.2f}, {windows[overlap]:.2f}"))
    return rows


def sru_bert_rows() -> list[tuple[str, str]]:
    """The rows of SRUBert's time and memory, of what has been measured."""
    if not (RESULTS / "sru_bert.json").exists():
        return []
    found, rows = load("sru_bert"), []
    settings = {
        "as it comes": "two threads",
        "memory kept": "two threads, an allocator that keeps its memory",
        "memory kept, one thread": "one thread, an allocator that keeps its memory",
    }
    for setting, shapes in found["scan"].items():
        loops = ", ".join(f"{value['loop_over_scan']:.2f}" for value in shapes.values())
        shares = ", ".join(f"{value['scan_over_feed_forward']:.3f}" for value in shapes.values())
        names = " ".join(f"({shape[1:-1]})" for shape in shapes)
        rows += [
            (f"SRUBert's scan, forward and backward, at {names}, {settings[setting]}: times as fast as a loop", loops),
            ("the same, its time over that of a feed-forward network of equal parameters", shares),
        ]
    for setting, values in found["peer"].items() if isinstance(found["peer"], dict) else []:
        times = ", ".join(f"{value['peer_over_ours']:.1f} ({name})" for name, value in values.items())
        rows.append((f"SRU of 1024 features at length 512, {settings[setting]}: times as fast as PyPI's sru", times))
    for name, value in found["layer"].items():
        if name != "BERT":
            rows.append(
                (f"time of a layer over that of BERT's, 768 wide, length 512: {name}", f"{value['ratio']:.2f}")
            )
    for part, values in found["model"].items():
        note = ", of which BERT's makes logits of all tokens" if "loss" in part else ""
        for name, value in values.items():
            if name != "BERT":
                what = f"time of the base-size model over BERT's, {part}{note}: {name}"
                rows.append((what, f"{value['ratio']:.2f}"))
    for kind, lengths in found["memory"].items():
        needed = [f"{value['peak_mb'] - value['before_mb']:.0f}" for value in lengths.values()]
        what = f"memory of a {kind} of 1024 features, forward and backward, at {' / '.join(lengths)} tokens"
        rows.append((what, f"{' / '.join(needed)} MB"))
    return rows


def quality_rows() -> list[tuple[str, str]]:
    """The rows of SRUBert's quality beside BERT's, of the runs that have ended."""
    if not (RESULTS / "sru_bert_quality.json").exists():
        return []
    record = json.loads((RESULTS / "sru_bert_quality.json").read_text())
    found, shape = record["results"]["summary"], record["settings"]["shape"]
    names = {"bert": "BERT", "sru_bert": "SRUBert"}

    def both(values: dict[str, dict], digits: int) -> str:
        texts = []
        for kind, value in values.items():
            spread = "" if value["deviation"] is None else f" ± {value['deviation']:.{digits}f}"
            texts.append(f"{names[kind]} {value['mean']:.{digits}f}{spread}")
        return ", ".join(texts)

    losses = found["masked_lm_loss"]
    seeds = min(value["runs"] for value in losses.values())
    size = f"{shape['num_hidden_layers']} layers, {shape['hidden_size']} wide"
    rows = [
        (f"masked-LM loss on other books, {size}, from scratch, {seeds} seeds: mean ± deviation", both(losses, 3)),
    ]
    overall = found["glue_over_all_rates"]
    for task in found["glue"]:
        values = {kind: overall[kind][task] for kind in overall}
        runs, metric = values["bert"]["runs"], glue_task(task).metric.replace("_", " ")
        rows.append((f"the same fine-tuned on {task}, {metric} of {runs} runs at 4 learning rates", both(values, 3)))
    for key, what in (("glue_over_all_rates", "of all runs"), ("glue_at_best_rate", "at each task's best rate")):
        means = ", ".join(f"{names[kind]} {value['mean_of_tasks']:.3f}" for kind, value in found[key].items())
        rows.append((f"mean of the five tasks, {what}", means))
    return rows


def with_table(text: str) -> str:
    """The README's text with the table as it is now."""
    before, rest = text.split(START)
    return f"{before}{START}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
