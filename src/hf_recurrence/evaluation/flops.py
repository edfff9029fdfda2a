"""Floating point operations a token, a multiplication with its addition counting as two."""

from ..configuration_block_recurrent import BlockRecurrentConfig


def block_recurrent_flops(config: BlockRecurrentConfig, logits: bool = False) -> float:
    """FLOPs a token of a forward pass over whole blocks, without or with the logits; training takes thrice as many.

    >>> round(block_recurrent_flops(BlockRecurrentConfig()) / 1e6, 1)
    377.5
    """
    size, inner, width = config.hidden_size, config.num_attention_heads * config.head_dim, config.window_size
    states, hidden, num_layers = config.num_states, config.intermediate_size, config.num_hidden_layers
    total = float(num_layers * (2 * (4 * size * inner + 2 * size * hidden) + 8 * width * inner))
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
