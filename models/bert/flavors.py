"""The sizes of BERT that can be trained, by name: the published miniatures (arXiv:1908.08962)."""

from torchtitan_ext.flavors import Flavors

from .args import BertModelArgs


def _tiny() -> BertModelArgs:
    return BertModelArgs(n_layers=2, dim=128, n_heads=2, hidden_dim=512)


def _mini() -> BertModelArgs:
    return BertModelArgs(n_layers=4, dim=256, n_heads=4, hidden_dim=1024)


def _small() -> BertModelArgs:
    return BertModelArgs(n_layers=4, dim=512, n_heads=8, hidden_dim=2048)


def _base() -> BertModelArgs:
    return BertModelArgs(n_layers=12, dim=768, n_heads=12, hidden_dim=3072)


FLAVORS = Flavors({"tiny": _tiny, "mini": _mini, "small": _small, "base": _base})
