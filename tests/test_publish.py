"""Publishing: checks before, the card, and the upload to a local Hub."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from safetensors.torch import load_file, save_file

import hf_recurrence
from hf_recurrence import cli
from hf_recurrence.publishing import publish, render_card, verify
from hf_recurrence.publishing.card import is_sealed, numbers
from hf_recurrence.publishing.files import checked_files, shipped_files, without_paths
from hf_recurrence.publishing.publication import stage_files, write_card
from hf_recurrence.publishing.reloading import differences, outcome_elsewhere
from hf_recurrence.publishing.upload import Remote, upload
from tests.checkpoints import make_checkpoint, make_metrics
from tests.common import ALL_MODELS
from tests.test_publishing import SHIPPED


ROOT = Path(__file__).parent.parent
KIND = "recurrent_gpt2"


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_checkpoint(tmp_path / "model", KIND)


@pytest.fixture
def stage(folder, tmp_path) -> Path:
    """A folder as it is uploaded."""
    write_card(folder, "ann/model", "ask", None, None)
    stage_files(checked_files(folder), tmp_path / "stage", 10**9)
    return tmp_path / "stage"


def names(api: HfApi, repo_id: str = "ann/model", **where: str) -> set[str]:
    return {file.path for file in api.list_repo_tree(repo_id, **where)} - {".gitattributes"}


# checks before anything leaves the machine


@pytest.mark.parametrize("kind", ALL_MODELS)
def test_the_code_that_travels_is_known(kind: str) -> None:
    assert sorted(shipped_files(kind)) == sorted(SHIPPED[kind])


def test_trainers_own_files_stay_and_all_else_is_refused_by_name(folder) -> None:
    (folder / "checkpoint-5").mkdir()
    for name in ("optimizer.pt", "training_args.bin", "trainer_state.json", "carry_state_0_of_1.safetensors"):
        (folder / name).write_bytes(b"")
    files = checked_files(folder)
    expected = ["carry_state_0_of_1.safetensors", "checkpoint-5", "optimizer.pt", "trainer_state.json"]
    assert files.left_out == [*expected, "training_args.bin"]
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files.kept.keys()
    for name, reason in {
        "pytorch_model.bin": "is a pickle",
        "notes.txt": "does not belong",
        "a.py": "not belong",
    }.items():
        (folder / name).write_text("")
        with pytest.raises(ValueError, match=f"{name} {reason}|{name} does {reason}"):
            checked_files(folder)
        (folder / name).unlink()


def edit(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("config.json", '"window_size"', '"note": "hf_' + "a1" * 17 + '", "window_size"', r"like a token \(hf_a1a"),
        ("config.json", '"window_size"', '"from": "/home/me/x", "window_size"', "absolute path '/home/me/x'"),
        ("tokenizer_config.json", "{", '{"from": "C:\\\\models\\\\x",', "absolute path"),
        (
            "config.json",
            "modeling_recurrent_gpt2.",
            "bob/other--modeling_recurrent_gpt2.",
            "`auto_map` of config.json",
        ),
        (
            "modeling_recurrent_gpt2.py",
            "import",
            "import  ",
            "modeling_recurrent_gpt2.py is not that of the installed",
        ),
    ],
)
def test_tokens_paths_and_foreign_code_are_refused(folder, name, old, new, complaint) -> None:
    edit(folder / name, old, new)
    with pytest.raises(ValueError, match=complaint):
        checked_files(folder)


def test_weights_and_code_must_be_whole(folder, tmp_path) -> None:
    (folder / "losses.py").unlink()
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"losses.py is missing.*model-00001-of-00002.safetensors is not part"):
        checked_files(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors is missing"):
        checked_files(folder)
    with pytest.raises(ValueError, match="there is no config.json in"):
        checked_files(tmp_path)
    with pytest.raises(ValueError, match="`folder` must be a folder"):
        checked_files(tmp_path / "none")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="of type block_recurrent, .*, got 'gpt2'"):
        checked_files(folder)


def test_paths_of_this_machine_are_cut_from_records(stage) -> None:
    text = (stage / "metrics.json").read_text()
    assert "/srv" not in text
    assert json.loads(text)["train"]["data"]["train"]["name"] == "books"
    assert (
        without_paths("see https://a.org/b/c, train/eval and '/a/b c'")
        == "see https://a.org/b/c, train/eval and 'b c'"
    )


def test_a_difference_between_local_and_remote_stops_it_with_its_name(folder, monkeypatch) -> None:
    remote, facts = outcome_elsewhere(str(folder))
    monkeypatch.setattr("hf_recurrence.publishing.reloading.outcome_elsewhere", lambda folder: (remote, facts))
    compared = verify(folder)
    assert compared["head"] == "RecurrentGPT2LMHeadModel"
    assert compared["compared"] == ["generated", "generated_text", "head", "logits", "text_ids"]
    other = {**remote, "logits": remote["logits"] + 1e-2, "generated": remote["generated"] + 1}
    told = {**facts, "generated_text": "no", "missing_keys": ["a.b"]}
    found = list(differences(other, {**told, "module": "hf_recurrence"}, remote, facts))
    assert len(found) == 5
    for name in ("missing keys: a.b", "logits differs by up to 0.01", "generated differs", "generated_text differs"):
        assert any(name in line for line in found), name
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("transformer.recurrence.mix.logits")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"the weights have missing keys: transformer.recurrence.mix.logits"):
        verify(folder)


def test_code_that_fails_elsewhere_stops_it(folder) -> None:
    edit(folder / "losses.py", "import torch", "import hf_recurrence, torch")
    with pytest.raises(ValueError, match="without the package, there it fails: ModuleNotFoundError"):
        outcome_elsewhere(str(folder))


# the card


def test_the_card_has_the_numbers_of_the_metrics_and_no_others(folder) -> None:
    text = render_card(folder, "ann/model", base_model="gpt2")
    card = ModelCard(text)
    assert (card.data.license, card.data.base_model, card.data.library_name) == ("mit", "gpt2", "transformers")
    found = [(r.metric_name, r.metric_value, r.metric_args["overlap"]) for r in card.data.eval_results]
    assert found == [
        ("perplexity perplexity", 21.375, 2),
        ("perplexity perplexity", 20.25, 4),
        ("state_gain gain", 0.125, 2),  # the model's own
    ]
    assert {(r.dataset_name, r.dataset_split) for r in card.data.eval_results} == {("wikitext-2", "test")}
    measured = [value for record in make_metrics().values() for _, value, _ in numbers(record["results"])]
    tables = [line for line in text.splitlines() if line.count("|") == 8 and "---" not in line and "| run" not in line]
    assert sorted(line.split("|")[3].strip() for line in tables) == sorted(f"{value:.6g}" for value in measured)
    assert "/srv" not in text
    for needed in ("trust_remote_code=True", "cache.save", "Apache-2.0", "1.23457e+08", "ab" * 32, "@article{yoshida"):
        assert needed in text, needed
    assert re.search(r"seeds \|\n.*\n\| train \| train_loss \| 3.25 \| books \| 8 \| 2 \| 42 \|", text)


@pytest.mark.parametrize("kind", ALL_MODELS)
def test_a_card_without_metrics_says_so_and_its_snippets_are_python(kind: str, tmp_path, hub) -> None:
    make_checkpoint(tmp_path / "model", kind, metrics=False)
    text = render_card(tmp_path / "model", "ann/model")
    for said in ("has not been evaluated", "No run has been recorded", "Not measured"):
        assert said in text
    card = ModelCard(text)
    card.validate()
    assert card.data.eval_results is None
    assert "model-index" not in text
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        compile(code, "card", "exec")
    assert "{{" not in text
    assert "\n\n\n" not in text
    with_metrics = make_checkpoint(tmp_path / "other", kind)
    ModelCard(render_card(with_metrics, "ann/model")).validate()


def test_a_card_edited_by_hand_is_not_overwritten_without_asking(folder) -> None:
    assert write_card(folder, "ann/model", "ask", None, None) == "written"
    text = (folder / "README.md").read_text()
    assert is_sealed(text)
    assert write_card(folder, "ann/model", "ask", None, None) == "unchanged"
    assert write_card(folder, "ann/other", "ask", None, None) == "written"
    edit(folder / "README.md", "Limits", "My limits")
    assert not is_sealed((folder / "README.md").read_text())
    with pytest.raises(ValueError, match=r"README.md of .* was edited since: pass --overwrite-card"):
        write_card(folder, "ann/model", "ask", None, None)
    assert write_card(folder, "ann/model", "keep", None, None) == "kept"
    assert "My limits" in (folder / "README.md").read_text()
    assert write_card(folder, "ann/model", "overwrite", None, None) == "written"
    assert (folder / "README.md").read_text() == text


def test_metrics_of_another_form_are_refused(folder) -> None:
    for content, complaint in (("{", "must be JSON"), ('{"a": {"results": {}}}', "a is not one"), ("[]", "by name")):
        (folder / "metrics.json").write_text(content)
        with pytest.raises(ValueError, match=complaint):
            render_card(folder, "ann/model")


def test_the_template_is_part_of_the_package_and_stands_with_the_cards() -> None:
    package = Path(hf_recurrence.__file__).parent / "publishing" / "template.md.jinja"
    assert (ROOT / "model_cards" / "template.md.jinja").read_text() == package.read_text()
    assert "publishing/template.md.jinja" in (ROOT / "pyproject.toml").read_text()


# the upload


def test_one_commit_holds_everything_and_a_repetition_changes_nothing(stage, hub) -> None:
    facts = upload(stage, Remote("model", False, "v1"))
    api = HfApi()
    assert facts["repo_id"] == "ann/model"
    assert facts["uploaded"][-1] == "README.md"
    assert names(api) == {file.name for file in stage.iterdir()} == set(facts["uploaded"])
    assert [item.title for item in api.list_repo_commits("ann/model")] == [
        "Publish with hf_recurrence",
        "initial commit",
    ]
    assert {ref.name: ref.target_commit for ref in api.list_repo_refs("ann/model").tags} == {"v1": facts["commit"]}
    hub.log.clear()
    again = upload(stage, Remote("ann/model", False, "v1"))
    assert (again["commit"], again["uploaded"], again["deleted"]) == (facts["commit"], [], [])
    assert not [line for line in hub.log if line.startswith(("PUT", "POST", "DELETE"))]


def test_a_new_checkpoint_replaces_the_old_one_and_leaves_other_files(stage, hub) -> None:
    first = upload(stage, Remote("model", False, "v1"))
    api = HfApi()
    others = [CommitOperationAdd("picture.png", b"\0"), CommitOperationAdd("vocab.txt", b"old")]
    api.create_commit("ann/model", others, commit_message="By hand")
    edit(stage / "metrics.json", "21.375", "20.5")
    facts = upload(stage, Remote("model", False, None))
    assert (facts["uploaded"], facts["deleted"]) == (["metrics.json"], ["vocab.txt"])
    assert names(api) == {"picture.png", *(file.name for file in stage.iterdir())}
    assert names(api, revision="v1") == names(api) - {"picture.png"}
    with pytest.raises(ValueError, match=f"`tag` is taken: v1 of ann/model names commit {first['commit'][:9]}"):
        Remote("model", False, "v1").check(KIND)


@pytest.mark.parametrize("broken", ["POST .*/commit/", "POST .*/preupload/", "POST /api/validate-yaml"])
@pytest.mark.parametrize("status", [0, 500])
def test_an_interrupted_upload_leaves_nothing_and_goes_on(stage, hub, broken, status, monkeypatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits between its attempts
    hub.broken = {broken: status}
    with pytest.raises(OSError, match="nothing was published to ann/model: the Hub (answered 500|cannot be reached)"):
        upload(stage, Remote("model", False, "v1"))
    hub.broken = {}
    assert not HfApi().repo_exists("ann/model")
    facts = upload(stage, Remote("model", False, "v1"))
    assert names(HfApi()) == set(facts["uploaded"]) == {file.name for file in stage.iterdir()}


def test_an_upload_that_was_killed_between_its_steps_goes_on(stage, hub) -> None:
    api = HfApi()
    api.create_repo("ann/model")
    hub.broken = {"POST .*/tag/": 500}
    with pytest.raises(OSError, match=r"commit \w+ but no tag was sent to ann/model: the Hub answered 500"):
        upload(stage, Remote("model", False, "v1"))
    hub.broken = {}
    assert names(api) == {file.name for file in stage.iterdir()}
    commit = api.model_info("ann/model").sha
    facts = upload(stage, Remote("model", False, "v1"))
    assert (facts["uploaded"], facts["commit"]) == ([], commit)
    assert api.list_repo_refs("ann/model").tags[0].target_commit == commit


def test_what_is_in_the_way_is_said(stage, hub, monkeypatch) -> None:
    def refused(kind: type, match: str, repo_id: str = "model", private: bool = False) -> None:
        with pytest.raises(kind, match=match) as caught:
            Remote(repo_id, private, None).check(KIND)
        assert "\n" not in str(caught.value)

    upload(stage, Remote("lab/model", False, None))
    refused(ValueError, "`private` must fit the repository: lab/model is public, not private", "lab/model", True)
    edit(hub_config := stage / "config.json", '"recurrent_gpt2"', '"sru_bert"')
    HfApi().upload_file(path_or_fileobj=str(hub_config), path_in_repo="config.json", repo_id="lab/model")
    refused(ValueError, "`repo_id` is taken: lab/model holds a model of type 'sru_bert', not 'recurrent", "lab/model")
    refused(PermissionError, "ann may not write to bob: choose ann/model", "bob/model")
    monkeypatch.setenv("HF_TOKEN", "hf_eve")
    refused(PermissionError, "the token of eve may only read")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(PermissionError, "does not accept the token: run `hf auth login` again")
    monkeypatch.delenv("HF_TOKEN")
    refused(PermissionError, "not logged in to the Hub: run `hf auth login`")
    monkeypatch.setenv("HF_TOKEN", "hf_ann")
    hub.broken = {".*": 0}
    refused(ConnectionError, "nothing was published to model: the Hub cannot be reached")
    assert set(hub.repositories) == {"lab/model"}


def test_rights_that_only_the_hub_knows_are_said_too(stage, hub) -> None:
    remote = Remote("lab/model", False, None)
    hub.users["hf_ann"] = ("ann", "write", [])
    with pytest.raises(PermissionError, match="nothing was published to lab/model: this account or its token may not"):
        upload(stage, remote)
    assert not hub.repositories


def test_somebody_elses_commit_and_card_are_not_overwritten(stage, hub) -> None:
    upload(stage, Remote("model", False, None))
    card = (stage / "README.md").read_text()
    edit(stage / "metrics.json", "21.375", "20.5")
    late = Remote("model", False, None)
    by_hand = card.replace("Limits", "Our limits").encode()
    HfApi().upload_file(path_or_fileobj=by_hand, path_in_repo="README.md", repo_id="ann/model")
    with pytest.raises(OSError, match="somebody else has committed to it meanwhile: publish again"):
        upload(stage, late)
    edit(stage / "README.md", "Limits", "Limits  ")
    with pytest.raises(ValueError, match=r"README.md of ann/model was not written by .* or was edited since"):
        upload(stage, Remote("model", False, None))
    facts = upload(stage, Remote("model", False, None), card="keep")
    assert facts["uploaded"] == ["metrics.json"]
    (stage / "README.md").write_text(card)
    assert upload(stage, Remote("model", False, None), card="overwrite")["uploaded"] == ["README.md"]


def test_other_bytes_on_the_hub_than_were_sent_are_noticed(stage, hub) -> None:
    upload(stage, Remote("model", False, None))
    (stage / "model.safetensors").unlink()
    save_file({"a": torch.ones(3)}, stage / "model.safetensors")
    remote = Remote("model", False, None)
    remote.plan = lambda folder: ([], [])  # as if the commit had lost a file
    with pytest.raises(OSError, match="^ann/model does not hold what was sent: model.safetensors differ"):
        upload(stage, remote)


# all of it


def test_a_dry_run_asks_the_hub_for_nothing(folder, hub, monkeypatch) -> None:
    monkeypatch.setattr("hf_recurrence.publishing.publication.verify", lambda folder: {"head": "checked"})
    facts = publish(folder, "model", private=True, dry_run=True)
    assert (facts["dry_run"], facts["head"], facts["card"]) == (True, "checked", "written")
    assert {"README.md", "model.safetensors", "losses.py"} <= set(facts["files"])
    assert not hub.log


def test_the_verb_says_what_was_done_what_is_there_already_and_what_is_wrong(folder, hub, monkeypatch, capsys) -> None:
    def run(*words: object) -> tuple[int, str, str]:
        code = cli.main([str(word) for word in words])
        return code, *capsys.readouterr()

    monkeypatch.setattr(
        "hf_recurrence.publishing.publication.verify", lambda folder: {"head": "one", "compared": ["logits"]}
    )
    number = len(list(folder.iterdir())) + 1
    code, out, _ = run("publish", folder, "model", "--dry-run", "--license", "apache-2.0", "--base-model", "me/gpt2")
    assert code == 0
    assert f"nothing was sent; {number} files would be" in out
    assert "base_model: me/gpt2" in (folder / "README.md").read_text()
    code, out, _ = run("publish", folder, "model", "--tag", "v1", "--json")
    facts = json.loads(out)
    assert (code, facts["repo_id"], facts["tag"], len(facts["uploaded"])) == (0, "ann/model", "v1", number)
    code, out, _ = run("publish", folder, "model", "--tag", "v1")
    assert code == 0
    assert f"nothing to upload: {hub.url}/ann/model holds this checkpoint, commit {facts['commit']}, tagged v1" in out
    edit(folder / "README.md", "Limits", "My limits")
    code, out, err = run("publish", folder, "model")
    assert (code, out) == (1, "")
    assert err.startswith("hf-recurrence publish: README.md of ")
    assert err.count("\n") == 1
    code, out, _ = run("publish", folder, "model", "--keep-card")
    assert "files uploaded 1, deleted 0" in out
    edit(folder / "README.md", "My limits", "My own limits")  # still nobody has edited it on the Hub
    code, out, _ = run("publish", folder, "model", "--keep-card")
    assert "files uploaded 1, deleted 0" in out
    assert "My own limits" in hub.repositories["ann/model"].git("show", "main:README.md").decode()
    code, out, err = run("publish", folder, "bob/model", "--overwrite-card")
    assert (code, out, err) == (1, "", "hf-recurrence publish: ann may not write to bob: choose ann/model\n")


def test_publish_checks_writes_the_card_and_uploads(folder, hub) -> None:
    shutil.copy(folder / "model.safetensors", folder / "optimizer.pt")
    facts = publish(folder, "model", private=True, tag="v1", max_shard_size="40KB")
    assert facts["left_out"] == ["optimizer.pt"]
    assert hub.repositories["ann/model"].private
    shards = [name for name in facts["uploaded"] if name.startswith("model-")]
    assert len(shards) > 1
    assert "model.safetensors.index.json" in facts["uploaded"]
    assert (folder / "README.md").read_text() == hub.repositories["ann/model"].git("show", "v1:README.md").decode()


def test_names_that_the_hub_does_not_take_are_refused_before_any_work(folder) -> None:
    for arguments, complaint in (
        ({"repo_id": "a/b/c"}, "`repo_id` must be a name on the Hub"),
        ({"repo_id": "a b"}, "`repo_id` must be a name on the Hub"),
        ({"repo_id": "a", "tag": "v 1"}, "`tag` must be letters"),
        ({"repo_id": "a", "tag": "a..b"}, "`tag` must be letters"),
        ({"repo_id": "a", "card": "maybe"}, "`card` must be one of ask"),
    ):
        with pytest.raises(ValueError, match=complaint):
            publish(folder, **arguments)
    assert not (folder / "README.md").exists()
