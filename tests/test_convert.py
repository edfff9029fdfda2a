"""Plain checkpoints become recurrent ones, and plain again."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForSequenceClassification

import hf_recurrence
from hf_recurrence import cli
from hf_recurrence.publishing import convert
from tests.checkpoints import PLAIN, SMALL, TEXT, make_checkpoint
from tests.test_readme import make_bert, make_gpt2


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_checkpoint_becomes_recurrent_and_keeps_its_weights_and_tokenizer(kind: str, tmp_path) -> None:
    PLAIN[kind](tmp_path / "plain", TEXT)
    facts = convert(tmp_path / "plain", tmp_path / "out", **SMALL[kind])
    assert (facts["model_type"], facts["tokenizer"]) == (kind, True)
    assert facts["new"]
    assert all("recurrence" in name or "outputs" in name for name in facts["new"])
    model = getattr(hf_recurrence, facts["model"]).from_pretrained(tmp_path / "out")
    assert SMALL[kind].items() <= model.config.to_dict().items()
    before, after = load_file(tmp_path / "plain" / "model.safetensors"), model.state_dict()
    kept = before.keys() & after.keys()
    assert len(kept) > 10
    assert set(facts["left_out"]) <= before.keys() - kept
    for name in kept:
        assert torch.equal(before[name], after[name]), name
    ids = [AutoTokenizer.from_pretrained(tmp_path / name)(TEXT)["input_ids"] for name in ("plain", "out")]
    assert ids[0] == ids[1]
    convert(tmp_path / "plain", tmp_path / "again", **SMALL[kind])
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("out", "again")]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())


def test_the_way_back_gives_plain_models(tmp_path) -> None:
    make_checkpoint(tmp_path / "recurrent_gpt2", "recurrent_gpt2")
    make_checkpoint(tmp_path / "recurrent_roberta", "recurrent_roberta")
    for kind, name in (("recurrent_gpt2", "GPT2LMHeadModel"), ("recurrent_roberta", "RobertaForQuestionAnswering")):
        facts = convert(tmp_path / kind, tmp_path / f"plain-{kind}", strip=True)
        assert facts["model"] == name
        assert all("recurrence" in key or "class_outputs" in key for key in facts["left_out"])
        names = {file.name for file in (tmp_path / f"plain-{kind}").iterdir()}
        assert not [file for file in names if file.endswith(".py")]
        assert "auto_map" not in (tmp_path / f"plain-{kind}" / "config.json").read_text()
        plain, report = getattr(transformers, name).from_pretrained(
            tmp_path / f"plain-{kind}", output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        before = load_file(tmp_path / kind / "model.safetensors")
        for key, tensor in plain.state_dict().items():
            if key in before:
                assert torch.equal(tensor, before[key]), key
    recurrent = AutoModelForCausalLM.from_pretrained(tmp_path / "recurrent_gpt2").eval()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain-recurrent_gpt2").eval()
    assert type(plain).__name__ == "GPT2LMHeadModel"
    ids = torch.arange(8)[None] + 5  # one window, which knows of none before it
    torch.testing.assert_close(plain(ids).logits, recurrent(ids).logits)


def test_what_cannot_be_converted_is_refused_with_the_reason(tmp_path) -> None:
    make_checkpoint(tmp_path / "bert", "sru_bert")
    make_checkpoint(tmp_path / "block", "block_recurrent")
    make_gpt2(tmp_path / "gpt2", TEXT)
    for source, reason in (("bert", "in the place of BERT's feed-forward"), ("block", "did not come from a plain")):
        with pytest.raises(ValueError, match=f"`strip` must be False for a model of type .*{reason}"):
            convert(tmp_path / source, tmp_path / "out", strip=True)
        with pytest.raises(ValueError, match="must be a checkpoint of type gpt2, roberta, bert, got"):
            convert(tmp_path / source, tmp_path / "out")
    with pytest.raises(ValueError, match="of type recurrent_gpt2, recurrent_roberta to strip, got 'gpt2'"):
        convert(tmp_path / "gpt2", tmp_path / "out", strip=True)
    with pytest.raises(ValueError, match="`out` must be a new or an empty folder"):
        convert(tmp_path / "gpt2", tmp_path / "bert")
    with pytest.raises(ValueError, match="`window` must be a field of RecurrentGPT2Config"):
        convert(tmp_path / "gpt2", tmp_path / "out", window=3)
    with pytest.raises(ValueError, match="`overlap` must be smaller than `window_size`"):
        convert(tmp_path / "gpt2", tmp_path / "out", window_size=3, overlap=4)
    with pytest.raises(
        ValueError, match="`source` must be a folder with a saved model or an id on the Hub, got .*nothing"
    ):
        convert(tmp_path / "nothing-here", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="`source` must .*empty"):
        convert(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_classifier_of_bert_keeps_its_head(tmp_path) -> None:
    make_bert(tmp_path / "bert", TEXT)
    config = BertConfig.from_pretrained(tmp_path / "bert", num_labels=5)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    facts = convert(tmp_path / "bert", tmp_path / "out")
    assert facts["model"] == "SRUBertForSequenceClassification"
    assert not [name for name in facts["new"] if "classifier" in name]


def test_the_verb_converts_there_and_back(tmp_path, capsys) -> None:
    make_gpt2(tmp_path / "gpt2", TEXT)
    words = [
        "convert",
        str(tmp_path / "gpt2"),
        str(tmp_path / "out"),
        "--set",
        "window_size=9",
        "--set",
        "pooling=max",
    ]
    assert cli.main(words) == 0
    assert "RecurrentGPT2LMHeadModel in" in capsys.readouterr().out
    config = hf_recurrence.RecurrentGPT2Config.from_pretrained(tmp_path / "out")
    assert (config.window_size, config.pooling) == (9, "max")
    assert cli.main(["convert", str(tmp_path / "out"), str(tmp_path / "back"), "--strip"]) == 0
    assert "GPT2LMHeadModel in" in capsys.readouterr().out
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("gpt2", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert cli.main(words) == 1
    assert capsys.readouterr().err.endswith(
        f"`out` must be a new or an empty folder, got {str(tmp_path / 'out')!r}.\n"
    )
    with pytest.raises(SystemExit, match="2"):
        cli.main([*words[:3], "--set", "window_size"])
