"""The verbs `evaluate` and `report`: what they write is what the functions give, and what is wrong is said."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertForSequenceClassification, GPT2LMHeadModel

from hf_recurrence import (
    RecurrentGPT2LMHeadModel,
    RecurrentRobertaForQuestionAnswering,
    SRUBertForMaskedLM,
    SRUBertForSequenceClassification,
    cli,
)
from hf_recurrence.data import TokenStore, documents
from hf_recurrence.evaluation import evaluate, evaluate_perplexity, plots, state_gain
from hf_recurrence.evaluation.report import report
from hf_recurrence.publishing.card import render_card
from tests.test_glue import folder as glue_folder  # noqa: F401
from tests.test_question_answering import HOTPOT
from tests.test_readme import make_bert, make_gpt2, make_roberta


TEXT = "It was the best of times, it was the worst of times. " * 40


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A plain and a recurrent GPT-2, masked and classifying models, and books."""
    path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    make_gpt2(path / "gpt2", TEXT)
    make_bert(path / "bert", TEXT)
    model = RecurrentGPT2LMHeadModel.from_pretrained(path / "gpt2", window_size=32)
    for parameter in model.parameters():
        parameter.data *= 4  # a new model hardly tells texts apart
    model.save_pretrained(path / "recurrent")
    SRUBertForMaskedLM.from_pretrained(path / "bert").save_pretrained(path / "masked")
    SRUBertForSequenceClassification.from_pretrained(path / "bert").save_pretrained(path / "classes")
    for source, target in (("gpt2", "recurrent"), ("bert", "masked"), ("bert", "classes")):
        AutoTokenizer.from_pretrained(path / source).save_pretrained(path / target)
    for split, sizes in {"train": (500, 600), "valid": (400,), "test": (1500, 900, 300)}.items():
        (path / "books" / split).mkdir(parents=True)
        for size in sizes:
            (path / "books" / split / f"{size}.txt").write_text(TEXT[:size])
    return path


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_the_record_beside_the_checkpoint_is_what_the_functions_give(place, tmp_path, capsys) -> None:
    command = ("evaluate", place / "recurrent", "--data", place / "books", "--overlap", 0, 8, "--window", 16, 32)
    code, out, err = run(capsys, *command, "--batch-size", 2, "--json")
    assert code == 0, err
    assert "token/s" in err  # the bar
    record = json.loads((place / "recurrent" / "metrics.json").read_text())["evaluate-books-test"]
    printed = json.loads(out)
    assert printed["results"] == record["results"]
    tokenizer = AutoTokenizer.from_pretrained(place / "recurrent")
    store = TokenStore.build(tmp_path / "tokens", documents(place / "books", "test"), tokenizer)
    model = AutoModelForCausalLM.from_pretrained(place / "recurrent").eval()
    found = record["results"]["perplexity"]
    assert list(found) == [f"window {width}, overlap {overlap}" for width in (16, 32) for overlap in (0, 8)]
    for row in found.values():
        expected = evaluate_perplexity(model, store, row["window_size"], row["overlap"], progress=False)
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["words"] == sum(len(TEXT[:size].split()) for size in (1500, 900, 300))
    longest = max(range(3), key=lambda document: store.lengths[document])
    row = torch.from_numpy(store.read(longest, 0, 6000).astype("int64"))[None]
    assert record["results"]["state_gain"]["gain"] == pytest.approx(state_gain(model, row)["gain"], abs=1e-5)
    assert record["data"]["documents"] == 3
    assert len(record["data"]["sha256"]) == 64
    assert record["settings"]["model_type"] == "recurrent_gpt2"
    assert {"command", "commit", "versions", "seeds"} <= set(record)
    assert not list((place / "recurrent").glob("*partial*"))
    assert "perplexity window 32, overlap 8 word_perplexity" in render_card(place / "recurrent", "me/recurrent")
    # the tokens of a store, and the plain model beside it, into another folder
    code, out, err = run(
        capsys,
        "evaluate",
        place / "gpt2",
        "--data",
        tmp_path / "tokens",
        "--window",
        32,
        "--output",
        tmp_path / "plain",
    )
    assert code == 0, err
    assert "word_perplexity" in out
    record = json.loads((tmp_path / "plain" / "metrics.json").read_text())["evaluate-tokens-test"]
    plain = GPT2LMHeadModel.from_pretrained(place / "gpt2").eval()
    expected = evaluate_perplexity(plain, store, 32, progress=False)
    row = record["results"]["perplexity"]["window 32, overlap 0"]
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert "state_gain" not in record["results"]


