"""Pseudo-perplexity against its definition; topics of continuations that keep to their contexts, and that do not."""

import math

import numpy as np
import pytest
import torch
from transformers import BertTokenizerFast

from hf_recurrence.data import TokenStore
from hf_recurrence.evaluation import TopicModel, evaluate_pseudo_perplexity, topic_propagation, topics
from tests.common import sru_model, tiny_model
from tests.test_perplexity import Listed, gpt2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> BertTokenizerFast:
    """Words of two topics, and the special tokens."""
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    words = [f"sea{letter}" for letter in "abcdefgh"] + [f"hill{letter}" for letter in "abcdefgh"]
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    return BertTokenizerFast(str(path))


def test_pseudo_perplexity_masks_every_token_alone(tokenizer, tmp_path) -> None:
    texts = ["seaa seab seac hilla hillb", "hillc seaa", "seaa seab hilla hillb seac hillc seaa seab"]
    store, model = TokenStore.build(tmp_path, texts, tokenizer), sru_model(torch.float64, vocab_size=21)
    total, count = 0.0, 0
    for document in range(3):
        ids = store.read(document, 0, 99).tolist()
        for start in range(0, len(ids), 4):
            segment = torch.tensor([[2, *ids[start : start + 4], 3]])
            for place in range(1, segment.shape[1] - 1):
                masked = segment.clone()
                masked[0, place] = tokenizer.mask_token_id
                total -= model(masked).logits[0, place].log_softmax(-1)[segment[0, place]].item()
                count += 1
    for batch_size in (1, 4):
        found = evaluate_pseudo_perplexity(model, store, tokenizer, 6, batch_size, progress=False)
        assert found["tokens"] == count == 15
        assert found["loss"] == pytest.approx(total / count, rel=1e-10)
        assert found["pseudo_perplexity"] == pytest.approx(math.exp(total / count))
        assert found["word_perplexity"] == pytest.approx(math.exp(total / 15))
    some = evaluate_pseudo_perplexity(model, store, tokenizer, 6, max_tokens=5, progress=False)
    assert (some["tokens"], some["word_perplexity"]) == (5, None)
    with pytest.raises(ValueError, match="`max_tokens` must be at least 1, got 0"):
        evaluate_pseudo_perplexity(model, store, tokenizer, max_tokens=0)
    tokenizer.mask_token, name = None, tokenizer.mask_token
    with pytest.raises(ValueError, match="`tokenizer` must have a mask token"):
        evaluate_pseudo_perplexity(model, store, tokenizer)
    tokenizer.mask_token = name
    with pytest.raises(ValueError, match="another tokenizer's"):
        evaluate_pseudo_perplexity(sru_model(vocab_size=7), store, tokenizer)


def test_topics_are_told_apart_and_continuations_compared(tokenizer, monkeypatch) -> None:
    random = np.random.default_rng(0)
    sea, hill = [f"sea{c}" for c in "abcdefgh"], [f"hill{c}" for c in "abcdefgh"]
    train = [" ".join(random.choice(words, 60)) for words in (sea, hill) * 20]
    model = TopicModel(train, num_topics=2)
    shares = model.distributions(["seaa seab seac", "hilla hillb hillc"])
    assert shares.argmax(1).tolist() in ([0, 1], [1, 0])
    assert {word[:3] for word in model.words(4)[0]} in ({"sea"}, {"hil"})
    np.testing.assert_allclose(topics.divergences(shares, shares), 0, atol=1e-12)
    assert topics.divergences(np.eye(2), np.eye(2)[::-1]).tolist() == [1.0, 1.0]

    tokens = Listed(50, 4, 30)
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in sea + hill}
    tokens.ids = [
        np.array([ids[w] for w in random.choice(words, n)]) for words, n in ((sea, 50), (hill, 4), (hill, 30))
    ]
    given = []

    def write(model, rows, length, batch_size, progress):
        """The recurrent model goes on with the first word of its context, the baseline with any."""
        given.append([len(row) for row in rows])
        first = [row[0] if len(row) > 1 else random.choice(list(ids.values())) for row in rows]
        return torch.tensor(np.array(first))[:, None].expand(-1, length)

    recurrent, baseline = tiny_model(torch.float32), gpt2()
    with monkeypatch.context() as patch:
        patch.setattr(topics, "greedy", write)
        found = topic_propagation(recurrent, baseline, tokenizer, model, tokens, num_contexts=60, num_samples=3)
    assert given == [[6] * 60, [1] * 60]
    assert found["divergence"]["recurrent"] < found["divergence"]["baseline"]
    assert 0.6 < found["share"] < 0.9  # about half of the random words are of the right topic too
    assert found["p_value"] < 1e-3
    assert len(found["samples"]) == 3
    assert set(found["samples"][0]) == {"context", "token", "topic", "recurrent", "baseline", "divergence"}
    real = topic_propagation(recurrent, baseline, tokenizer, model, tokens, 4, 10, 5, progress=False)
    assert (real["contexts"], real["context_length"]) == (4, 10)
    for wrong, message in (
        ({"context_length": 7}, "`context_length` must be whole windows of 5 tokens with an overlap of 0, got 7"),
        ({"num_contexts": 0}, "`num_contexts` must be at least 1, got 0"),
        ({"tokens": Listed(3)}, "`tokens` must have a document of at least 6 tokens, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            topic_propagation(
                **{"recurrent": recurrent, "baseline": baseline, "tokenizer": tokenizer, "topics": model}
                | {"tokens": tokens, **wrong}
            )
    with pytest.raises(ValueError, match="`num_topics` must be at least 2, got 1"):
        TopicModel(train, num_topics=1)


def test_greedy_continuations_are_the_likeliest_tokens() -> None:
    model, rows = tiny_model(torch.float64), [np.array([5, 9, 7, 8, 3, 4]), np.array([6, 6, 5, 4, 9, 30])]
    found = topics.greedy(model, rows, 7, 1, progress=False)
    ids = torch.tensor(np.stack(rows))
    for step in range(7):
        logits = model(ids).logits[:, -1]
        logits[:, 2] = -math.inf  # the end of a text, which is put off
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        assert found[:, step].tolist() == ids[:, -1].tolist()


def test_a_missing_package_is_told_with_the_way_to_get_it() -> None:
    with pytest.raises(
        ImportError, match=r"no_such_package is needed for this: pip install 'hf-recurrence\[evaluate\]'"
    ):
        topics.needed("no_such_package")
