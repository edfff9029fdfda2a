"""What every model is put through, and what the tests build their small models of."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_recurrence import (
    BlockRecurrentConfig,
    BlockRecurrentForCausalLM,
    RecurrentGPT2Config,
    RecurrentGPT2LMHeadModel,
    RecurrentRobertaConfig,
    RecurrentRobertaForQuestionAnswering,
    SRUBertConfig,
    SRUBertForMaskedLM,
)


# Summing in another order changes the last bits of float64; logits and gradients here are of the order of 1.
EXACT = {"rtol": 1e-10, "atol": 1e-12}

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 3,
    "n_head": 2,
    "recurrence_hidden_size": 12,
    "recurrence_num_hidden_layers": 2,
    "window_size": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with RoBERTa's special tokens at RoBERTa's ids."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    names = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", **names)


def tiny_config(**changes: Any) -> RecurrentGPT2Config:
    return RecurrentGPT2Config(**{**TINY, **changes})


def tiny_model(dtype: torch.dtype = torch.float64, **changes: Any) -> RecurrentGPT2LMHeadModel:
    """A small model without dropout, its weights large enough for windows and tokens to matter."""
    torch.manual_seed(1)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = RecurrentGPT2LMHeadModel(tiny_config(**{**dropouts, "initializer_range": 0.2, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith(("mix.logits", "recurrence.key")):
            torch.nn.init.normal_(parameter)
    return model.to(dtype).eval()


def block_model(dtype: torch.dtype = torch.float64, **changes: Any) -> BlockRecurrentForCausalLM:
    """A small model without dropout."""
    torch.manual_seed(1)
    settings = {
        "vocab_size": 61,
        "hidden_size": 10,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 4,
        "intermediate_size": 12,
        "window_size": 4,
        "num_states": 3,
        "recurrent_layers": [1],
        "rel_pos_buckets": 4,
        "rel_pos_max_distance": 6,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
    }
    return BlockRecurrentForCausalLM(BlockRecurrentConfig(**{**settings, **changes})).to(dtype).eval()


def roberta_model(dtype: torch.dtype = torch.float64, **changes: Any) -> RecurrentRobertaForQuestionAnswering:
    """A small model without dropout, its weights large enough for windows and tokens to matter."""
    torch.manual_seed(1)
    settings = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "max_position_embeddings": 18,
        "type_vocab_size": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.2,
        "recurrence_hidden_size": 12,
        "window_size": 5,
    }
    model = RecurrentRobertaForQuestionAnswering(RecurrentRobertaConfig(**{**settings, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith(("mix.logits", "recurrence.key", ".bias")):
            torch.nn.init.normal_(parameter)
    return model.to(dtype).eval()


SRU_TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}


def sru_model(dtype: torch.dtype = torch.float64, head: Any = SRUBertForMaskedLM, **changes: Any) -> Any:
    """A small model without dropout, its weights large enough for the recurrence to matter."""
    torch.manual_seed(1)
    settings = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
    model = head(SRUBertConfig(**{**SRU_TINY, **settings, **changes}))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases, slopes and offsets, which begin at 0 and 1
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def random_ids(*shape: int, vocab_size: int = 61) -> torch.Tensor:
    return torch.randint(3, vocab_size, shape)


def read_in_pieces(model: Any, ids: torch.Tensor, sizes: Iterable[int], mask: torch.Tensor | None = None) -> tuple:
    """Logits and cache of a text that is given to the model piece by piece."""
    cache, logits, start = None, [], 0
    for size in [*sizes, None]:
        stop = ids.shape[1] if size is None else start + size
        if stop > start:
            piece = None if mask is None else mask[:, start:stop]
            out = model(ids[:, start:stop], attention_mask=piece, past_key_values=cache, use_cache=True)
            cache, start = out.past_key_values, stop
            logits.append(out.logits)
    return torch.cat(logits, 1), cache


def assert_same_gradients(model: Any, first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor], **close):
    """Both losses, and the gradients of every parameter, by name."""
    found = []
    for run in (first, second):
        model.zero_grad()
        loss = run()
        loss.backward()
        found.append((loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}))
    (loss_a, grads_a), (loss_b, grads_b) = found
    torch.testing.assert_close(loss_a, loss_b, **(close or EXACT))
    for name, gradient in grads_a.items():
        torch.testing.assert_close(
            gradient, grads_b[name], **(close or EXACT), msg=lambda text, name=name: f"{name}: {text}"
        )


# causal language models, and the others
MODELS: dict[str, Callable[..., Any]] = {"recurrent_gpt2": tiny_model, "block_recurrent": block_model}
ENCODERS: dict[str, Callable[..., Any]] = {"recurrent_roberta": roberta_model, "sru_bert": sru_model}
ALL_MODELS = {**MODELS, **ENCODERS}
