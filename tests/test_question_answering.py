"""From examples to windows, labels and batches, through the Trainer, and back to answers and their scores."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_recurrence import RecurrentRobertaForQuestionAnswering, modeling_recurrent_roberta
from hf_recurrence.answering import best_span, question_windows
from hf_recurrence.data import HotpotQAProcessor, QuestionAnsweringCollator, flat_example, read_questions
from hf_recurrence.evaluation import evaluate_answers, predict_answers, question_answering
from hf_recurrence.evaluation.hotpotqa import HotpotQAMetric, answer_f1, answer_scores, scores_by_class
from hf_recurrence.modeling_recurrent_roberta import WindowOutput
from tests.common import roberta_model, tiny_model, train_tokenizer


HOTPOT: dict[str, Any] = {
    "_id": "one",
    "question": "Which river is longer?",
    "answer": "Nile",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": [["Nile", 1]],
    "context": [
        ["Senile", ["Nilex is no river.", " Nile is a name."]],
        ["Nile", ["It is a river, the Nile.", " The Nile is the longest."]],
    ],
}
SQUAD: dict[str, Any] = {
    "id": "two",
    "question": "Where is it?",
    "context": "It is here. Or is it here?",
    "answers": {"text": ["here"], "answer_start": [21]},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    texts = [HOTPOT["question"], SQUAD["context"], *(text for _, pieces in HOTPOT["context"] for text in pieces)]
    return train_tokenizer(texts, vocab_size=300)


def perfect(feature: dict, width: int) -> tuple[torch.Tensor, ...]:
    """The scores of a model that knows the labels."""
    shape = (len(feature["input_ids"]), width)
    starts, ends, classes = torch.zeros(shape), torch.zeros(shape), torch.zeros(4)
    if feature["start_positions"][0] >= 0:
        starts[tuple(feature["start_positions"])], ends[tuple(feature["end_positions"])] = 9, 9
    classes[feature["answer_classes"]] = 1
    return starts, ends, classes


# -- examples --------------------------------------------------------------------------------------------------------
def test_hotpotqas_json_and_its_form_on_the_hub_are_the_same_example() -> None:
    flat = flat_example(HOTPOT)
    assert flat["context"] == (
        "Senile. Nilex is no river. Nile is a name.\nNile. It is a river, the Nile. The Nile is the longest.\n"
    )
    columns = {"title": ["Senile", "Nile"], "sentences": [pieces for _, pieces in HOTPOT["context"]]}
    facts = {"title": ["Nile"], "sent_id": [1]}
    hub = {**HOTPOT, "id": "one", "context": columns, "supporting_facts": facts}
    assert flat_example(hub) == flat == flat_example(flat)
    assert (flat["answer_class"], flat["answer"]) == ("span", "Nile")


def test_an_answer_is_at_its_annotated_or_first_place_as_whole_words() -> None:
    text = flat_example(HOTPOT)["context"]
    assert flat_example(HOTPOT)["answer_start"] == text.index("\nNile") + 1  # the title of the supporting paragraph
    assert flat_example({**HOTPOT, "supporting_facts": []})["answer_start"] == text.index("Nile is a name")
    assert flat_example({**HOTPOT, "answer": "ile"})["answer_start"] == text.index("ile")
    assert flat_example({**HOTPOT, "answer": "Rhine"})["answer_start"] == -1
    assert flat_example({**HOTPOT, "answer": "yes"})["answer_class"] == "yes"
    assert flat_example(SQUAD)["answer_start"] == 21


@pytest.mark.parametrize("answers", [{"text": [], "answer_start": []}, [], None])
def test_a_question_without_an_answer_is_of_the_class_none(answers: Any, tokenizer) -> None:
    feature = HotpotQAProcessor(tokenizer, 16)({**SQUAD, "answers": answers})
    assert (feature["answer_class"], feature["answer_classes"]) == ("none", 3)
    assert feature["start_positions"] == feature["end_positions"] == [-100, -100]
    assert HotpotQAProcessor(tokenizer, 16).answers([feature], tuple([part] for part in perfect(feature, 16))) == [""]


# -- windows ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("window_size", "overlap"), [(12, 0), (14, 3), (40, 0), (200, 50)])
def test_windows_hold_the_question_and_every_token_of_the_context_once(window_size, overlap, tokenizer) -> None:
    context = flat_example(HOTPOT)["context"]
    windows = question_windows(tokenizer, "Which?", context, window_size, overlap)
    before = [0, *tokenizer("Which?", add_special_tokens=False)["input_ids"], 2, 2]
    tokens = tokenizer(context, add_special_tokens=False)["input_ids"]
    assert all(len(row) <= window_size for row in windows.input_ids)
    assert all(row[: len(before)] == before and row[-1] == 2 for row in windows.input_ids)
    assert [windows.input_ids[n][slot] for n, slot in windows.places] == tokens
    assert sum(map(sum, windows.context_mask)) == len(tokens) == len(windows.offsets)
    assert all(windows.context_mask[n][slot] == 1 for n, slot in windows.places)
    for (row, after), size in zip(zip(windows.input_ids, windows.input_ids[1:]), [overlap] * 99):
        assert row[len(row) - 1 - size : -1] == after[len(before) : len(before) + size]


@pytest.mark.parametrize("window_size", [12, 17, 64])
@pytest.mark.parametrize("overlap", [0, 2])
def test_labels_lead_back_to_the_answer_wherever_windows_are_cut(overlap: int, window_size: int, tokenizer) -> None:
    processor = HotpotQAProcessor(tokenizer, window_size, overlap)
    questions = [
        {**HOTPOT, "question": "Which?", "answer": answer} for answer in ("Nile", "the longest", "no river", "no")
    ]
    features = list(
        Dataset.from_list([flat_example(q) for q in [*questions, {**SQUAD, "question": "Which?"}]]).map(processor)
    )
    scores = tuple(zip(*(perfect(feature, window_size) for feature in features), strict=True))
    answers = processor.answers(features, scores)
    assert answers == ["Nile", "the longest", "no river", "no", "here"]
    spans = [(feature, answer) for feature, answer in zip(features, answers) if feature["answer_class"] == "span"]
    assert all(answer in feature["context"] for feature, answer in spans)


def test_characters_of_several_bytes_and_odd_spaces_come_back_whole(tokenizer) -> None:
    text = "  Søren\u00a0Kierkegaard — 哲学者 🙂 was\tborn in København."
    processor = HotpotQAProcessor(tokenizer, 24)
    for answer in ("Søren\u00a0Kierkegaard", "哲学者", "🙂", "København"):
        example = {**SQUAD, "context": text, "answers": {"text": [answer], "answer_start": [text.index(answer)]}}
        feature = processor(example)
        assert answer in processor.answers([feature], tuple([part] for part in perfect(feature, 24)))[0]


def test_windows_that_cannot_be_made_are_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match=r"`question` must leave more than `overlap` \(0\) tokens of a window of 8"):
        question_windows(tokenizer, "Which of the rivers is the longest?", "It is.", 8)
    with pytest.raises(ValueError, match="`context` must hold at least one token, got ''"):
        question_windows(tokenizer, "Which?", "", 32)

    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="`tokenizer` must be a fast one, which gives the offsets .* got Slow"):
        question_windows(Slow(), "Which?", "It is.", 32)
    processor = HotpotQAProcessor(tokenizer, 32)
    feature = processor(SQUAD)
    scores = tuple([part] for part in perfect(feature, 32))
    del feature["offsets"]
    with pytest.raises(ValueError, match="`features` must have what the processor made .* without {'offsets'}"):
        processor.answers([feature], scores)
    with pytest.raises(ValueError, match=r"windows of at most `window_size` \(8\) tokens, got"):
        QuestionAnsweringCollator(1, 8)([feature])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_in_another_order_than_the_features_are_refused(dtype: torch.dtype, tokenizer) -> None:
    model = roberta_model(dtype, vocab_size=300, max_position_embeddings=34, window_size=32)
    processor = HotpotQAProcessor(tokenizer, 32)
    features = [processor({**HOTPOT, "question": "Which?"}), processor({**SQUAD, "context": SQUAD["context"] * 4})]
    with torch.no_grad():
        model.class_outputs.bias[0] = 50.0
        outputs = model(**processor.collator()(features))
    scores = tuple(part.float() for part in (outputs.start_logits, outputs.end_logits, outputs.class_logits))
    assert len(processor.answers(features, scores)) == 2
    with pytest.raises(ValueError, match="`predictions` must be in the order of `features`, got scores of other"):
        processor.answers(features[::-1], scores)


def test_the_best_span_is_that_of_all_pairs() -> None:
    for length, most in ((1, 5), (7, 1), (9, 3), (9, 30)):
        starts, ends = torch.randn(length), torch.randn(length)
        pairs = [(a, b) for a in range(length) for b in range(a, min(length, a + most))]
        assert best_span(starts, ends, most) == max(pairs, key=lambda pair: starts[pair[0]] + ends[pair[1]])
    with pytest.raises(ValueError, match="`max_answer_length` must be at least 1, got 0"):
        best_span(torch.zeros(2), torch.zeros(2), 0)


def test_a_batch_has_examples_of_any_number_of_windows(tokenizer) -> None:
    model = roberta_model(vocab_size=300, max_position_embeddings=20, window_size=16)
    processor = HotpotQAProcessor(tokenizer, 16)
    features = [
        processor({**HOTPOT, "question": "Which?"}),
        processor(SQUAD),
        processor({**SQUAD, "context": "It is here."}),
    ]
    features[2]["start_positions"] = features[2]["end_positions"] = [-100, -100]
    assert len({len(feature["input_ids"]) for feature in features}) == 3
    loss = model(**processor.collator()(features)).loss
    alone = [model(**processor.collator()([feature])).loss for feature in features]
    torch.testing.assert_close(loss, sum(alone) / 3)


# -- answers ---------------------------------------------------------------------------------------------------------
def test_a_user_gets_answer_class_score_and_place(tokenizer) -> None:
    document = flat_example(HOTPOT)["context"] * 3
    model = roberta_model(
        torch.float32, vocab_size=300, max_position_embeddings=20, window_size=16, num_answer_classes=4
    )
    for kind, expected in enumerate(("span", "yes", "no", "none")):
        with torch.no_grad():
            model.class_outputs.bias.fill_(-50.0)
            model.class_outputs.bias[kind] = 50.0
        found = model.train().answer(tokenizer, "Which?", document, max_answer_length=4)
        assert model.training  # as it was
        assert found["answer_class"] == expected
        assert 0 < found["score"] <= 1
        if expected == "span":
            assert document[found["start"] : found["end"]] == found["answer"] != ""
        else:
            assert found["answer"] == ("" if expected == "none" else expected)
    with pytest.raises(ValueError, match="`question` must leave"):
        model.answer(tokenizer, "Which of the rivers is the longest, is it the Nile?", document)


def test_the_answer_is_that_of_the_processor(tokenizer) -> None:
    model = roberta_model(vocab_size=300, max_position_embeddings=20, window_size=16, overlap=2)
    with torch.no_grad():
        model.class_outputs.bias[0] = 50.0
    processor = HotpotQAProcessor(tokenizer, 16, overlap=2)
    feature = processor({**HOTPOT, "question": "Which?"})
    with torch.no_grad():
        out = model(**processor.collator()([feature]))
    expected = processor.answers([feature], (out.start_logits, out.end_logits, out.class_logits))
    assert model.answer(tokenizer, "Which?", feature["context"])["answer"] == expected[0]


def test_memory_for_an_answer_is_that_of_one_window_and_the_text(tokenizer, monkeypatch) -> None:
    """Of each window only its scores and its first token's vector are kept, beside the ids of the document."""
    model = roberta_model(torch.float32, vocab_size=300, max_position_embeddings=70, window_size=64)
    kept = []

    def noted(tokens: torch.Tensor, first: torch.Tensor, *others: list) -> Any:
        kept.append([part.untyped_storage().nbytes() for part in (tokens, first)])
        assert others == ([], [])
        return WindowOutput(tokens, first, *others)

    monkeypatch.setattr(modeling_recurrent_roberta, "WindowOutput", noted)
    model.answer(tokenizer, "Which?", flat_example(HOTPOT)["context"] * 20)
    with torch.no_grad():
        model(torch.full((1, 9, 64), 7))  # no pads at all
    assert len(kept) > 20
    assert all(tokens <= 64 * 2 * 4 and first == 16 * 4 for tokens, first in kept)


