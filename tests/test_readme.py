"""Every snippet of the README runs, and its figures are those of the files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.report import with_table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from tests.common import train_tokenizer
from tests.test_question_answering import HOTPOT


README = Path(__file__).parent.parent / "README.md"


def make_gpt2(folder: Path, text: str) -> None:
    """A folder as the Hub's "gpt2" has it, but small."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([text], trainer)
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=end, eos_token=end, pad_token=end, padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, **ids)
    GPT2LMHeadModel(config).save_pretrained(folder)


def make_roberta(folder: Path, text: str) -> None:
    """A folder as the Hub's "roberta-base" has it, but small."""
    tokenizer = train_tokenizer([text], vocab_size=300)
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = RobertaConfig(**shape, vocab_size=300, max_position_embeddings=514, type_vocab_size=1)
    RobertaForMaskedLM(config).save_pretrained(folder)


def make_bert(folder: Path, text: str) -> None:
    """A folder as the Hub's "bert-base-uncased" has it, but small."""
    folder.mkdir()
    words = sorted(set(text.lower().replace(".", " .").replace(",", " ,").split()))
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)


def test_every_snippet_runs(tmp_path) -> None:
    text = "It was the best of times, it was the worst of times. " * 700
    (tmp_path / "book.txt").write_text(text)
    for split, sizes in {"train": (9000, 12000, 100), "valid": (3000, 5000)}.items():
        (tmp_path / "books" / split).mkdir(parents=True)
        for size in sizes:
            (tmp_path / "books" / split / f"{size}.txt").write_text(text[:size])
    make_gpt2(tmp_path / "gpt2", text)
    make_roberta(tmp_path / "roberta-base", text)
    (tmp_path / "hotpot_train.json").write_text(json.dumps([HOTPOT, {**HOTPOT, "_id": "two", "answer": "no"}]))
    make_bert(tmp_path / "bert-base-uncased", text)
    (tmp_path / "configs").symlink_to(README.parent / "configs")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"python", "bash"}
    program = "\n".join(code for language, code in blocks if language == "python")
    without_package = "import sys\nsys.modules['hf_recurrence'] = None\n"
    elsewhere = [without_package + code for _, code in blocks if "trust_remote_code" in code]
    assert len(elsewhere) == 1
    shell = f'set -e\nhf-recurrence() {{ "{sys.executable}" -m hf_recurrence "$@"; }}\n'
    shell += "\n".join(code for language, code in blocks if language == "bash")
    commands = [[sys.executable, "-c", script] for script in (program, *elsewhere)] + [["bash", "-c", shell]]
    for command in commands:  # in the folder that the python snippets leave
        environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]


def test_the_figures_are_those_that_the_runs_wrote() -> None:
    text = README.read_text()
    assert with_table(text) == text, "run python -m benchmarks.report"


def test_the_targets_were_reached() -> None:
    from benchmarks.report import load

    memory, times, generation = load("training_memory"), load("training_time"), load("generation")
    assert memory["summary"]["peak_60_over_peak_5"] <= 1.02
    assert memory["summary"]["mb_a_window"]["two_pass_5_to_60"] < 0.1
    for shape, values in times.items():
        assert values["recurrent"]["ratio"] <= 1.05, shape
        limit = 1.35 if "small" in shape else 1.10
        assert values["recurrent, window checkpointing"]["ratio"] <= limit, shape
    assert generation["recurrent_over_plain_tokens_per_second"] >= 0.95
    assert generation["time_at_20000_over_time_at_500"] <= 1.1
    memory_at = list(generation["process_memory_mb_at_token"].values())
    assert max(memory_at) == pytest.approx(min(memory_at), rel=0.01)
    for name, found in load("evaluation").items():
        assert found["evaluation_over_bare_tokens_per_second"] >= 0.95, name
        times, windows = found["time_over_that_without_overlap"], found["windows_over_those_without_overlap"]
        assert all(1 <= times[overlap] <= windows[overlap] for overlap in times), name
    encoder = load("recurrent_roberta")
    assert encoder["peak_60_over_peak_5"] <= 1.02
    assert encoder["answer_mb_beyond_tokenising"]["100"] < encoder["answer_mb_beyond_tokenising"]["10"] + 2
    assert encoder["task"]["recurrent, 1 windows apart"]["seeds_above_95_percent"] == 3
    for curve in encoder["task"]["disjoint, 1 windows apart"]["accuracy_of_every_100_steps"].values():
        assert curve[-1] < 0.15  # 12.5 % is chance
