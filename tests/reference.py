"""Slow twins of the recurrences, written straight from their definitions as plain loops; run them in float64."""

import math
from typing import Any

import torch


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(x: torch.Tensor, p: dict[str, torch.Tensor], name: str, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * p[f"{name}.weight"] + p[f"{name}.bias"]


def windows_of(length: int, window_size: int, overlap: int) -> list[tuple[int, int]]:
    """The first and the last token, exclusive, of every window."""
    found = [(0, min(window_size, length))]
    while found[-1][1] < length:
        start = found[-1][0] + window_size - overlap
        found.append((start, min(start + window_size, length)))
    return found


def block(x: torch.Tensor, extra: torch.Tensor | None, p: dict[str, torch.Tensor], layer: int, c: Any) -> torch.Tensor:
    """One layer of GPT-2 on a window [w, D], with further inputs `extra` [S, D] that are keys and values only."""
    name, heads, size = f"transformer.h.{layer}", c.n_head, c.n_embd // c.n_head
    sources = x if extra is None else torch.cat([extra, x])
    first = len(sources) - len(x)
    normed = layer_norm(sources, p, f"{name}.ln_1", c.layer_norm_epsilon)
    projected = normed @ p[f"{name}.attn.c_attn.weight"] + p[f"{name}.attn.c_attn.bias"]
    q, k, v = projected.split(c.n_embd, -1)
    rows = []
    for i in range(len(x)):
        parts = []
        for h in range(heads):
            a, b = h * size, (h + 1) * size
            seen = first + i + 1  # all further inputs, and the tokens up to this one
            scores = torch.stack([(q[first + i, a:b] * k[j, a:b]).sum() / math.sqrt(size) for j in range(seen)])
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            parts.append(sum(weights[j] * v[j, a:b] for j in range(seen)))
        rows.append(torch.cat(parts))
    x = x + torch.stack(rows) @ p[f"{name}.attn.c_proj.weight"] + p[f"{name}.attn.c_proj.bias"]
    inner = layer_norm(x, p, f"{name}.ln_2", c.layer_norm_epsilon)
    inner = gelu_new(inner @ p[f"{name}.mlp.c_fc.weight"] + p[f"{name}.mlp.c_fc.bias"])
    return x + inner @ p[f"{name}.mlp.c_proj.weight"] + p[f"{name}.mlp.c_proj.bias"]


def hand_on(layers: list[torch.Tensor], p: dict[str, torch.Tensor], c: Any) -> torch.Tensor:
    """What a full window gives to the next, [S, D], from the outputs of its layers."""
    name = "transformer.recurrence"
    if c.pooling_layers == "last":
        tokens = layers[-1]
    else:
        weights = torch.exp(p[f"{name}.mix.logits"])
        weights = weights / weights.sum()
        tokens = sum(weights[i] * layer for i, layer in enumerate(layers))
    if c.pooling == "mean":
        z = sum(tokens) / len(tokens)
    elif c.pooling == "max":
        z = torch.stack([tokens[:, d].max() for d in range(c.n_embd)])
    else:
        scores = torch.exp(tokens @ p[f"{name}.key"] / math.sqrt(c.n_embd))
        z = sum(scores[i] * tokens[i] for i in range(len(tokens))) / scores.sum()
    activation = {"gelu_new": gelu_new, "relu": torch.relu}[c.recurrence_activation]
    for i in range(c.recurrence_num_hidden_layers):
        z = activation(p[f"{name}.layers.{i}.weight"] @ z + p[f"{name}.layers.{i}.bias"])
    last = c.recurrence_num_hidden_layers
    z = p[f"{name}.layers.{last}.weight"] @ z + p[f"{name}.layers.{last}.bias"]
    return z.view(c.num_recurrent_embeddings, c.n_embd)


def recurrent_gpt2(p: dict[str, torch.Tensor], c: Any, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [T, V] of one document, each from the earliest window that holds its token, and the states handed on."""
    logits: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for start, stop in windows_of(len(ids), c.window_size, c.overlap):
        x = torch.stack([p["transformer.wte.weight"][t] for t in ids[start:stop]])
        x = x + p["transformer.wpe.weight"][: stop - start]
        layers = []
        for layer in range(c.n_layer):
            inserted = states and c.insertion_layer in ("all", layer)
            x = block(x, states[-1] if inserted else None, p, layer, c)
            layers.append(x)
        layers[-1] = layer_norm(x, p, "transformer.ln_f", c.layer_norm_epsilon)
        rows = layers[-1] @ p["lm_head.weight"].T
        logits += list(rows[len(logits) - start :])
        if stop - start == c.window_size:
            states.append(hand_on(layers, p, c))
    return torch.stack(logits), states


def cross_entropy(logits: torch.Tensor, targets: list[int]) -> torch.Tensor:
    """The mean of -log p(target), row by row."""
    losses = [torch.logsumexp(row, 0) - row[target] for row, target in zip(logits, targets, strict=True)]
    return sum(losses) / len(losses)
