"""Slow twins of the recurrences, written straight from their definitions as plain loops; run them in float64."""

import math
from typing import Any

import torch


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


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


def hand_on(
    layers: list[torch.Tensor], p: dict[str, torch.Tensor], c: Any, name: str = "transformer.recurrence"
) -> torch.Tensor:
    """What a window gives to the next, [S, D], from the outputs of its layers."""
    if c.pooling_layers == "last":
        tokens = layers[-1]
    else:
        weights = torch.exp(p[f"{name}.mix.logits"])
        weights = weights / weights.sum()
        tokens = sum(weights[i] * layer for i, layer in enumerate(layers))
    if c.pooling == "mean":
        z = sum(tokens) / len(tokens)
    elif c.pooling == "max":
        z = torch.stack([tokens[:, d].max() for d in range(c.hidden_size)])
    else:
        scores = torch.exp(tokens @ p[f"{name}.key"] / math.sqrt(c.hidden_size))
        z = sum(scores[i] * tokens[i] for i in range(len(tokens))) / scores.sum()
    activation = {"gelu_new": gelu_new, "gelu": gelu, "relu": torch.relu}[c.recurrence_activation]
    for i in range(c.recurrence_num_hidden_layers):
        z = activation(p[f"{name}.layers.{i}.weight"] @ z + p[f"{name}.layers.{i}.bias"])
    last = c.recurrence_num_hidden_layers
    z = p[f"{name}.layers.{last}.weight"] @ z + p[f"{name}.layers.{last}.bias"]
    return z.view(c.num_recurrent_embeddings, c.hidden_size)


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


