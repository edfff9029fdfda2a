# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""What a recipe names, made ready for Trainer: tokenizer, model, data."""

import difflib
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.utils import logging

from ..data import (
    HotpotQAProcessor,
    Lanes,
    LaneSegment,
    MaskedSegments,
    Tokens,
    TokenStore,
    collate_lanes,
    documents,
    flat_example,
    masked_lm_collator,
)
from ..data.documents import SPLITS, split_names
from ..data.glue import glue_task, read_glue
from ..data.token_store import tokenizer_digest
from ..metrics import files_digest
from .carry_state import CACHES, CarryState, MarkWhole
from .recipe import TASKS, DataRecipe, ModelRecipe, Recipe


logger = logging.get_logger(__name__)

MAPPINGS = dict(
    zip(
        TASKS,
        (
            MODEL_FOR_CAUSAL_LM_MAPPING,
            MODEL_FOR_MASKED_LM_MAPPING,
            MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
            MODEL_FOR_QUESTION_ANSWERING_MAPPING,
        ),
        strict=True,
    )
)
NOT_SETTINGS = {"model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"}


class Prepared(NamedTuple):
    """What Trainer gets, and what is told of it."""

    model: Any
    tokenizer: Any
    train: Any
    evaluation: Any  # None without evaluation
    collator: Callable[..., Any]
    callbacks: list[Any]
    compute_metrics: Callable[..., dict[str, float]] | None
    data: dict[str, Any]  # what the data are: names, sizes, sha256
    row_tokens: int  # tokens of a row in one step, at most
    window_tokens: int  # those of a row whose activations are kept with gradient checkpointing
    steps_an_epoch: int  # batches of all processes


def prepare(recipe: Recipe) -> Prepared:
    """The model, tokenizer and data of a recipe."""
    evaluates = recipe.arguments.eval_strategy != "no"
    plan = ModelPlan(recipe.model)
    set_seed(recipe.arguments.seed)  # new weights come before Trainer sets it
    if recipe.model.task in ("causal_lm", "masked_lm"):
        return prepare_texts(recipe, plan, evaluates)
    if recipe.model.task == "question_answering":
        return prepare_answers(recipe, plan, evaluates)
    return prepare_glue(recipe, plan, evaluates)


# -- the model -------------------------------------------------------------------------------------------------------
class ModelPlan:
    """Which model a recipe asks for, known before the data are read."""

    def __init__(self, recipe: ModelRecipe) -> None:
        self.recipe, path = recipe, Path(recipe.model)
        self.from_scratch = path.suffix == ".json"
        if self.from_scratch and not path.is_file():
            raise ValueError(f"`model` must be a config's file, a folder or a Hub name, got {recipe.model!r}.")
        found = AutoConfig.from_pretrained(recipe.model)
        self.model_type = recipe.model_type or found.model_type
        if self.model_type not in CONFIG_MAPPING:
            raise ValueError(f"`model_type` must be one that transformers knows, got {self.model_type!r}.")
        self.config_class = CONFIG_MAPPING[self.model_type]
        able = [task for task in TASKS if self.fits(task)]
        if recipe.task not in able:
            raise ValueError(
                f"`task` must be one that {self.model_type} is for ({', '.join(able) or 'none'}), got {recipe.task!r}."
            )
        self.model_class: Any = MAPPINGS[recipe.task][self.config_class]
        self.carries = self.model_type in CACHES
        self.window_size = int(recipe.window_size or getattr(found, "window_size", None) or 0)
        self.overlap = recipe.overlap if recipe.overlap is not None else getattr(found, "overlap", 0)
        self.num_windows_default = getattr(found, "segment_length", 0) // (self.window_size or 1)
        known = self.config_class().to_dict()
        self.settings = {
            name: value
            for name, value in recipe.settings.items()
            if name in known or name not in ("window_size", "overlap")
        }
        for name in self.settings:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f", nearest {near[0]!r}" if near else ""
                raise ValueError(
                    f"`model_settings` must be fields of {self.config_class.__name__}, got {name!r}{hint}."
                )
        if self.from_scratch:
            given = json.loads(path.read_text(encoding="utf-8"))
            given = {name: value for name, value in given.items() if name in known and name not in NOT_SETTINGS}
            self.settings = given | self.settings
        self.vocab_size = int(self.settings.get("vocab_size", found.vocab_size))

    def fits(self, task: str) -> bool:
        if task == "question_answering":  # over windows, with yes and no
            return self.model_type == "recurrent_roberta"
        return self.config_class in MAPPINGS[task]

    def build(self, tokenizer: Any, **settings: Any) -> Any:
        """The model, its vocabulary that of a tokenizer which was made for it."""
        settings = self.settings | settings
        if not self.from_scratch:
            return self.model_class.from_pretrained(self.recipe.model, **settings)
        known = self.config_class().to_dict()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            # special tokens are the tokenizer's; those beyond the vocabulary do not exist
            number, before = getattr(tokenizer, name), settings.get(name, known.get(name))
            if name not in self.recipe.settings and (number is not None or (before or 0) >= self.vocab_size):
                settings[name] = number
        return self.model_class(self.config_class(**settings))


