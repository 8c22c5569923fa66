"""BERT is transformers' BERT: logits, losses and gradients; names; sizes; modes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torchtitan.config import JobConfig
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from models.bert import FLAVORS, BertModel, BertModelArgs, BertStateDictAdapter
from torchtitan_ext.components.loss import build_loss, next_sentence_loss
from torchtitan_ext.components.random_state import Place
from torchtitan_ext.model_output import ModelOutput

SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_seq_len": 24,
}
NO_DROPOUT = dict.fromkeys(["embedding_dropout", "attention_dropout", "residual_dropout"], 0.0)
IGNORED = -100


def build(**changes: Any) -> BertModel:
    model = BertModel(BertModelArgs(**{**SIZES, **NO_DROPOUT, **changes}))
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too, are to be told apart
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def build_theirs(cls: type[Any]) -> Any:
    config = BertConfig(
        vocab_size=SIZES["vocab_size"],
        hidden_size=SIZES["dim"],
        num_hidden_layers=SIZES["n_layers"],
        num_attention_heads=SIZES["n_heads"],
        intermediate_size=SIZES["hidden_dim"],
        max_position_embeddings=SIZES["max_seq_len"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return cls(config)


def adapter_of(model: BertModel) -> BertStateDictAdapter:
    return BertStateDictAdapter(model.model_args, None)


def batch(*, padded: bool) -> dict[str, torch.Tensor]:
    """Ragged: rows have 3, 1, 4 and 2 masked tokens, and other lengths if padded."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, SIZES["vocab_size"], (4, 16), generator=generator)
    labels = torch.full_like(tokens, IGNORED)
    positions = torch.zeros(4, 4, dtype=torch.int64)
    for row, masked in enumerate([[2, 5, 7], [1], [1, 3, 4, 8], [6, 9]]):
        labels[row, masked] = tokens[row, masked]
        positions[row, : len(masked)] = torch.tensor(masked)
        tokens[row, masked] = 4
    lengths = torch.tensor([16, 10, 12, 11]) if padded else torch.full((4,), 16)
    types = (torch.arange(16) >= 7).expand(4, -1).long()
    mask = torch.arange(16) < lengths[:, None]
    return {
        "tokens": tokens,
        "labels": labels,
        "masked_positions": positions,
        "token_types": types,
        "attention_mask": mask,
        "next_sentence_labels": torch.tensor([0, 1, 1, 0]),
    }


def assert_close(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    if name.endswith("wk.bias"):  # softmax ignores it: the gradient is rounding around zero
        assert actual.abs().max() < 1e-6 and expected.abs().max() < 1e-6
        return
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("next_sentence", [False, True])
def test_logits_losses_and_gradients_are_those_of_transformers(
    padded: bool, next_sentence: bool
) -> None:
    ours = build(next_sentence=next_sentence)
    theirs = build_theirs(BertForPreTraining if next_sentence else BertForMaskedLM)
    adapter = adapter_of(ours)
    missing, unexpected = theirs.load_state_dict(adapter.to_hf(ours.state_dict()), strict=False)
    assert not unexpected and set(missing) <= {
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    }
    theirs.tie_weights()
    data = batch(padded=padded)
    mask = data["attention_mask"]

    inputs = {"token_types": data["token_types"], "attention_mask": mask if padded else None}
    everywhere = ours(data["tokens"], **inputs)
    output = ours(data["tokens"], data["masked_positions"], **inputs)
    loss = build_loss(JobConfig())(output, data["labels"]) / (data["labels"] != IGNORED).sum()
    expected_inputs = {"labels": data["labels"]}
    if next_sentence:
        loss = loss + next_sentence_loss(output, data["next_sentence_labels"], Place()) / 4
        expected_inputs["next_sentence_label"] = data["next_sentence_labels"]
    expected = theirs(
        data["tokens"],
        attention_mask=mask.long(),
        token_type_ids=data["token_types"],
        **expected_inputs,
    )
    expected_logits = expected.prediction_logits if next_sentence else expected.logits
    assert_close(everywhere.logits[mask], expected_logits[mask], "logits")
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)
    if next_sentence:
        assert_close(output.next_sentence_logits, expected.seq_relationship_logits, "pairs")

    loss.backward()
    expected.loss.backward()
    gradients = adapter.from_hf({name: p.grad for name, p in theirs.named_parameters()})
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        assert_close(parameter.grad, gradients[name], name)


def test_logits_at_masked_positions_are_those_of_all_positions() -> None:
    model, data = build(), batch(padded=False)
    everywhere = model(data["tokens"]).logits
    output = model(data["tokens"], data["masked_positions"])
    index = data["masked_positions"].unsqueeze(-1).expand(-1, -1, SIZES["vocab_size"])
    torch.testing.assert_close(output.logits, everywhere.gather(1, index), rtol=1e-5, atol=1e-6)
    assert output.label_positions is data["masked_positions"]
    assert output.next_sentence_logits is None


