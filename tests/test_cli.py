"""The command line: verbs do what their functions do, say what is wrong in one line, and leave with the right code."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from hf_recurrence import RecurrentCache, RecurrentGPT2LMHeadModel, RecurrentRobertaForQuestionAnswering, cli
from hf_recurrence.reading import read_ids
from hf_recurrence.reading import texts as reading
from tests.test_readme import make_gpt2, make_roberta


TEXT = "It was the best of times, it was the worst of times. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A causal model, one that answers, and a text."""
    path = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    make_gpt2(path / "gpt2", TEXT)
    make_roberta(path / "roberta", TEXT)
    model = RecurrentGPT2LMHeadModel.from_pretrained(path / "gpt2", window_size=16)
    for parameter in model.parameters():
        parameter.data *= 4  # a new model hardly tells texts apart
    model.save_pretrained(path / "causal")
    AutoTokenizer.from_pretrained(path / "gpt2").save_pretrained(path / "causal")
    RecurrentRobertaForQuestionAnswering.from_pretrained(path / "roberta", window_size=64).save_pretrained(path / "qa")
    AutoTokenizer.from_pretrained(path / "roberta").save_pretrained(path / "qa")
    (path / "book.txt").write_text(TEXT)
    return path


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_what_was_read_is_continued_as_if_it_stood_before_the_prompt(folder, tmp_path, capsys) -> None:
    state = tmp_path / "book.safetensors"
    code, out, _ = run(capsys, "read", folder / "causal", folder / "book.txt", "--state", state, "--json")
    tokenizer = AutoTokenizer.from_pretrained(folder / "causal")
    num_tokens = len(tokenizer(TEXT).input_ids)
    assert (code, json.loads(out)["tokens"]) == (0, num_tokens)
    common = ("--max-new-tokens", 20, "--json")
    code, out, _ = run(capsys, "generate", folder / "causal", "--state", state, "--prompt", " And then", *common)
    (tmp_path / "whole.txt").write_text(TEXT + " And then")
    whole = run(capsys, "generate", folder / "causal", "--prompt-file", tmp_path / "whole.txt", *common)
    alone = run(capsys, "generate", folder / "causal", "--prompt", " And then", *common)
    assert code == 0
    assert json.loads(out)["text"] == json.loads(whole[1])["text"] != json.loads(alone[1])["text"]
    assert json.loads(out)["tokens_read"] == json.loads(whole[1])["tokens_read"] > num_tokens


def test_a_prompt_longer_than_a_segment_is_read_piece_by_piece(folder, tmp_path, capsys, monkeypatch) -> None:
    command = ("generate", folder / "causal", "--prompt-file", folder / "book.txt", "--max-new-tokens", 20)
    _, at_once, _ = run(capsys, *command)
    monkeypatch.setattr(reading, "SEGMENT", 37)
    assert run(capsys, *command)[1] == at_once
    model = RecurrentGPT2LMHeadModel.from_pretrained(folder / "causal", dtype=torch.float64).eval()
    ids = torch.randint(250, (2, 100))
    whole = model(ids, use_cache=True).past_key_values
    torch.testing.assert_close(read_ids(model, ids).state, whole.state, rtol=1e-10, atol=1e-12)


def test_reading_and_writing_go_on_from_stored_states(folder, tmp_path, capsys) -> None:
    half = len(TEXT) // 2
    for name, part in {"one": TEXT[:half], "two": TEXT[half:]}.items():
        (tmp_path / name).write_text(part)
    whole, first, second = (tmp_path / f"{name}.safetensors" for name in ("whole", "first", "second"))
    assert run(capsys, "read", folder / "causal", tmp_path / "one", "--state", first)[0] == 0
    code, out, _ = run(capsys, "read", folder / "causal", tmp_path / "two", "--start", first, "--state", second)
    assert code == 0
    assert f"bytes in {second}" in out
    start = ("generate", folder / "causal", "--prompt", "It was", "--json", "--save-state", whole, "--max-new-tokens")
    _, out, _ = run(capsys, *start, 30)
    _, short, _ = run(capsys, *start, 12)
    text = json.loads(short)["text"]
    assert json.loads(out)["text"].startswith(text)
    assert RecurrentCache.load(whole).get_seq_length() == json.loads(short)["tokens_read"] + 11  # all but the last


