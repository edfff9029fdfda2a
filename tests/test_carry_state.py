"""The state of a step is where the next one begins, with the standard Trainer."""

import gc
import json
import shutil

import pytest
import torch
from transformers import Trainer, TrainerCallback

from hf_recurrence.data import Lanes, collate_lanes
from hf_recurrence.training import CarryState, last_whole_checkpoint
from tests.common import EXACT, MODELS, random_ids
from tests.lane_worker import main as run_worker
from tests.lanes import ListTokens, lane_trainer, launch, losses, random_documents


def batches(run: Trainer, count: int) -> list[dict]:
    lanes, size = iter(run.train_dataset), run.train_dataset.num_lanes
    return [collate_lanes([next(lanes) for _ in range(size)]) for _ in range(count)]


def plain_steps(run: Trainer, steps: list[list[dict]]) -> list[float]:
    """The losses of SGD over the batches, those of a step together, the state handed on by hand."""
    model, cache, found = run.model.train(), None, []
    for parts in steps:
        items = sum((part["shift_labels"] != -100).sum() for part in parts)
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            out = model(**part, past_key_values=cache, use_cache=True, num_items_in_batch=items)
            cache, total = out.past_key_values, total + out.loss
        total.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= run.args.learning_rate * parameter.grad
        model.zero_grad()
        found.append(total.item())
    return found


