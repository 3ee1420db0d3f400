"""lsgd: local SGD over ordinary networks.

Workers train with local SGD; two levels of small servers count their iterations and say when to talk.
Embed :class:`lsgd.client.Worker` in a training loop; start ``lsgd-server --global`` and ``lsgd-server --local``.
"""

__version__ = "0.1.0"
