"""Every token is scored once, in the window that the definition gives it, whatever the batches and interruptions."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from hf_recurrence.evaluation import evaluate_perplexity, flops_per_token, perplexity, word_perplexity
from tests.common import MODELS, block_model, random_ids, roberta_model, sru_model, tiny_model


SMALL = {"vocab_size": 61, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.2}


class Listed:
    """Documents of random ids, with words and bytes."""

    def __init__(self, *lengths: int) -> None:
        self.ids = [random_ids(length).numpy() for length in lengths]
        self.lengths = np.array(lengths)
        self.num_words, self.num_bytes = self.lengths // 2, self.lengths * 3

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.ids[document][start:stop]


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(**SMALL, bos_token_id=1, eos_token_id=2)).double().eval()


def strided(model, ids: np.ndarray, width: int, overlap: int) -> float:
    """The loss of a document by the definition: one token after the other, each in its own window."""
    total = 0.0
    for position in range(1, len(ids)):
        start = 0
        while position > start + width:  # the earliest window whose tokens can predict it
            start += width - overlap
        context = torch.from_numpy(ids[start:position])[None]
        total -= model(context).logits[0, -1].log_softmax(-1)[ids[position]].item()
    return total


@pytest.mark.parametrize("overlap", [0, 3, 6])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_plain_model_is_scored_as_the_definition_says(overlap: int, batch_size: int) -> None:
    model, tokens = gpt2(), Listed(23, 2, 8, 7, 40)
    found = evaluate_perplexity(model, tokens, 7, overlap, batch_size, progress=False)
    expected = [strided(model, ids, 7, overlap) for ids in tokens.ids]
    np.testing.assert_allclose(found["losses"], expected, rtol=1e-10)
    assert found["counts"] == [22, 1, 7, 6, 39]
    assert found["tokens"] == 75
    assert found["documents"] == 5
    total = sum(expected)
    assert found["loss"] == pytest.approx(total / 75)
    assert found["perplexity"] == pytest.approx(math.exp(total / 75))
    assert found["word_perplexity"] == pytest.approx(math.exp(total / found["words"]))
    assert found["bits_per_token"] == pytest.approx(total / 75 / math.log(2))
    assert found["bits_per_byte"] == pytest.approx(total / found["bytes"] / math.log(2))
    assert found["words"] == sum(length // 2 for length in tokens.lengths)


def test_any_causal_model_can_be_evaluated() -> None:
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=61, initializer_range=0.2)).double().eval()
    tokens = Listed(23, 9)
    found = evaluate_perplexity(model, tokens, window_size=6, overlap=2, progress=False)
    np.testing.assert_allclose(found["losses"], [strided(model, ids, 6, 2) for ids in tokens.ids], rtol=1e-10)
    assert found["flops_per_token"] is None


@pytest.mark.parametrize("changes", [{}, {"overlap": 2}, {"overlap": 4}, {"window_size": 8, "overlap": 3}])
def test_a_recurrent_model_is_scored_as_it_reads_token_by_token(changes: dict[str, int]) -> None:
    model, tokens = tiny_model(torch.float64), Listed(23, 2, 8, 5, 6, 40)
    found = evaluate_perplexity(model, tokens, **changes, batch_size=2, progress=False)
    assert (model.config.window_size, model.config.overlap) == (5, 0)
    changed = tiny_model(torch.float64, **changes)
    for ids, loss, count in zip(tokens.ids, found["losses"], found["counts"], strict=True):
        cache, expected = None, 0.0
        for token, target in pairwise(ids):
            out = changed(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache, expected = out.past_key_values, expected - out.logits[0, -1].log_softmax(-1)[target].item()
        assert loss == pytest.approx(expected, rel=1e-10)
        assert count == len(ids) - 1


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("overlap", [0, 2])
def test_the_result_does_not_depend_on_the_batches(family: str, overlap: int, monkeypatch) -> None:
    if family == "block_recurrent" and overlap:
        overlap = 0
        monkeypatch.setattr(perplexity, "BLOCK_TOKENS", 8)  # two blocks a call
    monkeypatch.setattr(perplexity, "MAX_LOGITS", 61 * 3)  # three tokens at a time
    model, tokens = MODELS[family](torch.float64), Listed(23, 2, 8, 7, 40, 41, 3, 16, 17)
    runs = [evaluate_perplexity(model, tokens, None, overlap, size, progress=False) for size in (1, 2, 4, 9, 30)]
    alone = []
    for ids in tokens.ids:
        row = torch.from_numpy(ids)[None]
        changed = MODELS[family](torch.float64, **({"overlap": overlap} if overlap else {}))
        alone.append(changed(row, labels=row).loss.item() * (len(ids) - 1))
    for found in runs:
        np.testing.assert_allclose(found["losses"], alone, rtol=1e-10)
        assert found["counts"] == [length - 1 for length in tokens.lengths]


class Killed(Exception):
    pass


@pytest.mark.parametrize("family", ["gpt2", *MODELS])
def test_a_run_that_was_killed_goes_on_with_the_same_numbers(family: str, tmp_path, monkeypatch) -> None:
    model = gpt2() if family == "gpt2" else MODELS[family](torch.float64)
    monkeypatch.setattr(perplexity, "BLOCK_TOKENS", 4)
    settings = {"window_size": 4, "batch_size": 2, "progress": False}
    tokens = Listed(23, 2, 8, 7, 40, 18)
    whole = evaluate_perplexity(model, tokens, **settings)
    path, keep, reached = tmp_path / "partial.json", perplexity.Partial.keep, []

    def keep_and_die(self, *args):
        keep(self, *args)
        reached.append(self.counts.sum())
        if len(reached) % 3 == 0:
            raise Killed

    monkeypatch.setattr(perplexity.Partial, "keep", keep_and_die)
    kills = 0
    while True:
        try:
            found = evaluate_perplexity(model, tokens, **settings, resume=path, save_seconds=0)
            break
        except Killed:
            kills += 1
    assert kills > 2
    assert len(set(reached)) == len(reached)  # nothing was scored twice
    assert found["losses"] == whole["losses"]
    assert found["counts"] == whole["counts"]
    assert not list(tmp_path.iterdir())
    settings["batch_size"] = 1
    with pytest.raises(Killed):
        evaluate_perplexity(model, tokens, **settings, resume=path, save_seconds=0)
    with pytest.raises(ValueError, match="`resume` must be a file of the same evaluation, .*`data` is another"):
        evaluate_perplexity(model, Listed(9, 30), **settings, resume=path)


def test_what_cannot_be_evaluated_is_told() -> None:
    model, plain, tokens = tiny_model(torch.float32), gpt2(), Listed(9, 30)
    for wrong, message in (
        ({"tokens": Listed()}, "`tokens` must hold at least one document, got none"),
        ({"tokens": Listed(5, 1)}, "`tokens` must be documents of at least 2 tokens.* got 1 in document 1"),
        ({"overlap": 5}, r"`overlap` must be smaller than `window_size` \(5\), got 5"),
        ({"overlap": -1}, "`overlap` must be an integer of at least 0, got -1"),
        ({"window_size": 17}, r"`window_size` must be at most `n_positions` \(16\)"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"model": plain, "window_size": 5, "overlap": 5}, r"`overlap` must be .* smaller than `window_size` \(5\)"),
        ({"model": plain, "window_size": 17}, r"`window_size` must be at most `max_position_embeddings` \(16\)"),
        ({"model": block_model(), "overlap": 1}, "`overlap` must be 0 for a model of type 'block_recurrent', got 1"),
        ({"model": block_model(), "window_size": 0}, "`window_size` must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate_perplexity(**{"model": model, "tokens": tokens, "progress": False, **wrong})
    assert (model.config.window_size, model.config.overlap) == (5, 0)
    tokens.ids[1][7] = 61
    with pytest.raises(ValueError, match=r"below the model's `vocab_size` \(61\), got 61 in document 1"):
        evaluate_perplexity(model, tokens, progress=False)
    torch.nn.init.constant_(plain.transformer.h[1].ln_1.weight, math.nan)
    with pytest.raises(ValueError, match="`transformer.h.1.ln_1.weight` of the checkpoint must be finite, got 16"):
        evaluate_perplexity(plain, Listed(9), progress=False)


def test_flops_of_gpt2_are_those_of_the_papers_table() -> None:
    paper = {0: 1.75, 5: 1.78, 10: 1.81, 30: 1.94, 50: 2.10, 75: 2.33, 100: 2.62, 150: 3.50, 200: 5.25}
    least = flops_per_token(GPT2Config(), 300)
    assert least == 2 * 12 * 12 * 768**2 + 4 * 12 * 768 * 150
    recurrent = tiny_model().config.from_dict({"model_type": "recurrent_gpt2"})
    for overlap, value in paper.items():
        exact = flops_per_token(GPT2Config(), 300, overlap)
        assert exact == pytest.approx(least * 300 / (300 - overlap))
        # the paper's rows with an overlap are the first one, rounded to 1.75e8, times T / (T - O)
        assert f"{round(least, -6) * exact / least:.2e}" == f"{value:.2f}e+08"
        assert exact == pytest.approx(value * 1e8, rel=0.005)
        # the recurrence is too small to be seen
        assert flops_per_token(recurrent, 300, overlap) == pytest.approx(exact, rel=3e-4)


def test_bits_become_the_papers_perplexities_a_word() -> None:
    for bits, expected in ((3.39, 34.80), (3.36, 33.72), (3.32, 32.34)):
        # the paper's bits are rounded to 0.005, which is 0.5 %
        assert word_perplexity(bits, 10_523_460, 6_966_499) == pytest.approx(expected, rel=0.006)
    with pytest.raises(ValueError, match="`num_words` must be at least 1, got 0"):
        word_perplexity(3.0, 5, 0)


def counted(model, *args, **kwargs) -> int:
    # the counter does not know the CPU's fused attention
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    return counter.get_total_flops()


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize(
    "changes", [{}, {"insertion_layer": "all", "num_recurrent_embeddings": 2, "pooling_layers": "last"}]
)
@pytest.mark.parametrize("make", [tiny_model, roberta_model])
def test_a_further_window_takes_the_flops_that_are_told(make, changes, overlap: int) -> None:
    model = make(torch.float32, overlap=overlap, **changes)
    texts = [random_ids(1, 5 + windows * (5 - overlap)) for windows in (2, 3)]
    first, second = (counted(model, ids) for ids in texts)
    expected = flops_per_token(model.config, logits=True, masked=True)
    assert second - first == pytest.approx((5 - overlap) * expected)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "roberta", "swish", "sru"])
def test_a_plain_model_takes_the_flops_that_are_told(kind: str) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = {
        "gpt2": gpt2,
        "bert": lambda: BertForMaskedLM(BertConfig(**shape, vocab_size=61)),
        "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**shape, vocab_size=61)),
        "swish": lambda: sru_model(torch.float32),
        "sru": lambda: sru_model(torch.float32, recurrence_cell="sru"),
    }[kind]()
    expected = 14 * flops_per_token(model.config, window_size=14, logits=True, masked=True)
    assert counted(model.eval(), random_ids(1, 14)) == pytest.approx(expected)
