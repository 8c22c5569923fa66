"""DeepSeek-V3: a mixture of experts with multi-head latent attention."""

import functools

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter

from torchtitan_ext.components.loss import build_loss
from torchtitan_ext.components.metrics import build_metrics_processor
from torchtitan_ext.components.optimizer import build_optimizer
from torchtitan_ext.components.validate import TextValidator
from torchtitan_ext.data.text import build_text_dataloader, build_text_validation_dataloader
from torchtitan_ext.distributed.parallelize import parallelize
from torchtitan_ext.distributed.pipeline import pipeline
from torchtitan_ext.train_spec import ExtTrainSpec

from .args import DeepSeekV3ModelArgs
from .checks import check_config
from .flavors import FLAVORS
from .model import DeepSeekV3Model
from .plan import PARALLEL_PLAN

__all__ = ["FLAVORS", "DeepSeekV3Model", "DeepSeekV3ModelArgs", "get_train_spec"]


def get_train_spec() -> ExtTrainSpec:
    """Everything the trainer needs to know to train this model."""
    return ExtTrainSpec(
        model_cls=DeepSeekV3Model,
        model_args=FLAVORS,
        parallelize_fn=functools.partial(parallelize, plan=PARALLEL_PLAN),
        pipelining_fn=pipeline,
        build_optimizers_fn=build_optimizer,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_text_dataloader,
        build_tokenizer_fn=build_hf_tokenizer,
        build_loss_fn=build_loss,
        build_validator_fn=functools.partial(
            TextValidator, build_dataloader=build_text_validation_dataloader
        ),
        build_metrics_processor_fn=build_metrics_processor,
        # The names of parameters are torchtitan's, so its mapping to Hugging Face's fits.
        state_dict_adapter=DeepSeekV3StateDictAdapter,
        sections=frozenset({"routing"}),
        check_config=check_config,
    )
