# Copyright 2026 The hf_recurrence authors. Licensed under the Apache License, Version 2.0.
"""Recurrence for transformers: models that read texts longer than their context, through transformers' own doors."""

from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .cache_recurrent import BlockRecurrentCache, RecurrentCache
from .configuration_block_recurrent import BlockRecurrentConfig
from .configuration_recurrent_gpt2 import RecurrentGPT2Config
from .configuration_recurrent_roberta import RecurrentRobertaConfig
from .configuration_sru_bert import SRUBertConfig
from .modeling_block_recurrent import BlockRecurrentForCausalLM, BlockRecurrentModel
from .modeling_recurrent_gpt2 import RecurrentGPT2LMHeadModel, RecurrentGPT2Model
from .modeling_recurrent_roberta import RecurrentRobertaForQuestionAnswering, RecurrentRobertaModel
from .modeling_sru_bert import (
    SRUBertForMaskedLM,
    SRUBertForQuestionAnswering,
    SRUBertForSequenceClassification,
    SRUBertForTokenClassification,
    SRUBertModel,
)


__version__ = "0.1.0"

# config -> its models, each with the auto class that finds it
MODELS: dict[Any, dict[Any, Any]] = {
    BlockRecurrentConfig: {AutoModel: BlockRecurrentModel, AutoModelForCausalLM: BlockRecurrentForCausalLM},
    RecurrentGPT2Config: {AutoModel: RecurrentGPT2Model, AutoModelForCausalLM: RecurrentGPT2LMHeadModel},
    RecurrentRobertaConfig: {
        AutoModel: RecurrentRobertaModel,
        AutoModelForQuestionAnswering: RecurrentRobertaForQuestionAnswering,
    },
    SRUBertConfig: {
        AutoModel: SRUBertModel,
        AutoModelForMaskedLM: SRUBertForMaskedLM,
        AutoModelForSequenceClassification: SRUBertForSequenceClassification,
        AutoModelForTokenClassification: SRUBertForTokenClassification,
        AutoModelForQuestionAnswering: SRUBertForQuestionAnswering,
    },
}

for _config, _models in MODELS.items():
    AutoConfig.register(_config.model_type, _config)
    _config.register_for_auto_class()  # a save then carries the code along
    for _auto, _model in _models.items():
        _auto.register(_config, _model)
        _model.register_for_auto_class(_auto.__name__)
    if AutoModelForCausalLM in _models:
        # Trainer's label smoothing shifts the labels of causal models, which it knows by these names only.
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_config.model_type] = _models[AutoModelForCausalLM].__name__

__all__ = [
    "BlockRecurrentCache",
    "BlockRecurrentConfig",
    "BlockRecurrentForCausalLM",
    "BlockRecurrentModel",
    "RecurrentCache",
    "RecurrentGPT2Config",
    "RecurrentGPT2LMHeadModel",
    "RecurrentGPT2Model",
    "RecurrentRobertaConfig",
    "RecurrentRobertaForQuestionAnswering",
    "RecurrentRobertaModel",
    "SRUBertConfig",
    "SRUBertForMaskedLM",
    "SRUBertForQuestionAnswering",
    "SRUBertForSequenceClassification",
    "SRUBertForTokenClassification",
    "SRUBertModel",
    "__version__",
]
