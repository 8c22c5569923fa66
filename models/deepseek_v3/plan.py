"""What tensor and context parallelism split of DeepSeek-V3."""

from torchtitan_ext.distributed.context_parallel import ContextParallelPlan
from torchtitan_ext.distributed.parallelize import ParallelPlan
from torchtitan_ext.distributed.tensor_parallel import TensorParallelPlan

PARALLEL_PLAN = ParallelPlan(
    tensor=TensorParallelPlan(
        # The latents of queries and keys are narrow: every rank computes them whole, for its own
        # heads.
        column=(
            "layers.*.attention.wq",
            "layers.*.attention.wq_b",
            "layers.*.attention.wkv_b",
            "layers.*.feed_forward.w1",
            "layers.*.feed_forward.w3",
            "layers.*.moe.shared_experts.w1",
            "layers.*.moe.shared_experts.w3",
            "output",
        ),
        row=(
            "layers.*.attention.wo",
            "layers.*.feed_forward.w2",
            "layers.*.moe.shared_experts.w2",
        ),
        regions=("layers.*.attention", "layers.*.feed_forward"),
        embedding="tok_embeddings",
        logits="output",
    ),
    context=ContextParallelPlan(
        attention="layers.*.attention.core",
        rotary=("layers.*.attention",),
    ),
)
