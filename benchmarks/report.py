"""Writes the table of results into the README: `python -m benchmarks.report`."""

import json
from pathlib import Path

from benchmarks.common import RESULTS


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
    rows += encoder_rows()
    return "\n".join(["| what | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)])


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


def with_table(text: str) -> str:
    """The README's text with the table as it is now."""
    before, rest = text.split(START)
    return f"{before}{START}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
