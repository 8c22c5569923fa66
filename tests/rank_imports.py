"""What every rank imports, loaded once by the server that ranks are forked from."""

import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed.checkpoint
import torch.profiler

import models
import torchtitan_ext.trainer

__all__ = ["models", "torch", "torchtitan_ext"]