def make_tokenizer(plan: ModelPlan, texts: Callable[[], Iterator[str]], folder: Path) -> Any:
    """The tokenizer that the recipe names, fitting the model's vocabulary; one that is trained is kept in `folder`."""
    recipe = plan.recipe
    if recipe.tokenizer_vocab_size is not None:
        if not plan.from_scratch:
            raise ValueError("`tokenizer_vocab_size` is for models from scratch: a checkpoint has a tokenizer.")
        with FileLock(f"{folder}.lock"):
            if not (folder / "tokenizer_config.json").is_file():
                made = train_tokenizer(texts(), recipe.tokenizer_vocab_size, recipe.task == "causal_lm")
                made.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        plan.settings["vocab_size"] = plan.vocab_size = len(tokenizer)
    elif recipe.tokenizer == "bytes":
        tokenizer = byte_tokenizer()
        if plan.from_scratch and "vocab_size" not in recipe.settings:
            plan.settings["vocab_size"] = plan.vocab_size = len(tokenizer)
    elif recipe.tokenizer is None and plan.from_scratch:
        raise ValueError('`tokenizer` must be a folder, a Hub name or "bytes" for a model from scratch, got none.')
    else:
        tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer or recipe.model)
    if len(tokenizer) > plan.vocab_size:
        raise ValueError(
            f"`tokenizer` must have no more tokens than the model's vocabulary ({plan.vocab_size}), got "
            f"{len(tokenizer)}."
        )
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer whose tokens are the bytes of the text in UTF-8, each with its value as its id."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    # byte-level tokenizers write bytes as characters: themselves, or from 256 on those that cannot be seen
    vocabulary = {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def train_tokenizer(texts: Iterator[str], vocab_size: int, causal: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, with an end of text for causal models, else with RoBERTa's special tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    special = ["<|endoftext|>"] if causal else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    if causal:
        return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=special[0], eos_token=special[0])
    names = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), special, strict=True))
    first, last = ((name, core.token_to_id(name)) for name in ("<s>", "</s>"))
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[first, last]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", **names)


# -- texts -----------------------------------------------------------------------------------------------------------
class FirstTokens:
    """The first tokens of each document."""

    def __init__(self, tokens: Tokens, most: int) -> None:
        self.tokens, self.most, self.lengths = tokens, most, np.minimum(tokens.lengths, most)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self.tokens.read(document, start, min(stop, self.most))


class FixedMasks(Dataset[dict[str, Any]]):
    """Segments that are masked alike whenever they are read, so that evaluations can be compared."""

    def __init__(self, segments: MaskedSegments, collator: Any) -> None:
        self.segments, self.collator = segments, collator

    def __len__(self) -> int:
        return len(self.segments)

    def __getitem__(self, number: int) -> dict[str, Any]:
        with torch.random.fork_rng():
            torch.manual_seed(number)
            batch = self.collator([self.segments[number]])
        return {"input_ids": batch["input_ids"][0], "labels": batch["labels"][0]}


class MaskOrKeep:
    """Masks segments, or pads those that are masked already.

    The masks come from the rows of the batch and a seed: batches are read ahead of the step, so random numbers of the
    process would differ after a run has gone on from a checkpoint. In each epoch a row is in another batch.
    """

    def __init__(self, collator: Any, seed: int) -> None:
        self.collator, self.seed = collator, seed

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        if "labels" not in rows[0]:
            digest = hashlib.sha256(str(self.seed).encode())
            for row in rows:
                digest.update(np.asarray(row["input_ids"]).tobytes())
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(digest.digest()[:7], "little"))
                return self.collator(rows)
        batch = self.collator.tokenizer.pad([{"input_ids": row["input_ids"]} for row in rows], return_tensors="pt")
        labels = torch.full_like(batch["input_ids"], -100)
        for row, target in zip(rows, labels, strict=True):
            target[: len(row["labels"])] = row["labels"]
        return {**batch, "labels": labels}