def linear(x: torch.Tensor, p: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def roberta_layer(
    x: torch.Tensor, extra: torch.Tensor | None, p: dict[str, torch.Tensor], layer: int, c: Any
) -> torch.Tensor:
    """One layer of RoBERTa on a window [w, D], with further inputs `extra` [S, D] that are keys and values only."""
    name, size = f"roberta.encoder.layer.{layer}", c.hidden_size // c.num_attention_heads
    sources = x if extra is None else torch.cat([extra, x])
    q = linear(x, p, f"{name}.attention.self.query")
    k, v = (linear(sources, p, f"{name}.attention.self.{part}") for part in ("key", "value"))
    rows = []
    for i in range(len(x)):
        parts = []
        for h in range(c.num_attention_heads):
            a, b = h * size, (h + 1) * size
            scores = torch.stack([(q[i, a:b] * key[a:b]).sum() / math.sqrt(size) for key in k])
            weights = torch.exp(scores - scores.max())
            weights = weights / weights.sum()
            parts.append(sum(weight * value[a:b] for weight, value in zip(weights, v, strict=True)))
        rows.append(torch.cat(parts))
    x = x + linear(torch.stack(rows), p, f"{name}.attention.output.dense")
    x = layer_norm(x, p, f"{name}.attention.output.LayerNorm", c.layer_norm_eps)
    inner = gelu(linear(x, p, f"{name}.intermediate.dense"))
    return layer_norm(x + linear(inner, p, f"{name}.output.dense"), p, f"{name}.output.LayerNorm", c.layer_norm_eps)


def recurrent_roberta(
    p: dict[str, torch.Tensor], c: Any, windows: list[list[int]]
) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Start and end scores [w, 2] of each window, class scores, and the hidden states [w, D] of each window."""
    state, hidden, name = None, [], "roberta.embeddings"
    for ids in windows:
        rows = []
        for place, token in enumerate(ids):
            position = p[f"{name}.position_embeddings.weight"][c.pad_token_id + 1 + place]
            rows.append(
                p[f"{name}.word_embeddings.weight"][token] + p[f"{name}.token_type_embeddings.weight"][0] + position
            )
        x = layer_norm(torch.stack(rows), p, f"{name}.LayerNorm", c.layer_norm_eps)
        layers = []
        for layer in range(c.num_hidden_layers):
            inserted = state is not None and c.insertion_layer in ("all", layer)
            x = roberta_layer(x, state if inserted else None, p, layer, c)
            layers.append(x)
        hidden.append(x)
        state = hand_on(layers, p, c, "roberta.recurrence")
    largest = torch.stack([max(x[0, d] for x in hidden) for d in range(c.hidden_size)])
    return [linear(x, p, "qa_outputs") for x in hidden], linear(largest, p, "class_outputs"), hidden


def answer_loss(
    scores: list[torch.Tensor], classes: torch.Tensor, start: tuple[int, int], end: tuple[int, int], kind: int
) -> torch.Tensor:
    """The loss of one example whose answer is of class `kind` and, if that is 0, lies from `start` to `end`."""
    loss = torch.logsumexp(classes, 0) - classes[kind]
    if kind == 0:
        for column, (window, token) in enumerate((start, end)):
            loss = loss + torch.logsumexp(torch.cat(scores)[:, column], 0) - scores[window][token, column]
    return loss


def cross_entropy(logits: torch.Tensor, targets: list[int]) -> torch.Tensor:
    """The mean of -log p(target), row by row."""
    losses = [torch.logsumexp(row, 0) - row[target] for row, target in zip(logits, targets, strict=True)]
    return sum(losses) / len(losses)


def norm(x: torch.Tensor, p: dict[str, torch.Tensor], name: str, c: Any) -> torch.Tensor:
    if c.norm_type == "layer":
        return layer_norm(x, p, name, c.norm_eps)
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + c.norm_eps) * p[f"{name}.weight"]


def bucket(distance: int, c: Any) -> int:
    half = c.rel_pos_buckets // 2
    if distance < half:
        return distance
    far = math.log(distance / half) / math.log(c.rel_pos_max_distance / half) * half
    return min(half + math.floor(far), c.rel_pos_buckets - 1)


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x**2).sum() + 1e-6)


def read(
    query: torch.Tensor, keys: list, values: list, scale: torch.Tensor | None, biases: list, c: Any
) -> torch.Tensor:
    """One head's attention of one query to a list of keys, 0 if there are none."""
    if not keys:
        return torch.zeros_like(query)
    logits = []
    for key, bias in zip(keys, biases, strict=True):
        if scale is None:
            logits.append((query * key).sum() / math.sqrt(c.head_dim) + bias)
        else:
            logits.append(abs(scale) * ((unit(query) * key).sum() + bias))
    weights = torch.softmax(torch.stack(logits), 0)
    return sum(weights[i] * value for i, value in enumerate(values))


def update(carried: torch.Tensor, inputs: torch.Tensor, p: dict[str, torch.Tensor], name: str, c: Any) -> torch.Tensor:
    """A gate on one state vector."""

    def linear(part: str) -> torch.Tensor:
        bias = p.get(f"{name}.{part}.bias")
        return p[f"{name}.{part}.weight"] @ inputs + (0 if bias is None else bias)

    z = linear("z_proj")
    tanh = c.gate_type == "lstm" if c.gate_z_tanh == "lstm" else c.gate_config == "single"
    z = torch.tanh(z) if tanh else z
    if c.gate_type == "fixed":
        g = torch.sigmoid(p[f"{name}.bias"])
        return g * carried + (1 - g) * z
    return torch.sigmoid(linear("f_proj") + 1) * carried + torch.sigmoid(linear("i_proj") - 1) * z


def block_recurrent(
    p: dict[str, torch.Tensor], c: Any, ids: list[int]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits [T, V] of one document and the states that enter the block after its last full one, block by block."""
    width, heads_, size = c.window_size, c.num_attention_heads, c.head_dim
    before = width if c.empty_cache == "zeros" else 0
    zero = torch.zeros(heads_, size, dtype=torch.float64)
    keys = [
        [zero] * before for _ in range(c.num_hidden_layers)
    ]  # a layer's keys since `before` tokens before the text
    values = [[zero] * before for _ in range(c.num_hidden_layers)]
    states = {layer: p[f"model.layers.{layer}.cell.initial"] for layer in c.recurrent_layers}
    outputs = []
    for start in range(0, len(ids), width):
        block = list(range(start, min(start + width, len(ids))))
        xs = [p["model.embed_tokens.weight"][ids[i]] for i in block]
        marked, state_keys, state_values = {}, {}, {}
        for layer, state in states.items():
            cell = f"model.layers.{layer}.cell"
            marked[layer] = norm(state, p, f"{cell}.norm", c) + p[f"{cell}.ids"]
            k = (marked[layer] @ p[f"{cell}.k_proj.weight"].T).view(-1, heads_, size)
            state_keys[layer] = [[unit(h) if c.qk_norm else h for h in row] for row in k]
            state_values[layer] = (marked[layer] @ p[f"{cell}.v_proj.weight"].T).view(-1, heads_, size)
        for layer in range(c.num_hidden_layers):
            name = f"model.layers.{layer}"
            reads = layer if layer in states else (c.recurrent_layers[-1] if c.feedback else None)
            normed = [norm(x, p, f"{name}.norm_1", c) for x in xs]
            *w_queries, w_key, w_value = p[f"{name}.qkv_proj.weight"].split(heads_ * size)
            for u in normed:
                k = (w_key @ u).view(heads_, size)
                keys[layer].append(torch.stack([unit(h) if c.qk_norm else h for h in k]))
                values[layer].append((w_value @ u).view(heads_, size))
            new = []
            for i, x, u in zip(block, xs, normed, strict=True):
                least = 0 if c.attend_to_self else 1
                seen = [j for j in range(i - least - width + 1, i - least + 1) if j >= -before]
                parts = []
                q = (w_queries[0] @ u).view(heads_, size)
                for h in range(heads_):
                    biases = [p[f"{name}.position_bias"][h, bucket(i - j, c)] for j in seen]
                    scale = p[f"{name}.scale"][h] if c.qk_norm else None
                    found = [keys[layer][j + before][h] for j in seen], [values[layer][j + before][h] for j in seen]
                    parts.append(read(q[h], *found, scale, biases, c))
                if reads is not None:
                    q = (w_queries[1] @ u).view(heads_, size)
                    for h in range(heads_):
                        scale = p[f"{name}.state_scale"][h] if c.qk_norm else None
                        found = [row[h] for row in state_keys[reads]], [row[h] for row in state_values[reads]]
                        parts.append(read(q[h], *found, scale, [0.0] * c.num_states, c))
                x = x + p[f"{name}.o_proj.weight"] @ torch.cat(parts)
                inner = torch.relu(p[f"{name}.up_proj.weight"] @ norm(x, p, f"{name}.norm_2", c))
                new.append(x + p[f"{name}.down_proj.weight"] @ inner)
            if layer in states and len(block) == width:
                states[layer] = next_states(
                    states[layer],
                    marked[layer],
                    state_keys[layer],
                    state_values[layer],
                    keys[layer][-2 * width :],
                    values[layer][-2 * width :],
                    p,
                    name,
                    c,
                )
            xs = new
        outputs += [norm(x, p, "model.norm", c) for x in xs]
    return torch.stack(outputs) @ p["lm_head.weight"].T * c.logit_scale, states


def next_states(state, marked, own_keys, own_values, keys, values, p, name, c) -> torch.Tensor:
    """The states after a block, from the keys and values of it and of the block before."""
    cell, heads_ = f"{name}.cell", c.num_attention_heads
    rows = []
    for s in range(c.num_states):
        parts = []
        for kind, scale_name, (ks, vs) in (
            ("self_q_proj", "self_scale", (own_keys, own_values)),
            ("token_q_proj", "token_scale", (keys, values)),
        ):
            q = (p[f"{cell}.{kind}.weight"] @ marked[s]).view(heads_, -1)
            for h in range(heads_):
                scale = p[f"{cell}.{scale_name}"][h] if c.qk_norm else None
                parts.append(read(q[h], [k[h] for k in ks], [v[h] for v in vs], scale, [0.0] * len(ks), c))
        inputs, carried = torch.cat(parts), state[s]
        if c.gate_config != "single":
            carried = update(carried, inputs, p, f"{cell}.attention_gate", c)
        if c.gate_config != "skip":
            inputs = norm(carried, p, f"{cell}.mlp_norm", c) if c.gate_config == "dual" else inputs
            carried = update(carried, torch.relu(p[f"{cell}.up_proj.weight"] @ inputs), p, f"{cell}.mlp_gate", c)
        rows.append(carried)
    return torch.stack(rows)


def swish_rnn(x: torch.Tensor, slope: Any, offset: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [T, D] of one row x [T, D] after those of `state` [S, D], S steps at once, and the last S of them."""
    steps, states = len(state), list(state)
    for value in x:
        u = states[-steps] - value
        states.append(u / (1 + torch.exp(-(slope * u + offset))) + value)
    return torch.stack([x.new_zeros(x.shape[1]), *states[steps:]])[1:], torch.stack(states[-steps:])


def sru(
    x: torch.Tensor, forget: torch.Tensor, weight: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States [T, D] of one row, those S steps before each, and the last S of them."""
    steps, states, before = len(state), list(state), []
    for value, gate in zip(x, forget, strict=True):
        before.append(states[-steps])
        f = 1 / (1 + torch.exp(-(gate + weight * before[-1])))
        states.append(f * before[-1] + (1 - f) * value)
    none = x.new_zeros(x.shape[1])
    return torch.stack([none, *states[steps:]])[1:], torch.stack([none, *before])[1:], torch.stack(states[-steps:])


def sru_bert_recurrence(x: torch.Tensor, p: dict[str, torch.Tensor], name: str, c: Any, layer: int) -> torch.Tensor:
    """What replaces the feed-forward network of a layer, on the real tokens of one row [T, D]."""
    projected = {}
    for part in ("in", "gate", "forget", "reset"):
        if f"{name}.{part}_proj.weight" in p:
            bias = p.get(f"{name}.{part}_proj.bias", 0)
            projected[part] = x @ p[f"{name}.{part}_proj.weight"].T + bias
    width = c.recurrence_width
    halves = [(0, width, c.recurrence_direction == "alternate" and layer % 2 == 1)]
    if c.recurrence_direction == "bidirectional":
        halves = [(0, width // 2, False), (width // 2, width, True)]
    outputs = []
    for start, stop, backwards in halves:
        rows = {part: value[:, start:stop] for part, value in projected.items()}
        rows = {part: value.flip(0) if backwards else value for part, value in rows.items()}
        own = ("bias", "slope", "offset", "forget_weight", "reset_weight")
        weights = {key: p[f"{name}.{key}"][start:stop] for key in own if f"{name}.{key}" in p}
        state = x.new_zeros(c.recurrence_steps, stop - start)
        if c.recurrence_cell == "swish":
            states, _ = swish_rnn(rows["in"], weights.get("slope", 1), weights.get("offset", 0), state)
            h = (states + weights["bias"]) / (1 + torch.exp(-rows["gate"]))
        else:
            states, before, _ = sru(rows["in"], rows["forget"], weights["forget_weight"], state)
            h = states / (1 + torch.exp(-(rows["reset"] + weights["reset_weight"] * before)))
        outputs.append(h.flip(0) if backwards else h)
    return torch.cat(outputs, -1) @ p[f"{name}.out_proj.weight"].T + p[f"{name}.out_proj.bias"]


def sru_bert(
    p: dict[str, torch.Tensor], c: Any, ids: list[int], types: list[int], positions: list[int]
) -> torch.Tensor:
    """Logits [T, V] of the masked-LM head for the real tokens of one row."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    x = p["bert.embeddings.word_embeddings.weight"][ids] + p["bert.embeddings.token_type_embeddings.weight"][types]
    x = x + p["bert.embeddings.position_embeddings.weight"][positions]
    x = layer_norm(x, p, "bert.embeddings.LayerNorm", c.layer_norm_eps)
    size = c.hidden_size // c.num_attention_heads
    for layer in range(c.num_hidden_layers):
        name = f"bert.encoder.layer.{layer}"
        q, k, v = (linear(x, f"{name}.attention.self.{part}") for part in ("query", "key", "value"))
        heads = []
        for start in range(0, c.hidden_size, size):
            part = slice(start, start + size)
            heads.append(torch.softmax(q[:, part] @ k[:, part].T / math.sqrt(size), -1) @ v[:, part])
        attended = linear(torch.cat(heads, -1), f"{name}.attention.output.dense") + x
        attended = layer_norm(attended, p, f"{name}.attention.output.LayerNorm", c.layer_norm_eps)
        x = attended + sru_bert_recurrence(attended, p, f"{name}.recurrence", c, layer)
        x = layer_norm(x, p, f"{name}.output.LayerNorm", c.layer_norm_eps)
    x = linear(x, "cls.predictions.transform.dense")
    x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    x = layer_norm(x, p, "cls.predictions.transform.LayerNorm", c.layer_norm_eps)
    return x @ p["bert.embeddings.word_embeddings.weight"].T + p["cls.predictions.bias"]