def test_padding_changes_nothing_before_it() -> None:
    model, data = build(), batch(padded=True)
    short = model(data["tokens"][1:2, :10]).logits
    padded = model(data["tokens"][1:2], attention_mask=data["attention_mask"][1:2]).logits
    torch.testing.assert_close(padded[:, :10], short, rtol=1e-5, atol=1e-6)


# Names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_sentence", [False, True])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_names_survive_a_round_trip(flavor: str, next_sentence: bool) -> None:
    args = FLAVORS[flavor]
    args.next_sentence = next_sentence
    with torch.device("meta"):
        model = BertModel(args)
    state, adapter = model.state_dict(), adapter_of(model)
    again = adapter.from_hf(adapter.to_hf(state))
    assert list(again) == list(state)
    assert all(again[name] is state[name] for name in state)


@pytest.mark.parametrize("next_sentence", [False, True])
def test_names_are_those_of_transformers_files(tmp_path: Path, next_sentence: bool) -> None:
    model = build(next_sentence=next_sentence)
    theirs = build_theirs(BertForPreTraining)
    theirs.save_pretrained(tmp_path)
    adapter = adapter_of(model)
    wanted = adapter.to_hf(model.state_dict())
    dcp.load(wanted, storage_reader=adapter.get_hf_storage_reader(str(tmp_path)), no_dist=True)
    model.load_state_dict(adapter.from_hf(wanted))
    for name, value in adapter.from_hf(theirs.state_dict()).items():
        assert torch.equal(model.state_dict()[name], value), name


def test_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no parameter \"bert.encoder.layer.0.gate.weight"):
        adapter_of(build()).from_hf({"bert.encoder.layer.0.gate.weight": torch.zeros(1)})


# Weights, sizes, modes --------------------------------------------------------------------------


def test_initial_weights_follow_from_the_seed() -> None:
    models = [BertModel(BertModelArgs(**SIZES, init_seed=seed)) for seed in (3, 3, 4)]
    for model in models:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        model.init_weights()
    first, same, other = (dict(model.named_parameters()) for model in models)
    for name, value in first.items():
        assert torch.equal(value, same[name])
        if name.endswith("bias"):
            assert not value.any()
        elif name.endswith("norm.weight"):
            assert (value == 1).all()
        else:
            assert not torch.equal(value, other[name])
            if value.numel() > 1000:
                assert value.std().item() == pytest.approx(0.02, rel=0.1)


# Published sizes, which count the pooler.
@pytest.mark.parametrize(
    ("flavor", "millions"), [("tiny", 4.4), ("mini", 11.2), ("small", 28.8), ("base", 110.0)]
)
def test_number_of_parameters_is_the_published(flavor: str, millions: float) -> None:
    args = FLAVORS[flavor]
    args.next_sentence = True
    with torch.device("meta"):
        model = BertModel(args)
    num_parameters, _ = args.get_nparams_and_flops(model, 128)
    assert num_parameters == pytest.approx(millions * 1e6, rel=0.015)


def test_operations_are_those_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    args = BertModelArgs(**{**SIZES, **NO_DROPOUT, "max_seq_len": 100}, mask_probability=0.2)
    model = BertModel(args)
    model.init_weights()
    tokens, positions = torch.randint(0, 211, (2, 100)), torch.randint(0, 100, (2, 20))
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        F.cross_entropy(model(tokens, positions).logits.sum((0, 1)), torch.tensor(3)).backward()
    _, operations = args.get_nparams_and_flops(model, 100)
    assert operations * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize("site", list(NO_DROPOUT))
def test_each_dropout_is_drawn_in_training_alone(site: str) -> None:
    model, tokens = build(**{site: 0.1}), torch.randint(0, 211, (2, 16))
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_model_keeps_its_type(dtype: torch.dtype) -> None:
    model = build(next_sentence=True).to(dtype)
    output = model(batch(padded=True)["tokens"])
    assert output.logits.dtype == output.next_sentence_logits.dtype == dtype
    (output.logits.sum() + output.next_sentence_logits.sum()).backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize(
    ("place", "value", "gradient"),
    [(Place(), 1.0, 1.0), (Place(tensor=1), 1.0, 0.0), (Place(context=1, tensor=1), 0.0, 0.0)],
)
def test_next_sentence_counts_once(place: Place, value: float, gradient: float) -> None:
    """Losses are summed over context parallel ranks, gradients over tensor parallel ones, too."""
    logits = torch.randn(4, 2, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 0])
    output = ModelOutput(torch.empty(0), next_sentence_logits=logits)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    found = next_sentence_loss(output, labels, place)
    torch.testing.assert_close(found, expected * value)
    (wanted,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], wanted * gradient)