def test_the_first_words_of_the_first_documents_can_be_chosen(place) -> None:
    settings = {"metrics": ["perplexity"], "windows": [16], "name": "some", "progress": False}
    found = evaluate(place / "gpt2", place / "books", **settings, max_documents=2, max_words=50)
    assert found["data"]["documents"] == 2
    assert found["data"]["words"] == 100


def test_masked_and_classifying_models_have_their_metrics(place, glue_folder, capsys) -> None:  # noqa: F811
    command = ("evaluate", place / "masked", "--data", place / "books", "--max-tokens", 20, "--json")
    code, out, err = run(capsys, *command)
    assert code == 0, err
    assert json.loads(out)["results"]["pseudo_perplexity"]["tokens"] == 20
    command = (
        "evaluate",
        place / "classes",
        "--data",
        glue_folder,
        "--split",
        "validation",
        "--metric",
        "rte",
        "--json",
    )
    code, out, err = run(capsys, *command)
    assert code == 0, err
    found = json.loads(out)["results"]["rte"]
    assert 0 <= found["accuracy"] <= 1
    assert found["count"] > 0


def test_answers_are_scored_and_their_use_of_the_state_told(place, tmp_path, capsys) -> None:
    make_roberta(place / "roberta", TEXT)
    RecurrentRobertaForQuestionAnswering.from_pretrained(place / "roberta", window_size=64).save_pretrained(
        place / "qa"
    )
    AutoTokenizer.from_pretrained(place / "roberta").save_pretrained(place / "qa")
    (tmp_path / "hotpot.json").write_text(json.dumps([HOTPOT, {**HOTPOT, "_id": "two", "answer": "no"}]))
    command = ("evaluate", place / "qa", "--data", tmp_path / "hotpot.json", "--output", tmp_path / "out", "--json")
    code, out, err = run(capsys, *command)
    assert code == 0, err
    found = json.loads(out)["results"]
    assert found["answers"]["count"] == 2
    assert set(found["answers"]["by_class"]) == {"span", "no"}
    assert found["answer_state_gain"]["examples"] == 2
    assert run(capsys, "report", tmp_path / "out", "--output", tmp_path / "report")[0] == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "What the state gives to answers" in text
    assert "Answers on hotpot.json" in text


def test_topics_are_compared_with_a_baseline(place) -> None:
    settings = {"metrics": ["topics"], "baseline": place / "gpt2", "max_contexts": 3, "progress": False}
    found = evaluate(place / "recurrent", place / "books", **settings, name="topics")
    assert found["results"]["topics"]["contexts"] == 3
    assert found["results"]["topics"]["context_length"] == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "empty"}, "`tokens` must hold at least one document"),
        ({"data": "short"}, "`tokens` must be documents of at least 2 tokens.* got 1 in document 0"),
        ({"data": "/no/such/data"}, "`source` must be a file, a folder"),
        ({"tokenizer": "bert"}, "`tokens` must be ids below|`tokenizer` must have at most"),
        ({"tokenizer": "books"}, "`tokenizer` must be a folder or Hub id with a tokenizer"),
        ({"overlaps": [0, 32]}, r"`overlap` must be smaller than `window_size` \(32\), got 32"),
        ({"windows": [2000]}, "`window_size` must be at most `n_positions`"),
        ({"metrics": ["perplexty"]}, "`metrics` must be of perplexity, .* got 'perplexty'"),
        ({"metrics": ["rte"]}, "`metrics` must fit the checkpoint, a RecurrentGPT2LMHeadModel, got 'rte'"),
        ({"metrics": ["topics"]}, "`baseline` must be a checkpoint"),
        ({"checkpoint": "gpt2", "metrics": ["state_gain"]}, "hands no state from window to window"),
        ({"checkpoint": "classes"}, "`metrics` must be given for a checkpoint of SRUBertForSequenceClassification"),
        ({"checkpoint": "broken"}, "of the checkpoint must be finite"),
        ({"dtype": "int8"}, "`dtype` must be float32"),
    ],
)
def test_what_cannot_be_evaluated_is_said(place, changes, message) -> None:
    (place / "short").mkdir(exist_ok=True)
    (place / "short" / "one.txt").write_text("t")
    (place / "empty").mkdir(exist_ok=True)
    (place / "empty" / "rows.jsonl").write_text("")
    if not (place / "broken").exists():
        model = GPT2LMHeadModel.from_pretrained(place / "gpt2")
        model.transformer.ln_f.weight.data[3] = math.nan
        model.save_pretrained(place / "broken")
        AutoTokenizer.from_pretrained(place / "gpt2").save_pretrained(place / "broken")
    bert = AutoTokenizer.from_pretrained(place / "bert")
    bert.add_tokens([f"word{number}" for number in range(400)])
    bert.save_pretrained(place / "large")
    changes = {**changes, **({"tokenizer": place / "large"} if changes.get("tokenizer") == "bert" else {})}
    for name in ("checkpoint", "data", "tokenizer"):
        if isinstance(changes.get(name), str):
            changes[name] = place / changes[name]
    settings = {"checkpoint": place / "recurrent", "data": place / "books", "progress": False, **changes}
    with pytest.raises(ValueError, match=message):
        evaluate(**settings)