class CollateWindows:
    """Lane segments as windows that know nothing of each other, for models without recurrence. [B * N, W]

    Tokens and targets are those that a recurrent model gets of the same lanes.
    """

    def __init__(self, window_size: int) -> None:
        self.window_size = window_size

    def __call__(self, segments: list[LaneSegment]) -> dict[str, torch.Tensor]:
        batch = collate_lanes(segments)
        ids, targets = (batch[name].view(-1, self.window_size) for name in ("input_ids", "shift_labels"))
        labels = targets.clone()
        if not (targets != -100).any():
            labels[0, 0] = 0  # Trainer divides by the number of labels
        # Pads stand behind all tokens, none of which looks that far: no mask is needed.
        return {"input_ids": ids, "labels": labels, "shift_labels": targets}


def fingerprint(source: str) -> list[Any]:
    """What tells a source from what it was before: the files with their sizes and times, or its name."""
    path = Path(source)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    facts = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [str(path.resolve()), *facts] if path.exists() else [source]


class TextSource:
    """The documents of one split, and their tokens, which are kept."""

    def __init__(self, recipe: DataRecipe, split: str) -> None:
        self.recipe, self.split = recipe, split
        self.source = (recipe.validation_data or recipe.data) if split == "validation" else recipe.data
        self.most = recipe.max_train_documents if split == "train" else recipe.max_validation_documents
        self.cache = Path(recipe.data_cache or Path(datasets.config.HF_CACHE_HOME, "hf_recurrence"))

    def texts(self) -> Iterator[str]:
        return islice(documents(self.source, self.split, self.recipe.data_column), self.most)

    def folder(self, kind: str, *facts: Any) -> Path:
        """Where to keep what is made of these documents."""
        key = [fingerprint(self.source), self.split, self.recipe.data_column, self.most, *facts]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:20]
        folder = self.cache / f"{kind}-{self.split}-{name}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def store(self, tokenizer: Any) -> TokenStore:
        of_bytes = tokenizer_digest(tokenizer) == tokenizer_digest(byte_tokenizer())
        folder = self.folder("tokens", tokenizer_digest(tokenizer))
        store = TokenStore.build(folder, self.texts(), None if of_bytes else tokenizer)
        if store.num_tokens == 0:
            raise ValueError(f"`data` must have texts for {self.split!r}, got {self.source!r} without any.")
        return store


def store_facts(source: TextSource, store: TokenStore) -> dict[str, Any]:
    manifest = store.manifest
    sizes = {name: manifest[name] for name in ("documents", "tokens", "words", "bytes")}
    return {"name": Path(source.source).name, **sizes, "sha256": store.digest}