def assert_same_weights(one: torch.nn.Module, two: torch.nn.Module) -> None:
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(
            parameter, two.get_parameter(name), **EXACT, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_steps_go_on_where_the_last_one_ended(kind: str, checkpointing: bool, accumulation: int, tmp_path) -> None:
    settings = {"gradient_checkpointing": checkpointing, "gradient_accumulation_steps": accumulation, "max_steps": 4}
    run = lane_trainer(tmp_path, kind, **settings)
    run.train()
    twin = lane_trainer(tmp_path, kind)
    found = batches(twin, 4 * accumulation)
    assert any(part["reset"].any() and not part["reset"].all() for part in found)
    steps = [found[first : first + accumulation] for first in range(0, len(found), accumulation)]
    assert losses(run) == pytest.approx(plain_steps(twin, steps), rel=1e-6)  # Trainer sums losses in float32
    assert_same_weights(run.model, twin.model)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_carried_steps_are_one_pass_with_the_state_detached_between(kind: str, checkpointing: bool) -> None:
    """Losses and gradients; the pass over both segments gives the losses of the second its own graph only."""
    model = MODELS[kind]().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids = random_ids(2, 16)
    targets = ids.roll(-1, 1)
    parts = [slice(0, 8), slice(8, 16)]
    found = []
    with CarryState().attached(model):
        for number, part in enumerate(parts):
            reset = torch.full((2,), number == 0)
            out = model(input_ids=ids[:, part], shift_labels=targets[:, part], reset=reset)
            out.loss.backward()
            found.append(out.loss.item())
    carried = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    # in evaluation mode there is one pass over both, whose losses have to be the same
    whole = model.eval()(input_ids=ids).logits.log_softmax(-1).gather(2, targets[..., None])[..., 0]
    assert found == pytest.approx([-whole[:, part].mean().item() for part in parts], rel=1e-10)
    # the gradient is that of the two segments, the second with constants for what came before it
    cache = None
    for part in parts:
        out = model.eval()(
            input_ids=ids[:, part], shift_labels=targets[:, part], past_key_values=cache, use_cache=True
        )
        out.loss.backward()
        cache = out.past_key_values
        kept = [*cache.tensors.values(), *(tensor for pair in cache.keys_values() for tensor in pair)]
        assert not any(tensor.requires_grad for tensor in kept)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            carried[name], parameter.grad, **EXACT, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", MODELS)
def test_the_state_matters(kind: str, tmp_path) -> None:
    """Without it the losses of the same steps are others."""
    settings = {"max_steps": 3, "learning_rate": 0.0}
    run, without = lane_trainer(tmp_path, kind, **settings), lane_trainer(tmp_path, kind, callbacks=[], **settings)
    run.train()
    without.train()
    assert losses(run)[0] == losses(without)[0]
    assert losses(run)[1] != pytest.approx(losses(without)[1], rel=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_a_document_gives_the_losses_it_gives_alone(kind: str, tmp_path) -> None:
    """Rows begin anew where documents do."""
    documents = random_documents([14, 9, 20, 3, 8])
    run = lane_trainer(tmp_path, kind)
    lanes = Lanes(documents, 2, 6)
    model, total = run.model.eval(), 0.0
    with CarryState().attached(model), torch.no_grad():
        rows = iter(lanes)
        for _ in range(lanes.num_steps):
            out = model(**collate_lanes([next(rows), next(rows)]), num_items_in_batch=1)
            total += out.loss.item()
    alone = 0.0
    for ids in documents.documents:
        row = torch.tensor(ids, dtype=torch.long)[None]
        alone += model(input_ids=row, labels=row, num_items_in_batch=1).loss.item() if row.shape[1] > 1 else 0.0
    assert total == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("kind", MODELS)
def test_evaluation_begins_afresh_and_leaves_training_untouched(kind: str, tmp_path) -> None:
    plain = lane_trainer(tmp_path / "plain", kind)
    plain.train()
    run = lane_trainer(tmp_path / "run", kind, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    run.train()
    assert losses(run) == losses(plain)
    found = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert len(found) == 7
    with CarryState().attached(run.model):
        assert [run.evaluate()["eval_loss"] for _ in range(2)] == [found[-1]] * 2
    again = lane_trainer(tmp_path / "run", kind)
    with CarryState().attached(again.model):
        assert again.evaluate()["eval_loss"] == found[0]


class Stop(TrainerCallback):
    """Ends a run as if it had been killed, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_has_the_losses_of_one_never_interrupted(kind: str, accumulation: int, tmp_path) -> None:
    """With dropout, over the end of an epoch, states, places in the data and random numbers all come back."""
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    dropout = dropout if kind == "recurrent_gpt2" else {"dropout": 0.1, "attention_dropout": 0.1}
    settings = {
        "kind": kind,
        "model_changes": dropout,
        "max_steps": 16 if accumulation == 1 else 9,
        "gradient_accumulation_steps": accumulation,
        "save_strategy": "steps",
        "save_steps": 3,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
    }
    whole = lane_trainer(tmp_path / "whole", **settings)
    assert whole.train_dataset.num_steps < settings["max_steps"] * accumulation  # an epoch ends in between
    whole.train()
    for step in (4, 14 if accumulation == 1 else 7):
        folder = tmp_path / f"parts-{step}"
        lane_trainer(folder, **settings, callbacks=[CarryState(), Stop(step)]).train()
        second = lane_trainer(folder, **settings)
        checkpoint = last_whole_checkpoint(folder)
        assert checkpoint == str(folder / f"checkpoint-{step - step % 3}")
        second.train(resume_from_checkpoint=checkpoint)
        assert losses(second) == losses(whole)
        for name, parameter in whole.model.named_parameters():
            assert torch.equal(parameter, second.model.get_parameter(name)), name


def test_a_folder_elsewhere_can_be_resumed_from(tmp_path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    first = lane_trainer(tmp_path / "first", **settings)
    first.train()
    checkpoint = tmp_path / "first" / "checkpoint-4"
    second = lane_trainer(tmp_path / "second", callbacks=[CarryState(resume_from_checkpoint=checkpoint)])
    second.train(resume_from_checkpoint=str(checkpoint))
    assert losses(second) == losses(first)
    with pytest.raises(ValueError, match="must hold carry_state_0_of_1.safetensors, .* got none"):
        lane_trainer(tmp_path / "third").train(resume_from_checkpoint=str(checkpoint))
    lane_trainer(tmp_path / "other", **settings, learning_rate=0.2).train()
    with pytest.raises(ValueError, match="which holds another run"):
        lane_trainer(tmp_path / "other").train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_is_whole_once_all_processes_have_written(tmp_path) -> None:
    assert last_whole_checkpoint(tmp_path / "nowhere") is None
    for step, names in {2: ["0_of_2", "1_of_2"], 4: ["0_of_1"], 10: ["1_of_2"], 12: []}.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name in names:
            (tmp_path / f"checkpoint-{step}" / f"carry_state_{name}.safetensors").touch()
        (tmp_path / f"checkpoint-{step}" / "carry_state_0_of_2.safetensors.partial").touch()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "carry_state_0_of_1.safetensors").unlink()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")


def test_hooks_and_states_are_gone_after_training(tmp_path) -> None:
    carry = CarryState()
    run = lane_trainer(tmp_path, callbacks=[carry])
    run.train()
    assert not run.model._forward_hooks
    assert not run.model._forward_pre_hooks
    assert carry.training is None
    assert run.model.train()(random_ids(1, 5)).past_key_values is None


# -- the user is told ------------------------------------------------------------------------------------------------
def test_rows_without_reset_are_refused(tmp_path) -> None:
    run = lane_trainer(tmp_path)
    run.data_collator = lambda rows: {k: v for k, v in collate_lanes(rows).items() if k != "reset"}
    with pytest.raises(ValueError, match="`reset` must be in every batch"):
        run.train()


def test_shuffled_rows_are_refused(tmp_path) -> None:
    run = lane_trainer(tmp_path)
    run.train_dataset = [{"input_ids": ids, "labels": ids, "reset": True} for ids in random_ids(8, 6)]
    with pytest.raises(ValueError, match="must come in lanes, .* got .* SeedableRandomSampler"):
        run.train()


def test_another_number_of_rows_is_refused(tmp_path) -> None:
    run = lane_trainer(tmp_path, per_device_train_batch_size=1)
    with pytest.raises(ValueError, match=r"`num_lanes` must be `per_device_train_batch_size` times .* \(1\), got 2"):
        run.train()
    run = lane_trainer(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=1)
    with pytest.raises(ValueError, match="`per_device_eval_batch_size`"):
        run.train()
    model = MODELS["recurrent_gpt2"]().train()
    with CarryState().attached(model):
        model(input_ids=random_ids(3, 6), reset=torch.ones(3, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"as many rows as the one before \(3\), .* got 2"):
            model(input_ids=random_ids(2, 6), reset=torch.zeros(2, dtype=torch.bool))


def test_a_first_batch_that_begins_inside_a_document_is_refused() -> None:
    model = MODELS["block_recurrent"]().train()
    with CarryState().attached(model), pytest.raises(ValueError, match=r"all rows of the first batch, got .* \[1\]"):
        model(input_ids=random_ids(2, 6), reset=torch.tensor([True, False]))


def test_lanes_without_carry_state_are_told_of(tmp_path, caplog) -> None:
    gc.collect()  # runs of other tests that ended with an error
    lane_trainer(tmp_path, callbacks=[], max_steps=1).train()
    assert "no CarryState is in use" in caplog.text
    caplog.clear()
    lane_trainer(tmp_path, max_steps=1).train()
    assert not caplog.text


def test_generation_and_plain_batches_run_in_mid_training(tmp_path) -> None:
    """Neither has to do with the states."""

    class Sample(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs) -> None:
            model.eval().generate(random_ids(1, 7), max_new_tokens=3, pad_token_id=0)
            model(input_ids=random_ids(3, 6))

    plain, run = lane_trainer(tmp_path), lane_trainer(tmp_path, callbacks=[CarryState(), Sample()])
    plain.train()
    run.train()
    assert losses(run) == losses(plain)


def test_a_token_of_one_document_is_not_seen_from_another(tmp_path) -> None:
    one, two = ([5] * 9, [7] * 8), ([6] * 9, [7] * 8)
    found = []
    for documents in (one, two):
        lanes, model = iter(Lanes(ListTokens(list(documents)), 1, 6, shuffle=False)), MODELS["recurrent_gpt2"]()
        with CarryState().attached(model):
            found.append([model(**collate_lanes([next(lanes)])).loss.item() for _ in range(4)])
    assert found[0][:2] != found[1][:2]
    assert found[0][2:] == found[1][2:]


# -- several processes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "dispatch"),  # the main process reads for all, or each for itself
    [("recurrent_gpt2", None), pytest.param("block_recurrent", False, marks=pytest.mark.slow)],
)
def test_two_processes_train_and_resume_as_one_with_twice_the_batch(
    kind: str, dispatch: bool | None, tmp_path
) -> None:
    settings = {
        "kind": kind,
        "num_lanes": 2,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "accelerator_config": {"dispatch_batches": dispatch},
        "gradient_checkpointing": True,
        "ddp_find_unused_parameters": False,
    }
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    run_worker({**settings, "folder": str(tmp_path / "one")})
    one = json.loads((tmp_path / "one.json").read_text())
    two = launch(tmp_path / "two", 2, **settings, **sizes)
    assert (one["processes"], two["processes"]) == (1, 2)
    shutil.rmtree(tmp_path / "two" / "checkpoint-6")
    (tmp_path / "two" / "checkpoint-4" / "carry_state_1_of_2.safetensors").unlink()  # not whole any more
    resumed = launch(tmp_path / "two", 2, **settings, **sizes)
    for found in (two, resumed):
        for name in ("losses", "evaluation"):
            assert found[name] == pytest.approx(one[name], rel=1e-6), name
        for name, value in one["weights"].items():
            assert found["weights"][name] == pytest.approx(value, rel=1e-9, abs=1e-11), name
    with pytest.raises(
        ValueError, match=r"must hold carry_state_0_of_1.*got \['carry_state_0_of_2.*with as many processes"
    ):
        lane_trainer(tmp_path / "two", kind).train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-2"))


# -- killed ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("moment", ["step 5", "save 4"])
def test_a_killed_run_goes_on_and_nothing_is_lost_or_read_twice(moment: str, tmp_path) -> None:
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    run_worker({**settings, "folder": str(tmp_path / "whole")})
    whole = json.loads((tmp_path / "whole.json").read_text())
    launch(tmp_path / "killed", check=False, kill=moment, **settings)
    kept = 4 if moment == "step 5" else 2
    assert (tmp_path / "killed" / "checkpoint-4").is_dir()
    assert last_whole_checkpoint(tmp_path / "killed") == str(tmp_path / "killed" / f"checkpoint-{kept}")
    resumed = launch(tmp_path / "killed", **settings)
    assert resumed == whole

    def read(name: str) -> list[dict]:
        return [json.loads(line) for line in (tmp_path / f"{name}.seen.0").read_text().splitlines()]

    before, after = [], read("killed")
    while after and (not before or after[0]["step"] > before[-1]["step"]):
        before.append(after.pop(0))
    assert [line["step"] for line in after] == list(range(kept, 8))
    assert [line for line in before if line["step"] < kept] + after == read("whole")