# -- metric ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prediction", "reference", "f1", "exact"),
    [
        ("The Nile", "nile", 1.0, True),  # articles and case
        ("Nile!", "the 'Nile'", 1.0, True),  # punctuation
        ("river Nile", "the Nile", 2 / 3, False),  # precision 1/2, recall 1
        ("a b c d", "c d e", 2 * (2 / 3 * 2 / 3) / (4 / 3), False),  # b c d (without the article) against c d e
        ("x x y", "x y y", 2 / 3, False),  # words count as often as they occur in both
        ("Rhine", "Nile", 0.0, False),
        ("yes", "yes", 1.0, True),
        ("yes", "no", 0.0, False),
        ("yes it is", "yes", 0.0, False),  # yes and no must be met
        ("no", "no river", 0.0, False),
        ("", "Nile", 0.0, False),
        ("noanswer", "noanswer here", 0.0, False),
        ("", "", 0.0, True),  # no word is common: so says HotpotQA's script
        ("the", "a", 0.0, True),  # both are empty without their articles
    ],
)
def test_scores_are_those_worked_out_by_hand(prediction: str, reference: str, f1: float, exact: bool) -> None:
    assert answer_f1(prediction, reference) == pytest.approx(f1)
    found = HotpotQAMetric().compute(predictions=[prediction], references=[reference])
    assert found == pytest.approx({"f1": 100 * f1, "exact_match": 100.0 * exact})


