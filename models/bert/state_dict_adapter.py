"""Names of BERT's parameters here and in Hugging Face's transformers."""

import re
from typing import Any

from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from .args import BertModelArgs

# Modules, and parameters that belong to none of them; {} is the layer's number.
_TO_HF = {
    "tok_embeddings": "bert.embeddings.word_embeddings",
    "position_embeddings": "bert.embeddings.position_embeddings",
    "token_type_embeddings": "bert.embeddings.token_type_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "layers.{}.attention.wq": "bert.encoder.layer.{}.attention.self.query",
    "layers.{}.attention.wk": "bert.encoder.layer.{}.attention.self.key",
    "layers.{}.attention.wv": "bert.encoder.layer.{}.attention.self.value",
    "layers.{}.attention.wo": "bert.encoder.layer.{}.attention.output.dense",
    "layers.{}.attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "layers.{}.feed_forward.w1": "bert.encoder.layer.{}.intermediate.dense",
    "layers.{}.feed_forward.w2": "bert.encoder.layer.{}.output.dense",
    "layers.{}.ffn_norm": "bert.encoder.layer.{}.output.LayerNorm",
    "mlm_head.dense": "cls.predictions.transform.dense",
    "mlm_head.norm": "cls.predictions.transform.LayerNorm",
    "mlm_head": "cls.predictions",
    "next_sentence_head.pooler": "bert.pooler.dense",
    "next_sentence_head.classifier": "cls.seq_relationship",
}
_FROM_HF = {hf_name: name for name, hf_name in _TO_HF.items()}

# In Hugging Face's state dictionaries, but no parameters of their own.
_DERIVED = re.compile(r"cls\.predictions\.decoder\.|.*\.position_ids$")
_NEXT_SENTENCE = "next_sentence_head."


class BertStateDictAdapter(StateDictAdapter):
    """Renames; tensors, and shards of them, stay as they are."""

    def __init__(self, model_args: BertModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self._next_sentence = model_args.next_sentence

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns the parameters under the names of ``BertForPreTraining``.

        The decoder's weight is not among them, as in Hugging Face's files: it is the embedding's.
        """
        return {_rename(name, _TO_HF): value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """The inverse of ``to_hf``; leaves out a next-sentence head that the model doesn't have.

        Raises:
            ValueError: a name is not one of BertForPreTraining's.
        """
        names = {
            hf_name: _rename(hf_name, _FROM_HF)
            for hf_name in hf_state_dict
            if not _DERIVED.match(hf_name)
        }
        return {
            name: hf_state_dict[hf_name]
            for hf_name, name in names.items()
            if self._next_sentence or not name.startswith(_NEXT_SENTENCE)
        }


def _rename(name: str, names: dict[str, str]) -> str:
    module, _, leaf = name.rpartition(".")
    layer = re.search(r"\.(\d+)\.", module)
    pattern = module if layer is None else module.replace(layer[0], ".{}.", 1)
    if pattern not in names:
        raise ValueError(f'BERT has no parameter "{name}"')
    return f"{names[pattern].format(layer and layer[1])}.{leaf}"
