# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""The command line, `hf-recurrence VERB ...`: parsing only; the work of a verb is a function of the package.

Exit codes: 0 done, 1 failed or interrupted, 2 wrong usage.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """What a verb says of itself, takes, does and shows; the packages that it works with are imported when it runs."""

    help: str
    example: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], dict[str, Any]]
    show: Callable[[dict[str, Any]], str]


def read_file(path: str) -> str:
    """The text of a file, or of the standard input for "-"."""
    if path == "-":
        return sys.stdin.read()
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{path}` must be a text in UTF-8, but has {error.reason} at byte {error.start}.") from error


def positive(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {value!r}")
    return int(value)


# train


def train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, such as those in configs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="in place of the recipe's; null takes one out"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last whole checkpoint of output_dir")
    parser.add_argument(
        "--dry-run", action="store_true", help="check all, tokenise the data, and tell what would be done"
    )


def train_run(arguments: argparse.Namespace) -> dict[str, Any]:
    from .training import train

    if int(os.environ.get("RANK", "0")):  # of several processes the first one speaks
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return train(arguments.recipe, arguments.overrides, arguments.resume, arguments.dry_run)


def train_show(result: dict[str, Any]) -> str:
    if result["status"] == "dry run":
        return "Dry run: nothing was trained."
    lines = [f"{name}: {value:.6g}" for name, value in result["results"].items() if value is not None]
    return "\n".join([*lines, f"in {result['output_dir']}"])


# read


def read_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder or Hub id of a RecurrentGPT2 or BlockRecurrent model")
    parser.add_argument("text", help="the file to read, - for the standard input")
    parser.add_argument("--state", required=True, metavar="FILE", help="where to store what has been read")
    parser.add_argument("--start", metavar="FILE", help="such a file to go on from")


def read_run(arguments: argparse.Namespace) -> dict[str, Any]:
    from .reading import read_text

    return read_text(arguments.checkpoint, read_file(arguments.text), arguments.state, arguments.start)


def read_show(result: dict[str, Any]) -> str:
    return f"{result['tokens']:,} tokens read; {result['bytes']:,} bytes in {result['state']}"


# generate


def generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder or Hub id of a RecurrentGPT2 or BlockRecurrent model")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument(
        "--prompt-file", metavar="FILE", help="the same from a file of any length, - for standard input"
    )
    parser.add_argument("--state", metavar="FILE", help="what `read` stored: the prompt goes on from there")
    parser.add_argument("--save-state", metavar="FILE", help="where to store what is known at the end")
    parser.add_argument("--max-new-tokens", type=positive, default=100, metavar="N", help="at most so many (100)")
    parser.add_argument("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    parser.add_argument("--temperature", type=float, metavar="X", help="of --sample (1.0)")
    parser.add_argument(
        "--top-p", type=float, metavar="X", help="of --sample: draw from the likeliest of this mass (1.0)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of --sample (0)")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")


def generate_run(arguments: argparse.Namespace) -> dict[str, Any]:
    from .reading import continue_text

    given = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not arguments.sample:
        raise ValueError(f"`--{next(iter(given)).replace('_', '-')}` needs `--sample`.")
    prompt = arguments.prompt if arguments.prompt is not None else read_file(arguments.prompt_file)
    result = continue_text(
        arguments.checkpoint,
        prompt,
        state=arguments.state,
        save_state=arguments.save_state,
        stream=arguments.stream and not arguments.json,
        seed=arguments.seed,
        max_new_tokens=arguments.max_new_tokens,
        do_sample=arguments.sample,
        **given,
    )
    return result | {"streamed": arguments.stream}


def generate_show(result: dict[str, Any]) -> str:
    return "" if result["streamed"] else result["text"]


# answer


def answer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder or Hub id of a RecurrentRoberta model for question answering")
    parser.add_argument("document", help="the file to ask, - for the standard input")
    parser.add_argument("question")
    parser.add_argument("--max-answer-length", type=positive, default=30, metavar="N", help="tokens of a span (30)")


def answer_run(arguments: argparse.Namespace) -> dict[str, Any]:
    from .reading import answer_question

    document = read_file(arguments.document)
    return answer_question(arguments.checkpoint, arguments.question, document, arguments.max_answer_length)


def answer_show(result: dict[str, Any]) -> str:
    place = "" if result["start"] is None else f", characters {result['start']} to {result['end']}"
    return f"{result['answer']}\n({result['answer_class']}, probability {result['score']:.3f}{place})"


# evaluate


def evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder or Hub id of one of our models, or of a plain one")
    parser.add_argument(
        "--data", required=True, help="documents or their tokens, a file of questions, or GLUE's folder"
    )
    parser.add_argument("--split", default="test", help="of the data (test)")
    parser.add_argument(
        "--metric", nargs="+", dest="metrics", metavar="NAME", help="perplexity, state_gain, a task of GLUE, ..."
    )
    parser.add_argument("--overlap", type=int, nargs="+", metavar="O", help="tokens that windows share; several")
    parser.add_argument("--window", type=int, nargs="+", metavar="T", help="tokens of a window; several")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="rows of a call (8)")
    parser.add_argument("--tokenizer", help="folder, Hub id or bytes, where it is not the checkpoint's")
    parser.add_argument("--column", default="text", help="of rows of data, that with the text (text)")
    parser.add_argument("--max-documents", type=positive, metavar="N", help="only the first documents")
    parser.add_argument("--max-words", type=positive, metavar="N", help="only the first words of each")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="that are masked, for pseudo_perplexity")
    parser.add_argument("--baseline", metavar="CHECKPOINT", help="to compare topics with")
    parser.add_argument("--max-contexts", type=positive, default=8000, metavar="N", help="for topics (8000)")
    parser.add_argument("--name", help="of the record (evaluate-DATA-SPLIT)")
    parser.add_argument("--output", metavar="FOLDER", help="for metrics.json, instead of the checkpoint")
    parser.add_argument("--device", help="such as cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32, float64, bfloat16 or float16 (float32)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the checkpoint brings along")


def evaluate_run(arguments: argparse.Namespace) -> dict[str, Any]:
    from .evaluation.checkpoint import evaluate

    given = vars(arguments).copy()
    for name in ("verb", "json", "debug", "version"):
        given.pop(name, None)
    return evaluate(windows=given.pop("window"), overlaps=given.pop("overlap"), **given)


def evaluate_show(result: dict[str, Any]) -> str:
    lines = []
    for metric, found in result["results"].items():
        rows = [*found.items()] if metric == "perplexity" else [("", found)]
        for title, row in rows:
            numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
            text = ", ".join(f"{name} {value:,.6g}" for name, value in numbers.items())
            lines.append(f"{metric} {title}".rstrip() + f": {text}")
    return "\n".join([*lines, f"written to {result['file']}" if "file" in result else ""]).rstrip()


# report


def report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders with metrics.json, or such files")
    parser.add_argument("--output", default="report", metavar="FOLDER", help="for tables and plots (report)")


def report_run(arguments: argparse.Namespace) -> dict[str, Any]:
    from .evaluation.report import report

    return report(arguments.runs, arguments.output)


def report_show(result: dict[str, Any]) -> str:
    return "\n".join(result["files"])


# convert


def convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder or Hub id of a GPT-2, RoBERTa or BERT; with --strip of a recurrent one")
    parser.add_argument("out", help="a new folder")
    parser.add_argument("--strip", action="store_true", help="the way back: leave the recurrence out")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=field,
        metavar="FIELD=VALUE",
        help="of the new configuration; repeat",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the new parameters (0)")


def field(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be FIELD=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def convert_run(arguments: argparse.Namespace) -> dict[str, Any]:
    from .publishing import convert

    settings = dict(arguments.set)
    return convert(arguments.source, arguments.out, arguments.strip, arguments.seed, **settings)


def convert_show(result: dict[str, Any]) -> str:
    tokenizer = "with" if result["tokenizer"] else "without"
    new = f"\n{len(result['new'])} new parameters, untrained" if result["new"] else ""
    left = f"\n{len(result['left_out'])} parameters left out" if result["left_out"] else ""
    return f"{result['model']} in {result['out']}, {tokenizer} a tokenizer{new}{left}"


# publish


def publish_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder of a saved model, with its tokenizer and metrics.json")
    parser.add_argument("repo_id", help="NAME or OWNER/NAME on the Hub")
    parser.add_argument("--private", action="store_true", help="only its owner can see it")
    parser.add_argument("--tag", metavar="NAME", help="a name for this version, such as v1")
    parser.add_argument("--dry-run", action="store_true", help="all but the Hub: check, compare, write the card")
    card = parser.add_mutually_exclusive_group()
    card.add_argument("--overwrite-card", action="store_true", help="replace a card that was edited by hand")
    card.add_argument("--keep-card", action="store_true", help="publish a card that was edited by hand as it is")
    parser.add_argument("--license", metavar="NAME", help="of the weights (that of the usual base model)")
    parser.add_argument("--base-model", metavar="ID", help="on the Hub (what the recipe or the training names)")


def publish_run(arguments: argparse.Namespace) -> dict[str, Any]:
    from .publishing import publish

    return publish(
        arguments.checkpoint,
        arguments.repo_id,
        private=arguments.private,
        tag=arguments.tag,
        dry_run=arguments.dry_run,
        card="overwrite" if arguments.overwrite_card else "keep" if arguments.keep_card else "ask",
        license=arguments.license,
        base_model=arguments.base_model,
    )


def publish_show(result: dict[str, Any]) -> str:
    compared = f"as remote code it gives what it gives here ({', '.join(result['compared'])}); card {result['card']}"
    if result["left_out"]:
        compared += f"\nleft out: {', '.join(result['left_out'])}"
    if result["dry_run"]:
        return f"{compared}\nnothing was sent; {len(result['files'])} files would be: {', '.join(result['files'])}"
    tag = f", tagged {result['tag']}" if result["tag"] else ""
    if not (result["uploaded"] or result["deleted"]):
        return f"{compared}\nnothing to upload: {result['url']} holds this checkpoint, commit {result['commit']}{tag}"
    done = f"uploaded {len(result['uploaded'])}, deleted {len(result['deleted'])}"
    return f"{compared}\nfiles {done}: {result['url']}, commit {result['commit']}{tag}"


VERBS = {
    "train": Verb(
        "train a recipe, from a folder of texts to a checkpoint",
        "hf-recurrence train configs/recurrent_gpt2_cpu.yaml data=books output_dir=my-model",
        train_options,
        train_run,
        train_show,
    ),
    "read": Verb(
        "read a text once and store what the model knows of it",
        "hf-recurrence read my-model book.txt --state book.safetensors",
        read_options,
        read_run,
        read_show,
    ),
    "generate": Verb(
        "continue a text of any length, or one that was read before",
        "hf-recurrence generate my-model --state book.safetensors --prompt ' And then' --stream",
        generate_options,
        generate_run,
        generate_show,
    ),
    "answer": Verb(
        "answer a question over a document of any length",
        "hf-recurrence answer my-model book.txt 'Who wrote it?'",
        answer_options,
        answer_run,
        answer_show,
    ),
    "evaluate": Verb(
        "measure a checkpoint on data; metrics.json is written beside it",
        "hf-recurrence evaluate my-model --data books --overlap 0 10 50",
        evaluate_options,
        evaluate_run,
        evaluate_show,
    ),
    "report": Verb(
        "make tables and plots of metrics.json files",
        "hf-recurrence report gpt2-books my-model --output report",
        report_options,
        report_run,
        report_show,
    ),
    "convert": Verb(
        "make a plain GPT-2, RoBERTa or BERT checkpoint recurrent, or with --strip plain again",
        "hf-recurrence convert gpt2 recurrent-gpt2 --set window_size=300 --set overlap=10",
        convert_options,
        convert_run,
        convert_show,
    ),
    "publish": Verb(
        "check a checkpoint, write its card and bring it to the Hub",
        "hf-recurrence publish runs/my-model me/my-model --tag v1 --dry-run",
        publish_options,
        publish_run,
        publish_show,
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(prog="hf-recurrence", description="Recurrence for transformers.")
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, verb in VERBS.items():
        sub = verbs.add_parser(
            name,
            help=verb.help,
            description=f"{verb.help[0].upper()}{verb.help[1:]}.",
            epilog=f"example:\n  {verb.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.options(sub)
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Runs a verb and returns the exit code."""
    parser = build_parser()
    arguments = parser.parse_args(given)
    if arguments.version:
        from . import __version__

        print(__version__)
        return 0
    if arguments.verb is None:
        parser.print_help()
        return 2
    verb = VERBS[arguments.verb]
    try:
        result = verb.run(arguments)
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        print(f"hf-recurrence {arguments.verb}: interrupted", file=sys.stderr)
        return 1
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if arguments.debug:
            raise
        print(f"hf-recurrence {arguments.verb}: {error}", file=sys.stderr)
        return 1
    text = json.dumps(result, indent=2) if arguments.json else verb.show(result)
    if text:
        print(text)
    return 0