@pytest.mark.parametrize(
    ("prediction", "references", "f1", "exact"),
    [
        ("The Nile", ["nile"], 1.0, 1.0),
        ("", [""], 1.0, 1.0),  # rightly found unanswerable
        ("Nile", [""], 0.0, 0.0),
        ("", ["Nile"], 0.0, 0.0),
        ("yes it is", ["yes"], 0.5, 0.0),  # yes is a word as any other
        ("river Nile", ["Rhine", "the Nile", "Nile delta in the north"], 2 / 3, 0.0),  # the best of all
        ("Nile", ["river Nile", "the Nile"], 1.0, 1.0),
    ],
)
def test_scores_by_squads_rules_are_those_worked_out_by_hand(prediction, references, f1, exact) -> None:
    assert answer_scores(prediction, references, "squad") == pytest.approx((f1, exact))


def test_scores_are_given_by_the_class_of_the_right_answer() -> None:
    predictions = ["the Nile", "river Nile", "no", "yes", "yes"]
    references: list[Any] = ["Nile", ["Rhine", "Nile"], "yes", "yes", "no"]
    found = scores_by_class(predictions, references, ["span", "span", "yes", "yes", "no"])
    assert list(found) == ["span", "yes", "no"]
    assert found["span"] == pytest.approx({"f1": 100 * (1 + 2 / 3) / 2, "exact_match": 50.0, "count": 2})
    assert found["yes"] == {"f1": 50.0, "exact_match": 50.0, "count": 2}
    assert found["no"] == {"f1": 0.0, "exact_match": 0.0, "count": 1}
    with pytest.raises(ValueError, match=r"`scoring` must be one of \['hotpotqa', 'squad'\], got 'bleu'"):
        scores_by_class(["yes"], ["yes"], ["yes"], "bleu")
    with pytest.raises(ValueError, match="`references` must hold at least one answer"):
        answer_scores("yes", [])