def prepare_texts(recipe: Recipe, plan: ModelPlan, evaluates: bool) -> Prepared:
    """Documents in lanes for causal models, in segments for masked ones."""
    data, arguments = recipe.data, recipe.arguments
    causal = recipe.model.task == "causal_lm"
    segment_length = row_length(recipe, plan) if causal else data.segment_length or 128
    sources = {split: TextSource(data, split) for split in (("train", "validation") if evaluates else ("train",))}
    for source in sources.values():
        next(source.texts(), None)  # what is missing is told of before work is done
    training = sources["train"]
    kept = training.folder("tokenizer", recipe.model.tokenizer_vocab_size, causal)
    tokenizer = make_tokenizer(plan, training.texts, kept)
    stores = {split: source.store(tokenizer) for split, source in sources.items()}
    facts = {split: store_facts(sources[split], store) for split, store in stores.items()}
    if evaluates and stores["train"].digest == stores["validation"].digest:
        raise ValueError(
            "`data` must have other documents for validation than for training, got the same. Name files by split, "
            "or give `validation_data`, or set `eval_strategy` to no."
        )
    tokens: dict[str, Any] = dict(stores)
    if evaluates and data.max_validation_tokens is not None:
        tokens["validation"] = FirstTokens(stores["validation"], data.max_validation_tokens)
    if not causal:
        collator = MaskOrKeep(masked_lm_collator(tokenizer, data.mlm_probability, data.whole_words), arguments.seed)
        segments = {split: MaskedSegments(of, tokenizer, segment_length) for split, of in tokens.items()}
        masked = FixedMasks(segments["validation"], collator.collator) if evaluates else None
        rows = -(-len(segments["train"]) // (arguments.per_device_train_batch_size * arguments.world_size))
        model = plan.build(tokenizer)
        limit = getattr(model.config, "max_position_embeddings", segment_length)
        if segment_length > limit:
            raise ValueError(
                f"`segment_length` must be at most the model's positions ({limit}), got {segment_length}."
            )
        return Prepared(
            *(model, tokenizer, segments["train"], masked, collator, [MarkWhole()], None, facts),
            *(segment_length, segment_length, rows),
        )
    train = make_lanes(tokens["train"], recipe, arguments.train_batch_size, segment_length, "train")
    evaluation = None
    if evaluates:
        fewest = int((tokens["validation"].lengths > 0).sum()) // arguments.world_size
        if data.max_segments is None and 0 < fewest < arguments.eval_batch_size:
            logger.warning(f"The validation documents make {fewest} lanes a process, not {arguments.eval_batch_size}.")
            arguments.per_device_eval_batch_size = fewest
        evaluation = make_lanes(tokens["validation"], recipe, arguments.eval_batch_size, segment_length, "eval")
    collate = collate_lanes if plan.carries else CollateWindows(plan.window_size)
    callbacks: list[Any] = [CarryState() if plan.carries else MarkWhole()]
    return Prepared(
        *(plan.build(tokenizer), tokenizer, train, evaluation, collate, callbacks, None, facts),
        *(segment_length, plan.window_size, train.num_steps),
    )


def row_length(recipe: Recipe, plan: ModelPlan) -> int:
    """The tokens of a row in one step of a causal model."""
    data = recipe.data
    if not plan.window_size:
        raise ValueError(f"`window_size` must be given for {plan.model_type}, whose config has none.")
    if not plan.carries and plan.overlap:
        raise ValueError(
            f"`overlap` must be 0 for {plan.model_type}, which has no recurrence and trains on disjoint windows, got "
            f"{plan.overlap}."
        )
    if recipe.arguments.label_smoothing_factor:
        raise ValueError("`label_smoothing_factor` must be 0 for texts in lanes, whose targets go beyond the row.")
    if data.segment_length is not None and data.windows_per_sequence is not None:
        raise ValueError("`segment_length` and `windows_per_sequence` say the same: give one of them.")
    windows = data.windows_per_sequence or plan.num_windows_default or 20
    length = data.segment_length or windows * (plan.window_size - plan.overlap)
    if length < 1 or (not plan.carries and length % plan.window_size):
        raise ValueError(f"`segment_length` must be whole windows of {plan.window_size}, got {length}.")
    return length


def make_lanes(tokens: Any, recipe: Recipe, rows: int, segment_length: int, name: str) -> Lanes:
    arguments, num_lanes = recipe.arguments, rows * recipe.arguments.world_size
    try:
        shuffle = name == "train"
        return Lanes(tokens, num_lanes, segment_length, recipe.data.max_segments, shuffle, arguments.seed)
    except ValueError as error:
        raise ValueError(
            f"`per_device_{name}_batch_size` ({rows}) times the number of processes ({arguments.world_size}) is the "
            f"number of lanes. {error}"
        ) from error


# -- questions -------------------------------------------------------------------------------------------------------
def split_file(folder: str, split: str, endings: tuple[str, ...]) -> Path:
    """The file of a folder that holds a split."""
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"`data` must be a folder with a file for each split, got {folder!r}.")
    found = [
        file for file in sorted(path.iterdir()) if file.name.endswith(endings) and split in split_names(file, path)
    ]
    if not found:
        raise ValueError(f"`data` must have a {'/'.join(SPLITS[split])} file ({', '.join(endings)}), got {folder!r}.")
    return found[0]


