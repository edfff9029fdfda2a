"""lm-evaluation-harness runs our checkpoints, and gives our numbers where both define the same thing."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from hf_recurrence import BlockRecurrentConfig, BlockRecurrentForCausalLM, RecurrentGPT2LMHeadModel
from hf_recurrence.evaluation import evaluate_perplexity
from tests.test_readme import make_gpt2


TEXTS = ["It was the best of times, it was the worst of times. " * 30, "A short one, of the worst of times."]
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
"""
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
"""


class Documents:
    """Documents as the harness reads them: behind the first token that it puts before them, in pieces of a length."""

    def __init__(self, tokenizer, length: int | None) -> None:
        rows = [[tokenizer.eos_token_id, *tokenizer(text.strip()).input_ids] for text in TEXTS]
        if length is None:
            self.ids = [np.array(row) for row in rows]
        else:  # the last token of a piece is read again as the first of the next
            self.ids = [np.array(row[at : at + length + 1]) for row in rows for at in range(0, len(row) - 1, length)]
        self.lengths = np.array([len(row) for row in self.ids])
        self.num_words = np.array([len(text.split()) for text in TEXTS])
        self.num_bytes = np.array([len(text.strip().encode()) for text in TEXTS])

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.ids[document][start:stop]


def harness(folder: Path, tasks: Path, max_length: int) -> dict:
    command = [
        sys.executable,
        str(Path(__file__).parent / "harness_worker.py"),
        str(folder),
        str(tasks),
        str(max_length),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recurrent_gpt2", "block_recurrent"])
def test_the_harness_gives_our_numbers(kind: str, tmp_path) -> None:
    torch.manual_seed(0)
    make_gpt2(tmp_path / "gpt2", TEXTS[0])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "gpt2")
    if kind == "recurrent_gpt2":
        model = RecurrentGPT2LMHeadModel.from_pretrained(tmp_path / "gpt2", window_size=16, overlap=3).eval()
        for parameter in model.parameters():
            parameter.data *= 4  # a new model hardly tells texts apart
    else:
        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
        shape |= {"intermediate_size": 24, "window_size": 16, "num_states": 4, "recurrent_layers": [1]}
        ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        model = BlockRecurrentForCausalLM(BlockRecurrentConfig(**shape, **ids, vocab_size=len(tokenizer))).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rolling, choice = tmp_path / "rolling.jsonl", tmp_path / "choice.jsonl"
    rolling.write_text("".join(json.dumps({"text": text.strip()}) + "\n" for text in TEXTS))
    questions = [{"text": TEXTS[0][:300], "choices": [" best", " worst", " times"], "label": n} for n in range(3)]
    choice.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tasks / "rolling.yaml").write_text(ROLLING.format(path=rolling))
    (tasks / "choice.yaml").write_text(CHOICE.format(path=choice))

    # in pieces that fill what it is told to be the context, and all at once; a last piece that was not full would get
    # more context from the harness
    assert len(tokenizer(TEXTS[0].strip()).input_ids) == 10 * 42
    for max_length, pieces in ((42, 42), (10_000, None)):
        found = harness(tmp_path / "model", tasks, max_length)
        ours = evaluate_perplexity(model, Documents(tokenizer, pieces), progress=False)
        assert found["rolling"]["word_perplexity,none"] == pytest.approx(ours["word_perplexity"], rel=1e-4)
        assert found["rolling"]["bits_per_byte,none"] == pytest.approx(ours["bits_per_byte"], rel=1e-4)
    # one choice is the likeliest, for all three questions, whose right answers differ
    assert found["choice"]["acc,none"] == pytest.approx(1 / 3)
    assert harness(tmp_path / "model", tasks, 0)["rolling"]["word_perplexity,none"] > 1
