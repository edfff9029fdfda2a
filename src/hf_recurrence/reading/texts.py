# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Texts of any length read into a cache, continued from it, and asked, in memory that they do not add to."""

import os
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForQuestionAnswering, AutoTokenizer, TextStreamer

from ..cache_recurrent import BlockRecurrentCache, RecurrentCache
from ..configuration_block_recurrent import BlockRecurrentConfig
from ..configuration_recurrent_gpt2 import RecurrentGPT2Config
from ..configuration_recurrent_roberta import RecurrentRobertaConfig


CACHES: dict[str, Any] = {
    RecurrentGPT2Config.model_type: RecurrentCache,
    BlockRecurrentConfig.model_type: BlockRecurrentCache,
}
SEGMENT = 4096  # tokens of a text that are read at once


def checked_config(checkpoint: str | os.PathLike[str], types: tuple[str, ...]) -> Any:
    """The config of a checkpoint, which must be of one of these types."""
    config = AutoConfig.from_pretrained(checkpoint)
    if config.model_type not in types:
        raise ValueError(
            f"`checkpoint` must be of type {' or '.join(types)}, got {config.model_type} in {checkpoint}."
        )
    return config


def load_causal(checkpoint: str | os.PathLike[str]) -> tuple[Any, Any]:
    """A causal model of ours, ready to read, and its tokenizer."""
    checked_config(checkpoint, tuple(CACHES))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval(), tokenizer


@torch.no_grad()
def read_ids(model: Any, ids: torch.Tensor, cache: Any = None, progress: bool = True) -> Any:
    """The cache after tokens [B, T] of any number have been read, going on from `cache`, in constant memory."""
    if ids.shape[1] == 0:
        raise ValueError(f"`ids` must hold at least one token, got {tuple(ids.shape)}.")
    bar = tqdm(total=ids.shape[1], unit="token", desc="reading", disable=not progress or ids.shape[1] <= SEGMENT)
    with bar:
        for piece in ids.split(SEGMENT, 1):
            cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
            bar.update(piece.shape[1])
    return cache


def read_text(
    checkpoint: str | os.PathLike[str],
    text: str,
    state: str | os.PathLike[str],
    start: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Reads a text and stores what the model knows of it in the file `state`; says how much was read.

    Args:
        start: a file of that kind to go on from.

    ```python
    >>> read_text("my-model", Path("book.txt").read_text(), "book.safetensors")
    {'state': 'book.safetensors', 'tokens': 214067, 'bytes': 1310720}
    ```"""
    parent = Path(state).absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"`state` must be a file in a folder that can be written to, got {os.fspath(state)!r}.")
    model, tokenizer = load_causal(checkpoint)
    cache = CACHES[model.config.model_type].load(start) if start is not None else None
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"].long()
    if ids.shape[1] == 0:
        raise ValueError(f"`text` must hold at least one token, got {text!r}.")
    cache = read_ids(model, ids, cache)
    cache.save(state)
    return {"state": os.fspath(state), "tokens": cache.get_seq_length(), "bytes": Path(state).stat().st_size}


def continue_text(
    checkpoint: str | os.PathLike[str],
    prompt: str,
    state: str | os.PathLike[str] | None = None,
    save_state: str | os.PathLike[str] | None = None,
    stream: bool = False,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """The text that a model writes after a prompt of any length, and how many tokens it read and wrote.

    Args:
        state: a file of `read_text`; the prompt goes on from there.
        save_state: a file for what the model knows at the end.
        stream: whether the text is printed as it comes.
        settings: of `generate`, such as `max_new_tokens` and `do_sample`.
    """
    model, tokenizer = load_causal(checkpoint)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"].long()
    if ids.shape[1] == 0:
        raise ValueError(f"`prompt` must hold at least one token, got {prompt!r}.")
    cache = CACHES[model.config.model_type].load(state) if state is not None else None
    known, num_new = (cache.get_seq_length() if cache is not None else 0), ids.shape[1]
    if num_new > SEGMENT:
        cache, ids = read_ids(model, ids[:, :-1], cache), ids[:, -1:]
    total = known + num_new
    torch.manual_seed(seed)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    written = model.generate(
        ids,
        attention_mask=torch.ones(1, total, dtype=torch.long),
        past_key_values=cache,
        pad_token_id=0 if pad is None else pad,
        return_dict_in_generate=True,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None,
        **settings,
    )
    if save_state is not None:
        written.past_key_values.save(save_state)
    new = written.sequences[0, ids.shape[1] :]
    return {
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "tokens_read": total,
        "tokens_written": len(new),
        "state": None if save_state is None else os.fspath(save_state),
    }


def answer_question(
    checkpoint: str | os.PathLike[str], question: str, document: str, max_answer_length: int = 30
) -> dict[str, Any]:
    """The answer that a document gives to a question; see `RecurrentRobertaForQuestionAnswering.answer`."""
    checked_config(checkpoint, (RecurrentRobertaConfig.model_type,))
    model = AutoModelForQuestionAnswering.from_pretrained(checkpoint).eval()
    return model.answer(AutoTokenizer.from_pretrained(checkpoint), question, document, max_answer_length)