def test_the_metric_adds_batches() -> None:
    pairs = [("the Nile", "Nile"), ("yes", "no"), ("river Nile", "Nile"), ("Rhine", "Nile"), ("no", "no")]
    whole = HotpotQAMetric().compute(predictions=[a for a, _ in pairs], references=[b for _, b in pairs])
    metric = HotpotQAMetric()
    for start, stop in ((0, 1), (1, 4), (4, 5)):
        batch = pairs[start:stop]
        metric.add_batch(predictions=[a for a, _ in batch], references=[b for _, b in batch])
    assert metric.compute() == pytest.approx(whole)
    assert whole == pytest.approx({"f1": 100 * (1 + 2 / 3 + 1) / 5, "exact_match": 40.0})


# -- evaluation ------------------------------------------------------------------------------------------------------
UNANSWERABLE = {"id": "three", "question": "Who is it?", "context": "It is here.", "answers": []}


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_evaluation_scores_what_answer_gives(batch_size: int, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(question_answering, "BATCHES_AHEAD", 2)
    model = roberta_model(
        vocab_size=300, max_position_embeddings=34, window_size=32, overlap=2, num_answer_classes=4
    ).train()
    examples = [{**HOTPOT, "_id": f"{n}", "context": HOTPOT["context"] * (1 + n % 3)} for n in range(7)]
    examples += [{**HOTPOT, "_id": "yes", "answer": "yes"}, SQUAD, UNANSWERABLE]
    flat = [flat_example(example) for example in examples]
    alone = [model.answer(tokenizer, example["question"], example["context"]) for example in flat]
    found = predict_answers(model, tokenizer, examples, batch_size, progress=False)
    assert model.training  # as it was
    assert [one["answer"] for one in found] == [one["answer"] for one in alone]
    assert [one["answer_class"] for one in found] == [one["answer_class"] for one in alone]
    assert [one["id"] for one in found] == [example["id"] for example in flat]
    scores = evaluate_answers(model, tokenizer, examples, batch_size, progress=False)
    pairs = [
        answer_scores(one["answer"], example["references"], example["scoring"]) for one, example in zip(alone, flat)
    ]
    assert scores["f1"] == pytest.approx(10 * sum(f1 for f1, _ in pairs))
    assert scores["exact_match"] == pytest.approx(10 * sum(exact for _, exact in pairs))
    assert {kind: of["count"] for kind, of in scores["by_class"].items()} == {"span": 8, "yes": 1, "none": 1}
    right = sum(one["answer_class"] == example["answer_class"] for one, example in zip(alone, flat))
    assert (scores["count"], scores["class_accuracy"]) == (10, 10 * right)
    json.dumps(scores)


def test_questions_are_read_from_files_of_hotpotqa_and_squad(tokenizer, tmp_path, capsys) -> None:
    (tmp_path / "hotpot.json").write_text(json.dumps([HOTPOT]))
    (tmp_path / "hotpot.json.gz").write_bytes(gzip.compress(json.dumps([HOTPOT]).encode()))
    answers = [{"text": "here", "answer_start": 21}, {"text": "is it here", "answer_start": 15}]
    asked = [{"id": "two", "question": "Where is it?", "answers": answers, "is_impossible": False}]
    asked.append(
        {"id": "three", "question": "Who?", "answers": [], "is_impossible": True, "plausible_answers": answers}
    )
    paragraphs = [{"context": SQUAD["context"], "qas": asked}]
    (tmp_path / "squad.json").write_text(json.dumps({"version": "v2.0", "data": [{"paragraphs": paragraphs}]}))
    assert read_questions(tmp_path / "hotpot.json.gz") == read_questions(tmp_path / "hotpot.json")
    assert read_questions(tmp_path / "hotpot.json") == [flat_example(HOTPOT)]
    one, two = read_questions(tmp_path / "squad.json")
    assert one | {"references": ["here"]} == flat_example(SQUAD)
    assert (one["references"], two["references"]) == (["here", "is it here"], [""])
    assert (two["answer_class"], two["scoring"]) == ("none", "squad")
    model = roberta_model(vocab_size=300, max_position_embeddings=34, window_size=32)
    assert evaluate_answers(model, tokenizer, str(tmp_path / "squad.json"))["count"] == 2
    shown = capsys.readouterr()
    assert "questions: 100%" in shown.err
    assert not shown.out


@pytest.mark.parametrize("text", ["", "nothing", "[1]", '{"a": 1}', '[{"question": "Who?"}]'])
def test_files_of_other_kinds_are_refused(text: str, tmp_path) -> None:
    for name in ("some.json", "some.json.gz"):  # neither is packed
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="`file` must hold HotpotQA's or SQuAD's JSON, got .*some.json"):
            read_questions(tmp_path / name)


