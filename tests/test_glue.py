"""GLUE's files to data sets, and the scores of its tasks against numbers worked by hand and other libraries."""

from pathlib import Path

import numpy as np
import pytest

from hf_recurrence.data import GLUE_TASKS, glue_task, read_glue
from hf_recurrence.evaluation import glue_scores


FILES = {
    "CoLA": 'gj04\t1\t\tThe "boat sailed.\ngj04\t0\t*\tBoat the sailed.\n',
    "SST-2": "sentence\tlabel\na charming journey \t1\nunflinchingly bleak \t0\n",
    "MRPC": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    "1\t7\t8\tHe left .\tHe went .\r\n0\t9\t10\tA .\tB .\r\n",
    "STS-B": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    "0\tcaptions\tf\t2012\t1\tnone\tnone\tA plane.\tAn air plane.\t5.000\n1\tc\tf\t2012\t2\tn\tn\tA.\tB.\t0.500\n",
    "RTE": "index\tsentence1\tsentence2\tlabel\n0\tRain.\tSun.\tnot_entailment\n1\tRain.\tWater.\tentailment\n",
    "QNLI": "index\tquestion\tsentence\tlabel\n0\tWho?\tNobody.\tentailment\n",
    "WNLI": "index\tsentence1\tsentence2\tlabel\n0\tIt fits.\tThe box fits.\t1\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).mkdir()
        for split in ("train", "dev"):
            (tmp_path / name / f"{split}.tsv").write_text(text, encoding="utf-8", newline="")
    return tmp_path


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("cola", [{"sentence": 'The "boat sailed.', "label": 1}, {"sentence": "Boat the sailed.", "label": 0}]),
        ("sst2", [{"sentence": "a charming journey ", "label": 1}, {"sentence": "unflinchingly bleak ", "label": 0}]),
        (
            "mrpc",
            [
                {"sentence1": "He left .", "sentence2": "He went .", "label": 1},
                {"sentence1": "A .", "sentence2": "B .", "label": 0},
            ],
        ),
        (
            "stsb",
            [
                {"sentence1": "A plane.", "sentence2": "An air plane.", "label": 5.0},
                {"sentence1": "A.", "sentence2": "B.", "label": 0.5},
            ],
        ),
        (
            "rte",
            [
                {"sentence1": "Rain.", "sentence2": "Sun.", "label": 1},
                {"sentence1": "Rain.", "sentence2": "Water.", "label": 0},
            ],
        ),
        ("qnli", [{"question": "Who?", "sentence": "Nobody.", "label": 0}]),
        ("wnli", [{"sentence1": "It fits.", "sentence2": "The box fits.", "label": 1}]),
    ],
)
def test_texts_and_labels_of_a_task_are_read_from_its_columns(folder: Path, task: str, rows: list) -> None:
    found = read_glue(folder, task)
    assert found.to_list() == rows
    assert read_glue(folder / GLUE_TASKS[task].folder, task, "validation").to_list() == rows
    if task != "stsb":
        assert found.features["label"].names == list(GLUE_TASKS[task].labels)


def test_names_of_tasks_may_be_spelt_as_the_folders() -> None:
    assert all(glue_task(task.folder) is task is glue_task(name) for name, task in GLUE_TASKS.items())
    assert glue_task("sts_b") is GLUE_TASKS["stsb"]


def test_bad_requests_and_files_say_what_is_wrong(folder: Path) -> None:
    with pytest.raises(ValueError, match="`task` must be one of cola, .*, got 'squad'"):
        read_glue(folder, "squad")
    with pytest.raises(ValueError, match="`split` must be train or validation, .*, got 'test'"):
        read_glue(folder, "rte", "test")
    with pytest.raises(ValueError, match="`folder` must hold CoLA/train.tsv of GLUE, got"):
        read_glue(folder / "RTE" / "nothing", "cola")
    for line in ("2\tRain.", "2\tRain.\tSun.\tmaybe"):
        (folder / "RTE" / "train.tsv").write_text(FILES["RTE"] + line + "\n")
        with pytest.raises(ValueError, match="as distributed, got line 4 of train.tsv with"):
            read_glue(folder, "rte")


