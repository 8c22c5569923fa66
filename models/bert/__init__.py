"""BERT: an encoder with dropout, trained by masked language modelling."""

import functools

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.tokenizer import build_hf_tokenizer

from torchtitan_ext.components.loss import build_loss
from torchtitan_ext.components.metrics import build_metrics_processor
from torchtitan_ext.components.optimizer import build_optimizer
from torchtitan_ext.components.validate import TextValidator
from torchtitan_ext.data.masked_lm import (
    build_masked_lm_dataloader,
    build_masked_lm_validation_dataloader,
)
from torchtitan_ext.distributed.parallelize import parallelize
from torchtitan_ext.train_spec import ExtTrainSpec

from .args import BertModelArgs
from .checks import check_config
from .flavors import FLAVORS
from .model import BertModel
from .plan import PARALLEL_PLAN
from .state_dict_adapter import BertStateDictAdapter

__all__ = ["FLAVORS", "BertModel", "BertModelArgs", "BertStateDictAdapter", "get_train_spec"]


def get_train_spec() -> ExtTrainSpec:
    """Everything the trainer needs to know to train this model."""
    return ExtTrainSpec(
        model_cls=BertModel,
        model_args=FLAVORS,
        parallelize_fn=functools.partial(parallelize, plan=PARALLEL_PLAN),
        pipelining_fn=None,
        build_optimizers_fn=build_optimizer,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_masked_lm_dataloader,
        build_tokenizer_fn=build_hf_tokenizer,
        build_loss_fn=build_loss,
        build_validator_fn=functools.partial(
            TextValidator, build_dataloader=build_masked_lm_validation_dataloader
        ),
        build_metrics_processor_fn=build_metrics_processor,
        state_dict_adapter=BertStateDictAdapter,
        sections=frozenset({"mlm", "dropout"}),
        check_config=check_config,
        unsupported={
            "ep": "the model has no experts",
            "etp": "the model has no experts",
            "pp": "its decoder, on the last stage, has the embedding's weight, on the first",
        },
    )
