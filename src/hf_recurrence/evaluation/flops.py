"""Floating point operations a token, a multiplication with its addition counting as two."""

import copy
from itertools import pairwise
from typing import Any

from ..configuration_block_recurrent import BlockRecurrentConfig


def block_recurrent_flops(config: BlockRecurrentConfig, logits: bool = False, masked: bool = True) -> float:
    """FLOPs a token of a forward pass over whole blocks, without or with the logits; training takes thrice as many.

    Without `masked`, the half of the products of queries and keys that a mask throws away is left out.

    >>> round(block_recurrent_flops(BlockRecurrentConfig()) / 1e6, 1)
    377.5
    """
    size, inner, width = config.hidden_size, config.num_attention_heads * config.head_dim, config.window_size
    states, hidden, num_layers = config.num_states, config.intermediate_size, config.num_hidden_layers
    seen = 2 * width if masked else width
    total = float(num_layers * (2 * (4 * size * inner + 2 * size * hidden) + 4 * seen * inner))
    factor = 1 if config.gate_type == "fixed" else 3
    gate = {
        "skip": 2 * inner * size * factor,
        "dual": 2 * inner * size * factor + size * hidden + hidden * size * factor,
        "single": 2 * inner * hidden + hidden * size * factor,
    }[config.gate_config]
    read = 4 * size * inner + 4 * states * inner
    update = states / width * (2 * (4 * size * inner + gate) + 4 * states * inner + 8 * width * inner)
    num_recurrent = len(config.recurrent_layers)
    total += num_recurrent * (read + update)
    if config.feedback:
        total += (num_layers - num_recurrent) * read
    return total + (2 * size * config.vocab_size if logits else 0)


def flops_per_token(
    config: Any,
    window_size: int | None = None,
    overlap: int | None = None,
    logits: bool = False,
    masked: bool = False,
) -> float | None:
    """FLOPs of a forward pass for each token that is read once; None for a type of model that is not known here.

    A window's tokens are divided by those that it adds, `window_size` - `overlap`. That is a window in the middle of a
    text: the first has no state to attend to, and nothing follows the last.

    Args:
        config: of one of the four models, or of a plain GPT-2, BERT or RoBERTa.
        window_size, overlap: by default those of the config, or all positions and 0.
        logits: whether the head counts.
        masked: whether products of queries and keys count that a causal mask throws away. They do for
            `torch.utils.flop_counter`, and do not in the tables of "Adding Recurrence to Pretrained Transformers".

    >>> from transformers import GPT2Config
    >>> f"{flops_per_token(GPT2Config(), window_size=300, overlap=50):.3g}"
    '2.1e+08'
    """
    kind = config.model_type
    if kind == "block_recurrent":
        if overlap:
            raise ValueError(f"`overlap` must be 0 for a model of type 'block_recurrent', got {overlap}.")
        changed = copy.copy(config)
        changed.window_size = config.window_size if window_size is None else window_size
        return block_recurrent_flops(changed, logits, masked)
    if kind not in ("gpt2", "recurrent_gpt2", "bert", "roberta", "recurrent_roberta", "sru_bert"):
        return None
    recurrent = kind in ("recurrent_gpt2", "recurrent_roberta")
    if window_size is None:
        window_size = config.window_size if recurrent else config.max_position_embeddings
    if overlap is None:
        overlap = config.overlap if recurrent else 0
    if not 0 <= overlap < window_size:
        raise ValueError(
            f"`overlap` must be at least 0 and smaller than `window_size` ({window_size}), got {overlap}."
        )
    size, num_layers, causal = config.hidden_size, config.num_hidden_layers, "gpt2" in kind
    seen = window_size / 2 if causal and not masked else window_size
    total = num_layers * (2 * (4 * size**2 + feed_forward_size(config)) + 4 * size * seen)
    if recurrent:
        total += recurrence_flops(config, window_size)
    factor = window_size / (window_size - overlap)
    if logits:
        # a causal model needs none where a window repeats tokens
        total += head_flops(config) / (factor if causal else 1)
    return total * factor


def feed_forward_size(config: Any) -> int:
    """The number of weights of the part of a layer that follows the attention."""
    size = config.hidden_size
    if config.model_type == "sru_bert":
        return (3 if config.recurrence_cell == "swish" else 4) * size * config.recurrence_width
    inner = (config.n_inner or 4 * size) if "gpt2" in config.model_type else config.intermediate_size
    return 2 * size * inner


def recurrence_flops(config: Any, window_size: int) -> float:
    """What the recurrence between windows adds, a token of a window."""
    size, states = config.hidden_size, config.num_recurrent_embeddings
    layers = config.num_hidden_layers if config.insertion_layer == "all" else 1
    maps = 3 if config.model_type == "recurrent_gpt2" else 2  # GPT-2 projects to queries as well
    inner = [config.recurrence_hidden_size] * config.recurrence_num_hidden_layers
    network = sum(a * b for a, b in pairwise([size, *inner, size * states]))
    a_window = 2 * network + layers * states * 2 * maps * size**2
    a_token = layers * 4 * size * states
    if config.pooling_layers == "weighted":
        a_token += 2 * config.num_hidden_layers * size
    if config.pooling == "attention":
        a_token += 4 * size
    return a_token + a_window / window_size


def head_flops(config: Any) -> int:
    """What the head takes a token: the vocabulary's (with BERT's layer before it), or start and end of an answer."""
    if config.model_type == "recurrent_roberta":
        return 2 * 2 * config.hidden_size
    before = 0 if "gpt2" in config.model_type else 2 * config.hidden_size**2
    return 2 * config.hidden_size * config.vocab_size + before


def word_perplexity(bits_per_token: float, num_tokens: int, num_words: int) -> float:
    """The perplexity a word of a text of so many tokens and words.

    >>> round(word_perplexity(3.39, 10_523_460, 6_966_499), 2)  # the test set of PG-19
    34.8
    """
    if num_words < 1:
        raise ValueError(f"`num_words` must be at least 1, got {num_words}.")
    return float(2 ** (bits_per_token * num_tokens / num_words))


__all__ = ["block_recurrent_flops", "flops_per_token", "word_perplexity"]