def as_outputs(classes: list[int]) -> np.ndarray:
    return np.eye(2)[classes] * 3 - 1  # [rows, classes]


def test_scores_are_those_worked_by_hand() -> None:
    # 3 true positives, 1 false positive, 2 false negatives, 4 true negatives
    chosen, labels = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    matthews = (3 * 4 - 1 * 2) / (4 * 5 * 5 * 6) ** 0.5
    assert glue_scores("cola", as_outputs(chosen), labels) == pytest.approx(
        {"matthews_correlation": matthews, "accuracy": 0.7}
    )
    assert glue_scores("mrpc", as_outputs(chosen), labels) == pytest.approx({"f1": 2 * 3 / (4 + 5), "accuracy": 0.7})
    for task in ("sst2", "rte", "qnli", "wnli"):
        assert glue_scores(task, as_outputs(chosen), labels) == pytest.approx({"accuracy": 0.7})
    # means 2.5 and 3; ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4
    found = glue_scores("stsb", np.array([[1.0], [2.0], [2.0], [5.0]]), np.array([0.0, 1.0, 4.0, 7.0]))
    assert found["pearson"] == pytest.approx((1.5 * 3 + 0.5 * 2 - 0.5 * 1 + 2.5 * 4) / (9 * 30) ** 0.5)
    assert found["spearman"] == pytest.approx((1.5 * 1.5 + 1.5 * 1.5) / (4.5 * 5) ** 0.5)


def test_the_first_score_is_the_one_that_a_task_is_ranked_by() -> None:
    outputs = {name: [[0.0, 1.0]] * 2 if task.labels else [0.0, 1.0] for name, task in GLUE_TASKS.items()}
    assert all(next(iter(glue_scores(name, outputs[name], [1, 0]))) == GLUE_TASKS[name].metric for name in GLUE_TASKS)


def test_outputs_without_any_difference_score_nothing() -> None:
    assert glue_scores("cola", as_outputs([1, 1, 1]), [1, 0, 1])["matthews_correlation"] == 0
    assert glue_scores("stsb", [2.0, 2.0, 2.0], [1.0, 2.0, 3.0]) == {"spearman": 0, "pearson": 0}
    assert glue_scores("mrpc", as_outputs([0, 0]), [0, 0]) == {"f1": 0, "accuracy": 1}


def test_outputs_of_wrong_shapes_or_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`predictions` must be \[3, 2\] as `labels`, .* got \[2, 2\]"):
        glue_scores("rte", as_outputs([0, 1]), [0, 1, 1])
    with pytest.raises(ValueError, match=r"`predictions` must be \[2\] or \[2, 1\] as `labels`, .* got \[2, 2\]"):
        glue_scores("stsb", as_outputs([0, 1]), [0, 1])
    with pytest.raises(ValueError, match="`predictions` must be finite, got 1"):
        glue_scores("stsb", [0.0, float("nan")], [0, 1])
    with pytest.raises(ValueError, match="at least one row"):
        glue_scores("rte", np.zeros((0, 2)), [])


@pytest.mark.slow
def test_scores_are_those_of_scipy_and_scikit_learn() -> None:
    from scipy import stats
    from sklearn import metrics

    random = np.random.default_rng(0)
    outputs, labels = random.normal(size=(200, 2)), random.integers(0, 2, 200)
    chosen = outputs.argmax(1)
    assert glue_scores("cola", outputs, labels)["matthews_correlation"] == pytest.approx(
        metrics.matthews_corrcoef(labels, chosen)
    )
    assert glue_scores("mrpc", outputs, labels)["f1"] == pytest.approx(metrics.f1_score(labels, chosen))
    values, expected = random.integers(0, 9, 200) / 2, random.integers(0, 11, 200) / 2  # many equal ones
    found = glue_scores("stsb", values, expected)
    assert found["spearman"] == pytest.approx(stats.spearmanr(values, expected).statistic)
    assert found["pearson"] == pytest.approx(stats.pearsonr(values, expected).statistic)