def test_streaming_prints_the_text_once(folder, capsys) -> None:
    command = ("generate", folder / "causal", "--prompt", "It was", "--max-new-tokens", 10)
    assert run(capsys, *command, "--stream")[1] == run(capsys, *command)[1]
    assert "text" in json.loads(run(capsys, *command, "--stream", "--json")[1])


def test_sampling_is_repeated_by_its_seed(folder, capsys) -> None:
    command = ("generate", folder / "causal", "--prompt", "It was", "--sample", "--temperature", 2.0, "--top-p", 0.9)
    texts = [run(capsys, *command, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_answers_come_from_the_document(folder, capsys) -> None:
    command = ("answer", folder / "qa", folder / "book.txt", "What were the times?")
    code, out, _ = run(capsys, *command, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["start"] is None or TEXT[found["start"] : found["end"]] == found["answer"]
    assert "probability" in run(capsys, *command)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "{f}/none", "--prompt", "a"), "none"),
        (
            ("generate", "{f}/gpt2", "--prompt", "a"),
            "`checkpoint` must be of type recurrent_gpt2 or block_recurrent, got gpt2",
        ),
        (("generate", "{f}/causal", "--prompt", ""), "`prompt` must hold at least one token, got ''"),
        (("generate", "{f}/causal", "--prompt", "a", "--temperature", "2"), "`--temperature` needs `--sample`"),
        (("generate", "{f}/causal", "--prompt-file", "{f}/none.txt"), "none.txt"),
        (("generate", "{f}/causal", "--prompt", "a", "--state", "{f}/none.safetensors"), "none.safetensors"),
        (("read", "{f}/causal", "{f}/book.txt", "--state", "{f}/none/a"), "`state` must be a file in a folder"),
        (("read", "{f}/causal", "{f}/bytes", "--state", "{f}/a"), "must be a text in UTF-8"),
        (("answer", "{f}/causal", "{f}/book.txt", "Who?"), "`checkpoint` must be of type recurrent_roberta"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, capsys, words, message) -> None:
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    command = [word.format(f=folder) for word in words]
    code, out, error = run(capsys, *command)
    assert (code, out) == (1, "")
    assert error.splitlines()[-1].startswith(f"hf-recurrence {words[0]}: ")
    assert message in error
    with pytest.raises((ValueError, OSError)):
        cli.main([*command, "--debug"])


def test_wrong_usage_leaves_with_two(capsys) -> None:
    for words in (["write"], ["read"], ["generate", "model", "--prompt", "a", "--max-new-tokens", "0"]):
        with pytest.raises(SystemExit) as left:
            cli.main(words)
        assert left.value.code == 2
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0


def test_every_verb_explains_itself_with_an_example(capsys) -> None:
    for name, verb in cli.VERBS.items():
        with pytest.raises(SystemExit) as left:
            cli.main([name, "--help"])
        assert left.value.code == 0
        assert verb.example.startswith(f"hf-recurrence {name} ")
        assert verb.example in capsys.readouterr().out


def test_an_interruption_is_said_and_fails(folder, capsys, monkeypatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reading, "read_ids", interrupt)
    code, _, error = run(capsys, "read", folder / "causal", folder / "book.txt", "--state", folder / "state")
    assert (code, error.splitlines()[-1]) == (1, "hf-recurrence read: interrupted")
    assert not (folder / "state").exists()


def test_the_module_is_the_command() -> None:
    from hf_recurrence import __main__

    assert __main__.main is cli.main
    assert "hf_recurrence" in sys.modules
