"""Pooling, layer weights and the two-pass loss against their definitions."""

import pytest
import torch

from hf_recurrence import RecurrentGPT2LMHeadModel, RecurrentRobertaConfig, RecurrentRobertaModel
from hf_recurrence.recurrence import WindowRecurrence, mix_layers, pool_attention, pool_max, pool_mean
from tests import reference
from tests.common import EXACT, tiny_config, tiny_model


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 7])
def test_pooling_is_what_its_name_says(window: int, width: int) -> None:
    tokens, key = torch.randn(3, window, width).double(), torch.randn(width).double()
    torch.testing.assert_close(pool_mean(tokens), sum(tokens.unbind(1)) / window, **EXACT)
    torch.testing.assert_close(pool_max(tokens), tokens.max(1).values, **EXACT)
    scores = torch.exp((tokens * key).sum(-1) / width**0.5)
    torch.testing.assert_close(
        pool_attention(tokens, key), (scores[..., None] * tokens).sum(1) / scores.sum(1)[:, None], **EXACT
    )
    torch.testing.assert_close(pool_attention(tokens, torch.zeros_like(key)), pool_mean(tokens), **EXACT)


def test_pooling_with_a_mask_is_that_of_the_tokens_in_it() -> None:
    tokens, key = torch.randn(4, 7, 3).double(), torch.randn(3).double()
    mask = torch.tensor(
        [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1]]
    ).bool()
    for pool in (pool_mean, pool_max, lambda *inputs: pool_attention(inputs[0], key, *inputs[1:])):
        found = pool(tokens.masked_fill(~mask.unsqueeze(-1), 1e6), mask)
        expected = torch.cat([pool(row[real][None]) for row, real in zip(tokens, mask, strict=True)])
        torch.testing.assert_close(found, expected, **EXACT)


def test_layer_weights_start_equal() -> None:
    layers = [torch.randn(2, 3, 4).double() for _ in range(5)]
    torch.testing.assert_close(mix_layers(layers, torch.zeros(5).double()), sum(layers) / 5, **EXACT)
    chosen = mix_layers(layers, torch.tensor([0, 0, 1e3, 0, 0]).double())
    torch.testing.assert_close(chosen, layers[2], **EXACT)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pooling": "max"},
        {"pooling": "attention"},
        {"pooling_layers": "last"},
        {"num_recurrent_embeddings": 3},
        {"recurrence_num_hidden_layers": 0},
        {"recurrence_activation": "relu"},
    ],
)
def test_what_a_window_hands_on_equals_its_twin(changes: dict) -> None:
    model = tiny_model(**changes)
    layers = [torch.randn(1, 5, 16).double() for _ in range(3)]
    module: WindowRecurrence = model.transformer.recurrence
    found = module(module.token_vectors(layers))[0]
    parameters = dict(model.named_parameters())
    torch.testing.assert_close(
        found, reference.hand_on([layer[0] for layer in layers], parameters, model.config), **EXACT
    )


def test_two_windows_hand_on_clearly_different_embeddings_when_new() -> None:
    """At GPT-2's std of 0.02 the feed-forward would make them nearly the same, and nothing would be learned."""
    for window_size in (8, 32, 64):
        config = tiny_config(
            n_positions=64,
            window_size=window_size,
            n_embd=64,
            n_layer=3,
            vocab_size=1000,
            recurrence_hidden_size=200,
            recurrence_num_hidden_layers=3,
        )
        model = RecurrentGPT2LMHeadModel(config).eval()
        with torch.no_grad():
            states = model(torch.randint(1000, (8, window_size)), use_cache=True).past_key_values.state.flatten(1)
        distances = torch.stack([(a - b).norm() / a.norm() for i, a in enumerate(states) for b in states[:i]])
        assert distances.median() > 0.5, (window_size, distances)
        for layer in model.transformer.recurrence.layers:
            torch.nn.init.normal_(layer.weight, std=0.02)
        with torch.no_grad():
            small = model(torch.randint(1000, (8, window_size)), use_cache=True).past_key_values.state
        assert small.std() < 0.01 * states.std()


@pytest.mark.parametrize("window_size", [8, 32, 128])
def test_the_feed_forward_of_a_new_encoder_keeps_windows_as_different_as_they_are(window_size: int) -> None:
    """Types and positions, which all windows share, make up most of a new RoBERTa's mean; without them it is clear."""
    shape = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = RecurrentRobertaModel(RecurrentRobertaConfig(**shape, window_size=window_size)).eval()

    def median_distances() -> list[float]:
        with torch.no_grad():
            vectors = model(torch.randint(3, 1000, (8, window_size))).last_hidden_state
            found = (pool_mean(vectors), model.recurrence(vectors).flatten(1))
        pairs = [[(a - b).norm() / a.norm() for i, a in enumerate(of) for b in of[:i]] for of in found]
        return [torch.stack(distances).median().item() for distances in pairs]

    pooled, handed_on = median_distances()
    assert handed_on > 0.7 * pooled
    for embeddings in (model.embeddings.token_type_embeddings, model.embeddings.position_embeddings):
        torch.nn.init.zeros_(embeddings.weight)
    assert median_distances()[1] > 0.5
