"""The models that can be trained. Importing this package registers them with torchtitan."""

import torchtitan_ext.device  # noqa: F401  isort:skip  comes before any other part of torchtitan

from torchtitan.protocols.train_spec import register_train_spec

from . import bert, deepseek_v3

register_train_spec("deepseek_v3", deepseek_v3.get_train_spec())
register_train_spec("bert", bert.get_train_spec())
