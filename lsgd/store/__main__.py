"""``python -m lsgd.store``: uploads a node's files; ``lsgd launch --store`` starts it."""

from lsgd.store.upload import main

main()
