"""What tensor and context parallelism split of BERT."""

from torchtitan_ext.distributed.context_parallel import ContextParallelPlan
from torchtitan_ext.distributed.parallelize import ParallelPlan
from torchtitan_ext.distributed.tensor_parallel import TensorParallelPlan

PARALLEL_PLAN = ParallelPlan(
    tensor=TensorParallelPlan(
        column=(
            "layers.*.attention.wq",
            "layers.*.attention.wk",
            "layers.*.attention.wv",
            "layers.*.feed_forward.w1",
            "mlm_head.bias",
        ),
        row=("layers.*.attention.wo", "layers.*.feed_forward.w2"),
        regions=("layers.*.attention", "layers.*.feed_forward"),
        embedding="tok_embeddings",  # and the weight of the decoder
        logits="mlm_head",
        heads=("next_sentence_head",),
        positions=("position_embeddings", "token_type_embeddings"),
    ),
    context=ContextParallelPlan(
        attention="layers.*.attention.core",
        positions=("position_embeddings",),
        heads=("mlm_head", "next_sentence_head"),
    ),
)