def prepare_answers(recipe: Recipe, plan: ModelPlan, evaluates: bool) -> Prepared:
    """HotpotQA's or SQuAD's examples in windows."""
    from ..evaluation.hotpotqa import HotpotQAMetric

    data, arguments = recipe.data, recipe.arguments
    endings = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
    files = {"train": split_file(data.data, "train", endings)}
    if evaluates:
        files["validation"] = split_file(data.validation_data or data.data, "validation", endings)
    texts = TextSource(data, "train")
    kept = texts.folder("tokenizer", recipe.model.tokenizer_vocab_size, False)
    tokenizer = make_tokenizer(plan, lambda: (row["context"] for row in examples(files["train"])), kept)
    processor = HotpotQAProcessor(tokenizer, plan.window_size, plan.overlap, data.max_answer_length)
    features: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    for split, file in files.items():
        most = data.max_train_documents if split == "train" else data.max_validation_documents
        rows = datasets.Dataset.from_list(list(examples(file)))
        if len(rows) == 0:
            raise ValueError(f"`data` must have examples for {split!r}, got {str(file)!r} without any.")
        if most is not None and most < len(rows):
            rows = rows.shuffle(seed=arguments.seed).select(range(most))
        features[split] = rows.map(processor, desc=f"Windows of {split}")
        facts[split] = {"name": file.name, "documents": len(rows), "sha256": files_digest([file])}
        facts[split]["tokens"] = sum(len(ids) for row in features[split]["input_ids"] for ids in row)
    metric = HotpotQAMetric(experiment_id=f"{arguments.process_index}")

    def compute_metrics(result: Any) -> dict[str, float]:
        answers = processor.answers(features["validation"], result.predictions)
        found: dict[str, float] = metric.compute(predictions=answers, references=features["validation"]["answer"])
        return found

    longest = max(len(ids) for ids in features["train"]["input_ids"])
    rows_a_step = arguments.train_batch_size * arguments.world_size
    model = plan.build(tokenizer)
    return Prepared(
        *(model, tokenizer, features["train"], features.get("validation"), processor.collator(), [MarkWhole()]),
        *(compute_metrics, facts, longest * plan.window_size, plan.window_size),
        -(-len(features["train"]) // rows_a_step),
    )


def examples(file: Path) -> Iterator[dict[str, Any]]:
    """The flat examples of a JSON or JSON lines file."""
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as opened:
        rows = map(json.loads, opened) if ".jsonl" in file.suffixes else json.load(opened)
        for row in rows:
            yield flat_example(row)


def prepare_glue(recipe: Recipe, plan: ModelPlan, evaluates: bool) -> Prepared:
    """A GLUE task's sentences and labels."""
    from ..evaluation.glue import glue_scores

    data, arguments = recipe.data, recipe.arguments
    if data.glue_task is None:
        raise ValueError("`glue_task` must be one of GLUE's for sequence_classification, got none.")
    task = glue_task(data.glue_task)
    length = data.segment_length or 128
    rows = {split: read_glue(data.data, data.glue_task, split) for split in ("train", "validation")[: 1 + evaluates]}
    kept = TextSource(data, "train").folder("tokenizer", recipe.model.tokenizer_vocab_size, False)
    tokenizer = make_tokenizer(plan, lambda: (row[name] for row in rows["train"] for name in task.texts), kept)
    names = list(task.texts)
    facts: dict[str, dict[str, Any]] = {}
    for split, found in rows.items():
        most = data.max_train_documents if split == "train" else data.max_validation_documents
        if most is not None and most < len(found):
            found = found.shuffle(seed=arguments.seed).select(range(most))
        digest = hashlib.sha256(json.dumps(found.to_dict()).encode()).hexdigest()
        facts[split] = {"name": f"GLUE {task.folder}", "documents": len(found), "sha256": digest}
        rows[split] = found.map(
            lambda row: tokenizer(*(row[name] for name in names), truncation=True, max_length=length),
            remove_columns=names,
            desc=f"Tokens of {split}",
        )
        facts[split]["tokens"] = sum(len(ids) for ids in rows[split]["input_ids"])

    def compute_metrics(result: Any) -> dict[str, float]:
        return glue_scores(str(data.glue_task), result.predictions, result.label_ids)

    model = plan.build(tokenizer, num_labels=task.num_labels)
    rows_a_step = arguments.train_batch_size * arguments.world_size
    return Prepared(
        *(model, tokenizer, rows["train"], rows.get("validation"), DataCollatorWithPadding(tokenizer), [MarkWhole()]),
        *(compute_metrics, facts, length, length, -(-len(rows["train"]) // rows_a_step)),
    )


__all__ = ["Prepared", "byte_tokenizer", "prepare"]
