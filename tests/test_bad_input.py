"""One clear error for each input that the model cannot work with."""

import pytest
import torch

from tests.common import random_ids, tiny_model


IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Exactly one of `input_ids` and `inputs_embeds`"),
        ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 4, 16)}, "Exactly one of `input_ids` and `inputs_embeds`"),
        ({"input_ids": IDS[:, :0]}, r"`input_ids` must be \[batch, tokens\] with at least one .* got \[2, 0\]"),
        ({"input_ids": IDS[:0]}, r"`input_ids` must be .* got \[0, 4\]"),
        ({"input_ids": IDS[0]}, r"`input_ids` must be .* got \[4\]"),
        ({"input_ids": IDS.float()}, "`input_ids` must be integers, got torch.float32"),
        ({"input_ids": IDS + 51}, r"`input_ids` must be from 0 to `vocab_size` - 1 \(60\), got 61"),
        ({"input_ids": IDS - 4}, r"`input_ids` must be from 0 to `vocab_size` - 1 \(60\), got -1"),
        ({"inputs_embeds": torch.zeros(2, 4, 15)}, r"`inputs_embeds` must have `hidden_size` \(16\) features, got 15"),
        ({"inputs_embeds": torch.zeros(2, 0, 16)}, r"`inputs_embeds` must be .* got \[2, 0, 16\]"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 3)}, r"`attention_mask` must be \[2, 4\].* got \[2, 3\]"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)},
            r"`attention_mask` must be .* got \[2, 1, 4, 4\]",
        ),
        ({"input_ids": IDS, "token_type_ids": IDS[:, :3]}, r"`token_type_ids` must be \[2, 4\] .* got \[2, 3\]"),
        (
            {"input_ids": IDS, "reset": torch.ones(2)},
            r"`reset` must be one boolean a row, \[2\], got .* torch.float32",
        ),
        ({"input_ids": IDS, "reset": torch.ones(3).bool()}, r"`reset` must be one boolean a row, \[2\], got \[3\]"),
        ({"input_ids": IDS, "labels": IDS[:, 1:]}, r"`labels` must be \[2, 4\] as the inputs, got \[2, 3\]"),
        ({"input_ids": IDS, "labels": IDS + 51}, r"`labels` must be from 0 to .* \(60\), or -100, got 61"),
        ({"input_ids": IDS, "shift_labels": IDS - 9}, "`shift_labels` must be from 0 to .*, or -100, got -6"),
        (
            {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 5]])},
            r"`position_ids` must count .* \[0, 1, 2, 5\]",
        ),
        ({"input_ids": IDS, "position_ids": torch.tensor([[3, 4, 5, 6]])}, "`position_ids` must count each document"),
        (
            {"input_ids": IDS, "position_ids": torch.tensor([[0, 1]])},
            r"`position_ids` must be \[2, 4\] .* got \[1, 2\]",
        ),
        (
            {"input_ids": IDS, "reset": [True, False]},
            r"`reset` must be a tensor of one boolean a row, \[2\], got list",
        ),
        ({"input_ids": [[3, 4]]}, "`input_ids` must be a tensor, got list"),
        ({"input_ids": IDS, "attention_mask": [[1]]}, "`attention_mask` must be a tensor, got list"),
        ({"input_ids": IDS, "labels": [[1]]}, "`labels` must be a tensor, got list"),
        ({"input_ids": IDS, "skip_logits": True}, "`skip_logits` must be False without `labels`"),
        ({"inputs_embeds": IDS[..., None]}, "`inputs_embeds` must be floating point, got torch.int64"),
        ({"input_ids": IDS[0], "labels": IDS[0]}, r"`input_ids` must be .* got \[4\]"),
        ({"input_ids": IDS[:, :0], "labels": IDS[:, :0]}, r"`input_ids` must be .* got \[2, 0\]"),
        ({"input_ids": IDS, "labels": IDS, "attention_mask": torch.eye(3, 4)}, "`attention_mask` must be"),
        ({"input_ids": IDS, "labels": IDS, "position_ids": torch.tensor([[0, 1]])}, "`position_ids` must be"),
        (
            {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 2, 3], [0, 2, 3, 4]])},
            r"\[0, 2, 3, 4\]... in row 1",
        ),
        ({"input_ids": IDS, "encoder_hidden_states": torch.zeros(1)}, "`encoder_hidden_states` must be left out"),
    ],
)
def test_the_error_names_argument_rule_and_value(arguments: dict, message: str) -> None:
    model = tiny_model(torch.float32)
    for mode in (model.train(), model.eval()):
        with pytest.raises(ValueError, match=message):
            mode(**arguments)


def test_positions_of_pads_may_be_anything() -> None:
    model = tiny_model(torch.float32)
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
    positions = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
    assert torch.equal(
        model(IDS, attention_mask=mask, position_ids=positions).logits, model(IDS, attention_mask=mask).logits
    )


def test_packed_rows_cannot_continue_a_cache() -> None:
    model = tiny_model()
    cache = model(random_ids(1, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="`past_key_values` must be left out where `position_ids` pack"):
        model(random_ids(1, 4), position_ids=torch.tensor([[4, 5, 0, 1]]), past_key_values=cache)


def test_a_mask_may_cover_the_new_columns_or_all() -> None:
    model = tiny_model()
    for columns in (3, 9):
        cache = model(random_ids(1, 6), use_cache=True).past_key_values
        model(random_ids(1, 3), attention_mask=torch.ones(1, columns), past_key_values=cache)
    with pytest.raises(ValueError, match=r"`attention_mask` must be \[1, 3\] or \[1, 12\] .* got \[1, 4\]"):
        model(random_ids(1, 3), attention_mask=torch.ones(1, 4), past_key_values=cache)