def test_what_cannot_be_evaluated_is_refused_before_anything_is_read(tokenizer, tmp_path, monkeypatch) -> None:
    model = roberta_model(vocab_size=300, max_position_embeddings=34, window_size=32)
    monkeypatch.setattr(model, "forward", None)
    (tmp_path / "none.json").write_text("[]")
    cases = [
        ([], "`examples` must hold at least one example"),
        (tmp_path / "none.json", "`file` must hold at least one question, got none in .*none.json"),
        ([HOTPOT, {**HOTPOT, "_id": "new", "answer": None}], "must have answers to be scored, got 'new' without one"),
        ([HOTPOT, {**SQUAD, "answers": None}], "must have answers to be scored, got 'two' without one"),
        ([HOTPOT, {**SQUAD, "context": " \n"}], "of 'two' `context` must hold at least one token, got ''"),
        ([HOTPOT, {**SQUAD, "question": ""}], "of 'two' `question` must hold at least one token, got ''"),
        ([HOTPOT, {**SQUAD, "question": "Nile? " * 20}], "of 'two' `question` must leave more than `overlap`"),
        ([HOTPOT, {**SQUAD, "question": ["Which?"]}], "of 'two' `question` must be one text, got list"),
    ]
    for examples, message in cases:
        with pytest.raises(ValueError, match=message):
            evaluate_answers(model, tokenizer, examples, progress=False)
    with pytest.raises(ValueError, match="`batch_size` must be at least 1, got 0"):
        predict_answers(model, tokenizer, [HOTPOT], batch_size=0)
    with pytest.raises(
        ValueError, match="`model` must be a RecurrentRobertaForQuestionAnswering, got .* 'recurrent_g"
    ):
        evaluate_answers(tiny_model(), tokenizer, [HOTPOT])