def test_a_model_of_another_number_of_classes_is_refused(place, glue_folder) -> None:  # noqa: F811
    three = BertForSequenceClassification.from_pretrained(place / "bert", num_labels=3)
    three.save_pretrained(place / "three")
    AutoTokenizer.from_pretrained(place / "bert").save_pretrained(place / "three")
    with pytest.raises(ValueError, match="`model` must have 2 outputs for the task 'rte', got 3"):
        evaluate(place / "three", glue_folder, "validation", ["rte"], progress=False)


def perplexity_row(kind: str, window: int, overlap: int, words: float) -> dict:
    return {
        "model_type": kind,
        "window_size": window,
        "overlap": overlap,
        "word_perplexity": words,
        "bits_per_token": math.log2(words) * 0.7,
        "flops_per_token": 1.7e8 * (1 + window / 3000) * window / (window - overlap),
    }


def by_window(rows: list[dict]) -> dict[str, dict]:
    return {f"window {row['window_size']}, overlap {row['overlap']}": row for row in rows}


def write_run(folder: Path, records: dict[str, dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(records))
    return folder


def make_runs(folder: Path) -> list[Path]:
    """The numbers of the paper's Table 2 and Figure 4, about, and made-up ones of the other models."""
    runs = []
    for name, kind, base in (("gpt2", "gpt2", 172.0), ("recurrent", "recurrent_gpt2", 155.0)):
        rows = [perplexity_row(kind, 300, overlap, base - 3 * overlap**0.5) for overlap in (0, 5, 10, 30, 50)]
        rows += [perplexity_row(kind, window, 0, base * (300 / window) ** 0.1) for window in (200, 400, 500, 600)]
        gain = {"gain": 0.05, "loss_with_state": 3.0, "loss_without_state": 3.05, "first_position": 0}
        gain |= {"gain_by_position": [0.3 / (1 + n) for n in range(300)], "gain_by_distance": [0.05, 0.01, 0.002]}
        results = {"perplexity": by_window(rows)} | ({"state_gain": gain} if kind != "gpt2" else {})
        records = {"evaluate-pg19-validation": {"data": {"name": "pg19", "split": "validation"}, "results": results}}
        test = [{**row, "word_perplexity": row["word_perplexity"] * 0.86} for row in rows]
        records["evaluate-pg19-test"] = {
            "data": {"name": "pg19", "split": "test"},
            "results": {"perplexity": by_window(test)},
        }
        runs.append(write_run(folder / name, records))
    for name, words, speed in (("slide", 34.8, 1.0), ("rec-fixed-skip", 32.3, 1.01)):
        rows = [perplexity_row("block_recurrent", 512, 0, words)]
        records = {
            "train": {"settings": {"learning_rate": 1e-2}, "results": {"seconds": 100 / speed, "steps": 100}},
            "evaluate": {"data": {"name": "books", "split": "test"}, "results": {"perplexity": by_window(rows)}},
        }
        runs.append(write_run(folder / name, records))
    for kind, score in (("bert", 0.6), ("sru_bert", 0.65)):
        for rate in (1e-5, 3e-5, 1e-4):
            for seed in range(3):
                settings = {"model_type": kind, "learning_rate": rate}
                results = {"rte": {"accuracy": score + 0.01 * seed - (0.1 if rate == 1e-4 and kind == "bert" else 0)}}
                record = {"settings": settings, "data": {"name": "glue", "split": "dev"}, "results": results}
                runs.append(write_run(folder / f"{kind}-{rate}-{seed}", {"evaluate": record}))
    for name, f1 in (("disjoint", 48.17), ("recurrent-roberta", 49.12)):
        scores = {
            "f1": f1,
            "exact_match": f1 - 4.6,
            "count": 7405,
            "by_class": {"span": {"f1": f1, "exact_match": 40.0}},
        }
        record = {"data": {"name": "hotpotqa", "split": "dev"}, "results": {"answers": scores}}
        runs.append(write_run(folder / name, {"evaluate": record}))
    sample = {"context": "a | b\nc", "token": " d", "topic": 1, "recurrent": "e", "baseline": "f"}
    topics = {"divergence": {"recurrent": 0.53, "baseline": 0.6}, "share": 0.6, "p_value": 1e-6, "contexts": 8000}
    results = {"topics": {**topics, "samples": [sample]}, "pseudo_perplexity": {"pseudo_perplexity": 9.1, "tokens": 5}}
    runs.append(write_run(folder / "others", {"evaluate": {"data": {"name": "x"}, "results": results}}))
    return runs


def test_a_report_has_the_papers_tables_and_figures(tmp_path, capsys) -> None:
    runs = make_runs(tmp_path / "runs")
    code, out, err = run(capsys, "report", *runs, "--output", tmp_path / "report")
    assert code == 0, err
    files = [Path(line) for line in out.splitlines()]
    names = {path.name for path in files}
    plots_made = {path.stem for path in files if path.suffix == ".png"}
    assert plots_made == {path.stem for path in files if path.suffix == ".svg"}
    assert plots_made == {
        "perplexity_by_window_pg19_validation",
        "perplexity_by_window_pg19_test",
        "perplexity_by_flops_pg19_validation",
        "perplexity_by_flops_pg19_test",
        "perplexity_by_flops_books_test",
        "state_gain_by_position",
        "state_gain_by_distance",
        "block_recurrent",
        "glue_rte",
    }
    assert all(path.stat().st_size > 1000 for path in files if path.suffix in (".png", ".svg"))
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| gpt2 | 300 | 0 | 172.00 | 147.92 |" in text
    assert "1.87e+08" in text
    assert "| recurrent-roberta | 49.12 | 44.52 |" in text
    assert "a \\| b c d | e | f |" in text
    with (tmp_path / "report" / "perplexity_pg19.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18
    assert rows[0]["validation perplexity a word"] == "172.0"
    with (tmp_path / "report" / "glue.csv").open() as file:
        scores = list(csv.DictReader(file))
    assert [float(row["score"]) for row in scores[:1]] == [pytest.approx(0.61)]
    assert float(scores[0]["standard deviation"]) == pytest.approx(0.01)
    with (tmp_path / "report" / "block_recurrent.csv").open() as file:
        assert [round(float(row["relative step time"]), 4) for row in csv.DictReader(file)] == [1.0, 0.9901]
    assert {"answers_hotpotqa.csv", "topics.csv", "samples.csv", "pseudo_perplexity.csv", "state_gain.csv"} <= names


def test_the_frontier_has_what_nothing_cheaper_beats() -> None:
    assert plots.frontier([(3, 9), (1, 10), (2, 11), (4, 9), (5, 8)]) == [(1, 10), (3, 9), (5, 8)]
    assert plots.running_mean([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]


def test_what_is_no_run_is_said(tmp_path, capsys) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "text.json").write_text("so")
    trained = write_run(tmp_path / "trained", {"train": {"results": {}}})
    for words, message in (
        ([tmp_path / "none"], "`runs` must be folders with metrics.json"),
        ([tmp_path / "list.json"], "`runs` must be files of records by name"),
        ([tmp_path / "text.json"], "`runs` must be files of JSON"),
        ([trained], "`runs` must hold something that was evaluated"),
        ([trained, trained / "metrics.json"], "`runs` must be different"),
    ):
        code, _, err = run(capsys, "report", *words, "--output", tmp_path / "report")
        assert code == 1
        assert message in err
    one, two = (write_run(tmp_path / name / "run", {"e": {"results": {}}}) for name in "ab")
    with pytest.raises(ValueError, match="evaluated"):
        report([one, two], tmp_path / "report")
