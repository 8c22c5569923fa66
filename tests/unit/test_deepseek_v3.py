"""DeepSeek-V3: equal to Hugging Face's, with the published sizes, and single-device code."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
from models.deepseek_v3 import FLAVORS, DeepSeekV3Model, DeepSeekV3ModelArgs, get_train_spec
from torchtitan_ext.moe import MoEArgs

REPOSITORY = Path(models.__file__).parents[1]
SEQ_LEN = 40


def small_args(moe: dict[str, Any] | None = None, **changes: Any) -> DeepSeekV3ModelArgs:
    """One dense and two MoE layers, with widths that all differ."""
    moe_numbers: dict[str, Any] = {
        "num_experts": 8,
        "num_shared_experts": 2,
        "top_k": 3,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 2.5,
    }
    numbers: dict[str, Any] = {
        "vocab_size": 96,
        "dim": 48,
        "inter_dim": 80,
        "moe_inter_dim": 24,
        "n_layers": 3,
        "n_dense_layers": 1,
        "n_heads": 4,
        "q_lora_rank": 0,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16,
        "v_head_dim": 8,
        "max_seq_len": 64,
        "original_seq_len": 64,
        "rope_theta": 100.0,
    }
    return DeepSeekV3ModelArgs(
        **(numbers | changes), moe_args=MoEArgs(**(moe_numbers | (moe or {})))
    )


def random_model(args: DeepSeekV3ModelArgs) -> DeepSeekV3Model:
    """Weights large enough to make attention and routing far from uniform, norms other than 1."""
    model = DeepSeekV3Model(args)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            elif name != "tok_embeddings.weight":
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.normal_(std=0.1)
    return model


# The same numbers in Hugging Face's words ----------------------------------------------------


def hugging_face_numbers(args: DeepSeekV3ModelArgs) -> dict[str, Any]:
    moe = args.moe_args
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.uses_yarn:
        rope |= {
            "rope_type": "yarn",
            "factor": args.rope_factor,
            "original_max_position_embeddings": args.original_seq_len,
            "beta_fast": args.beta_fast,
            "beta_slow": args.beta_slow,
            "mscale": args.mscale,
            "mscale_all_dim": args.mscale,
        }
    return {
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.inter_dim,
        "moe_intermediate_size": args.moe_inter_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_heads,
        "n_shared_experts": moe.num_shared_experts,
        "n_routed_experts": moe.num_experts,
        "routed_scaling_factor": moe.route_scale,
        "kv_lora_rank": args.kv_lora_rank,
        "q_lora_rank": args.q_lora_rank or None,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "n_group": moe.num_expert_groups,
        "topk_group": moe.num_limited_groups,
        "num_experts_per_tok": moe.top_k,
        "first_k_dense_replace": args.n_dense_layers,
        "norm_topk_prob": moe.route_norm,
        "max_position_embeddings": args.max_seq_len,
        "rms_norm_eps": args.norm_eps,
        "rope_parameters": rope,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def adapter_of(model: DeepSeekV3Model) -> Any:
    return get_train_spec().state_dict_adapter(model.model_args, None)


def hugging_face_twin(model: DeepSeekV3Model, folder: Path) -> nn.Module:
    """Written to a folder by the adapter, read from it by transformers: nothing may be missing."""
    from safetensors.torch import save_file
    from transformers import (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
    )

    numbers = hugging_face_numbers(model.model_args)
    if model.model_args.moe_args.score_func == "sigmoid":
        config, model_class = DeepseekV3Config(**numbers, num_mtp_layers=0), DeepseekV3ForCausalLM
    else:
        config = DeepseekV2Config(**numbers, topk_method="group_limited_greedy")
        model_class = DeepseekV2ForCausalLM
    config.save_pretrained(folder)
    weights = adapter_of(model).to_hf(model.state_dict())
    weights = {name: value.contiguous() for name, value in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    twin, loading = model_class.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    for problems in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not loading[problems], (problems, loading[problems])
    return twin


def hugging_face_gradients(model: DeepSeekV3Model) -> dict[str, torch.Tensor]:
    """Our gradients under the twin's names, which stacks an expert's w1 and w3."""
    adapter, found = adapter_of(model), {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if ".experts." not in name:
            found |= adapter.to_hf({name: parameter.grad})
    for layer_id, layer in model.layers.items():
        if layer.moe_enabled:
            experts = layer.moe.experts
            prefix = f"model.layers.{layer_id}.mlp.experts"
            stacked = torch.cat([experts.w1.grad, experts.w3.grad], dim=1)
            found |= {f"{prefix}.gate_up_proj": stacked, f"{prefix}.down_proj": experts.w2.grad}
    return found


def assert_equals_twin(model: DeepSeekV3Model, folder: Path) -> None:
    twin = hugging_face_twin(model, folder)
    tokens = torch.randint(model.model_args.vocab_size, (2, SEQ_LEN))
    output = model(tokens)
    expected = twin(input_ids=tokens, use_cache=False).logits
    assert (output.logits - expected).abs().max() <= 1e-4 * expected.abs().max()

    # in every case some choice differs between tokens, or routing would not be tested
    assert all(len(set(counts)) > 1 for counts in output.tokens_per_expert.tolist())

    factor = torch.randn_like(expected)
    (output.logits * factor).sum().backward()
    (expected * factor).sum().backward()
    found = hugging_face_gradients(model)
    wanted = {name: parameter.grad for name, parameter in twin.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-4, f"{name}: {error:.1e} of the gradient's maximum"


YARN = {
    # pairs 0 and 1 keep their frequency, 5 and later are stretched, with a ramp between
    "a_ramp": {"original_seq_len": 64, "max_seq_len": 128, "beta_fast": 4, "mscale": 0.7},
    "almost_no_ramp": {"original_seq_len": 16, "max_seq_len": 64, "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(small_args(), id="plain"),
        pytest.param(small_args(q_lora_rank=28), id="query_latent"),
        pytest.param(
            small_args({"num_expert_groups": 4, "num_limited_groups": 2}), id="node_limited"
        ),
        pytest.param(small_args({"route_norm": False}), id="no_route_norm"),
        pytest.param(small_args({"num_shared_experts": 1}), id="one_shared_expert"),
        pytest.param(small_args(**YARN["a_ramp"]), id="yarn"),
        pytest.param(small_args(**YARN["almost_no_ramp"]), id="yarn_almost_no_ramp"),
        pytest.param(
            small_args(
                {"num_expert_groups": 4, "num_limited_groups": 2},
                q_lora_rank=28,
                **YARN["a_ramp"],
            ),
            id="node_limited_query_latent_yarn",
        ),
        pytest.param(small_args(n_dense_layers=0), id="all_moe"),
    ],
)
def test_logits_and_gradients_sigmoid_equal_hugging_face_v3(
    tmp_path: Path, args: DeepSeekV3ModelArgs
) -> None:
    assert_equals_twin(random_model(args), tmp_path)


SOFTMAX = {
    "score_func": "softmax",
    "route_norm": False,
    "route_scale": 1.5,
    "load_balance_coeff": 0.0,
}


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(small_args(SOFTMAX), id="plain"),
        pytest.param(
            small_args(
                SOFTMAX | {"num_expert_groups": 4, "num_limited_groups": 2},
                q_lora_rank=28,
                **YARN["a_ramp"],
            ),
            id="node_limited_query_latent_yarn",
        ),
    ],
)
def test_logits_and_gradients_softmax_equal_hugging_face_v2(
    tmp_path: Path, args: DeepSeekV3ModelArgs
) -> None:
    assert_equals_twin(random_model(args), tmp_path)


@pytest.mark.parametrize("q_lora_rank", [0, 28])
def test_from_hf_of_to_hf_is_the_identity(q_lora_rank: int) -> None:
    model = random_model(small_args(q_lora_rank=q_lora_rank))
    state = model.state_dict()
    there = adapter_of(model).to_hf(state)
    back = adapter_of(model).from_hf(there)
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(back[name], value), name


def test_forward_does_not_look_ahead() -> None:
    model = random_model(small_args())
    tokens = torch.randint(96, (1, SEQ_LEN))
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 96
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[0, :20], after[0, :20])
    assert not torch.allclose(before[0, 20:], after[0, 20:])


def test_counts_have_a_line_for_each_moe_layer() -> None:
    counts = random_model(small_args())(torch.randint(96, (2, SEQ_LEN))).tokens_per_expert
    assert counts.dtype == torch.int64
    assert counts.sum(1).tolist() == [2 * SEQ_LEN * 3] * 2
    dense = random_model(small_args(n_dense_layers=3))
    assert dense(torch.randint(96, (1, 4))).tokens_per_expert is None


# Sizes ----------------------------------------------------------------------------------------


def build_on_meta(args: DeepSeekV3ModelArgs) -> DeepSeekV3Model:
    with torch.device("meta"):
        return DeepSeekV3Model(args)


@pytest.mark.parametrize(
    ("flavor", "num_parameters", "num_active"),
    [
        # 15.7B, with 2.4B activated beyond the embedding of 0.2B (arXiv:2405.04434, appendix B)
        ("16B", 15_706_484_224, 2_661_150_208),
        # 671B, with 37B activated (arXiv:2412.19437, abstract)
        ("671B", 671_026_404_352, 37_552_282_624),
    ],
)
def test_flavor_has_the_published_size(flavor: str, num_parameters: int, num_active: int) -> None:
    args = FLAVORS[flavor]
    model = build_on_meta(args)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".moe.experts." in name)
    assert sum(sizes.values()) == num_parameters
    moe = args.moe_args
    assert sum(sizes.values()) - routed + routed * moe.top_k // moe.num_experts == num_active


def test_flavor_debug_dense_has_the_debug_models_active_size() -> None:
    args = FLAVORS["debugmodel"]
    sizes = {name: p.numel() for name, p in build_on_meta(args).named_parameters()}
    routed = sum(size for name, size in sizes.items() if ".moe.experts." in name)
    gates = sum(size for name, size in sizes.items() if ".router.gate." in name)
    first = sum(size for name, size in sizes.items() if ".feed_forward." in name)
    active = sum(sizes.values()) - routed + routed * args.moe_args.top_k // 8 - gates - first
    dense = build_on_meta(FLAVORS["debugmodel_dense"])
    first_dense = sum(p.numel() for p in dense.layers["0"].feed_forward.parameters())
    assert sum(p.numel() for p in dense.parameters()) - first_dense == active


@pytest.mark.parametrize("flavor", sorted(FLAVORS))
def test_flavor_is_built_anew_on_each_access(flavor: str) -> None:
    args = FLAVORS[flavor]
    before = asdict(args)
    args.max_seq_len = 7  # a run sets these
    args.moe_args.top_k = 2
    assert asdict(FLAVORS[flavor]) == before


def test_nparams_and_flops_count_parameters_once() -> None:
    args = small_args()
    model = DeepSeekV3Model(args)
    num_parameters, flops = args.get_nparams_and_flops(model, SEQ_LEN)
    assert num_parameters == sum(p.numel() for p in model.parameters())
    embedding = model.tok_embeddings.weight.numel()
    idle = 5 / 8 * sum(p.numel() for n, p in model.named_parameters() if ".experts.w" in n)
    attention = 6 * 3 * 4 * (28 + 8) * SEQ_LEN
    assert flops == pytest.approx(6 * (num_parameters - embedding - idle) + attention, rel=1e-6)


# Initial weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [small_args(q_lora_rank=28), small_args(n_dense_layers=0)])
def test_init_weights_after_meta_leaves_nothing_uninitialised(args: DeepSeekV3ModelArgs) -> None:
    model = build_on_meta(args).to_empty(device="cpu")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
        model.init_weights(buffer_device=torch.device("cpu"))
    plain = DeepSeekV3Model(args)
    plain.init_weights()
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert "rope" in found
    assert found.keys() == expected.keys() == tensors.keys()
    for name, value in found.items():
        assert value.device.type == "cpu", name
        assert value.isfinite().all(), name
        assert torch.equal(value, expected[name]), name


def test_buffers_are_made_on_the_device_they_are_asked_for() -> None:
    """With parameters on the host, buffers have to be where the forward runs."""
    model = DeepSeekV3Model(small_args())
    model.init_weights(buffer_device=torch.device("meta"))
    devices = {name: buffer.device.type for name, buffer in model.named_buffers()}
    assert any(name.endswith("expert_bias") for name in devices)
    assert set(devices.values()) == {"meta"}, devices
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_init_weights_depth_scales_what_writes_into_the_residual() -> None:
    model = DeepSeekV3Model(small_args(dim=64, vocab_size=512))
    model.init_weights()
    std = {
        name: parameter.std().item()
        for name, parameter in model.named_parameters()
        if parameter.numel() > 1000
    }
    assert std["tok_embeddings.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["output.weight"] == pytest.approx(64**-0.5, rel=0.05)
    for layer_id in range(3):
        residual = 0.02 / (2 * (layer_id + 1)) ** 0.5
        assert std[f"layers.{layer_id}.attention.wo.weight"] == pytest.approx(residual, rel=0.1)
        assert std[f"layers.{layer_id}.attention.wkv_b.weight"] == pytest.approx(0.02, rel=0.1)
    assert std["layers.2.moe.experts.w2"] == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert std["layers.2.moe.experts.w1"] == pytest.approx(0.02, rel=0.05)
    assert torch.all(model.norm.weight == 1)
    assert torch.all(model.layers["1"].attention.kv_norm.weight == 1)
    assert torch.all(model.layers["1"].moe.expert_bias == 0)


def test_init_weights_other_seed_gives_other_weights() -> None:
    first, second = DeepSeekV3Model(small_args()), DeepSeekV3Model(small_args(init_seed=1))
    first.init_weights()
    second.init_weights()
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b) == ("norm" in name), name


def test_rope_cache_is_longer_for_a_longer_sequence() -> None:
    args = small_args()
    longer = replace(args, max_seq_len=128, original_seq_len=128)
    short, long = DeepSeekV3Model(args).rope, DeepSeekV3Model(longer).rope
    assert short.shape == (64, 2, 8)
    assert torch.equal(long[:64], short)


# What a model may know -------------------------------------------------------------------------


def identifiers(source: str) -> set[str]:
    """Every name in the code: no comment, no docstring."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        for attribute in ("id", "attr", "arg", "name", "module", "asname"):
            value = getattr(node, attribute, None)
            if isinstance(value, str):
                found.add(value)
    return found


PARALLEL = re.compile(r"(?<!lora_)rank|mesh|process_group|world_size|distributed|dist$|DTensor")


@pytest.mark.parametrize("file", ["model.py", "rope.py", "args.py", "flavors.py"])
def test_model_code_knows_no_ranks(file: str) -> None:
    source = (REPOSITORY / "models" / "deepseek_v3" / file).read_text()
    assert not {name for name in identifiers(source) if PARALLEL.search(name)}


def test_import_models_needs_no_environment_and_no_network() -> None:
    code = """
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise RuntimeError(f"{event} {args}")
sys.addaudithook(refuse)
import models
from torchtitan.protocols.train_spec import get_train_spec
import torch.distributed as dist
print(get_train_spec("deepseek_v3").model_cls.__name__, dist.is_initialized())
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["DeepSeekV3Model", "False"]