# -- Trainer ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True, "bf16": True}], ids=str)
def test_the_trainer_trains_scores_and_resumes(changes: dict, tokenizer, tmp_path) -> None:
    processor, metric = HotpotQAProcessor(tokenizer, 16), HotpotQAMetric()
    examples = [{**HOTPOT, "question": "Which?", "answer": answer} for answer in ("Nile", "the longest", "yes", "no")]
    features = Dataset.from_list([flat_example(example) for example in [*examples, SQUAD]]).map(processor)

    def compute_metrics(result: Any) -> dict[str, float]:
        answers = processor.answers(features, result.predictions)
        return metric.compute(predictions=answers, references=features["answer"])

    def trainer(folder: Path, steps: int) -> Trainer:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=3,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            save_steps=4,
            logging_steps=1,
            disable_tqdm=True,
            seed=3,
            **changes,
        )
        model = roberta_model(
            torch.float32, vocab_size=300, max_position_embeddings=20, window_size=16, initializer_range=0.05
        )
        return Trainer(
            model,
            arguments,
            train_dataset=features,
            eval_dataset=features,
            data_collator=processor.collator(),
            compute_metrics=compute_metrics,
        )

    whole = trainer(tmp_path / "whole", 8)
    before = whole.evaluate()
    whole.train()
    after = whole.evaluate()
    assert after["eval_loss"] < before["eval_loss"]
    assert set(after) >= {"eval_f1", "eval_exact_match"}
    trainer(tmp_path / "parts", 4).train()
    second = trainer(tmp_path / "parts", 8)
    second.train(resume_from_checkpoint=True)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, second.model.get_parameter(name)), name
    loaded = RecurrentRobertaForQuestionAnswering.from_pretrained(tmp_path / "whole" / "checkpoint-8")
    assert json.loads((tmp_path / "whole" / "checkpoint-8" / "config.json").read_text())["window_size"] == 16
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name


def test_it_learns_to_answer(tokenizer) -> None:
    """Four examples of every class, by heart."""
    processor = HotpotQAProcessor(tokenizer, 24)
    questions = {"Which?": "Nile", "What?": "the longest", "Is it?": "yes", "Nile?": "no"}
    features = [processor({**HOTPOT, "question": key, "answer": answer}) for key, answer in questions.items()]
    model = roberta_model(
        torch.float32,
        vocab_size=300,
        max_position_embeddings=30,
        window_size=24,
        hidden_size=32,
        initializer_range=0.05,
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = processor.collator()(features)
    for _ in range(150):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for feature, answer in zip(features, questions.values(), strict=True):
        found = model.answer(tokenizer, feature["question"], feature["context"])
        assert found["answer"] == answer
        assert found["score"] > 0.5
