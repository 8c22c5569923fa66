"""Private names of torch and torchtitan that the project uses, and why: an upgrade checks here."""

import importlib

import pytest

PRIVATE_NAMES = {
    # A mesh per parameter has no public spelling in torch 2.13.
    "torch.distributed.fsdp._fully_shard._fsdp_common": [
        "FSDPMeshInfo",
        "HSDPMeshInfo",
        "ShardPlacementResult",
    ],
    # A reduce-scatter of our own for gloo; the public setter refuses a mesh per parameter.
    "torch.distributed.fsdp._fully_shard._fsdp_collectives": ["DefaultReduceScatter"],
    # DDP as FSDP2 does it, with its mixed precision and checkpoints.
    "torch.distributed._composable.replicate_with_fsdp": ["replicate"],
    # The all-to-all with a gradient, which compiles.
    "torch.distributed._functional_collectives": [
        "all_to_all_single",
        "all_to_all_single_autograd",
    ],
    # The wrapper that torch's state dictionaries see through.
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": ["checkpoint_wrapper"],
    "torch": ["_grouped_mm"],
    # To propose the nearest operator for a misspelt one, and to tell composite operators.
    "torch._C": ["_jit_get_all_schemas", "_dispatch_has_kernel_for_dispatch_key"],
    # What a schedule's file says, to refuse it before any process group exists.
    "torch.distributed.pipelining.schedules": [
        "_Action",
        "_ComputationType",
        "_add_send_recv",
        "_validate_schedule",
    ],
    # A backward in two parts must not give its saved tensors away in the first.
    "torch._functorch.config": ["donated_buffer"],
    # Registered models, to refuse torchtitan's own, which don't go through our wrapping.
    "torchtitan.protocols.train_spec": ["_extra_train_specs"],
    # The mapping to Hugging Face's names; the parameters are named as torchtitan names them.
    "torchtitan.models.deepseek_v3.model.state_dict_adapter": ["DeepSeekV3StateDictAdapter"],
}


def test_collectives_are_operators() -> None:
    """Policies name them, and the counts of all-to-alls in tests."""
    import torch

    for name in ("all_to_all_single", "wait_tensor", "reduce_scatter_tensor"):
        assert hasattr(torch.ops._c10d_functional, name)


@pytest.mark.parametrize("module", PRIVATE_NAMES)
def test_private_name_exists(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in PRIVATE_NAMES[module]:
        assert hasattr(loaded, name), f"{module}.{name}"


def test_fsdp_keeps_a_record_of_each_parameter() -> None:
    """What ``StateBytes`` reads: which copies of a parameter and its gradient a rank holds."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        module = fully_shard(torch.nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (2,)))
        module(torch.ones(1, 2))
        (group,) = module._get_fsdp_state()._fsdp_param_groups
        assert len(group.fsdp_params) == 2
        for param in group.fsdp_params:
            for name in ("sharded_param", "all_gather_outputs", "unsharded_accumulated_grad"):
                assert hasattr(param, name), name
            assert isinstance(param._unsharded_param, torch.Tensor)
    finally:
        dist.destroy_process_group()


def test_config_manager_merges_sections() -> None:
    """``_merge_configs`` adds our sections to torchtitan's configuration."""
    from torchtitan.config import ConfigManager, JobConfig

    from torchtitan_ext.config import JobConfig as OurSections

    merged = ConfigManager._merge_configs(JobConfig, OurSections)
    assert merged().layer_wrap.rules == []
    assert merged().metrics.log_experts is False
