"""``python -m ds_ckpt_sidecar``: the ``ds-ckpt`` command."""

from ds_ckpt_sidecar.cli import main

main()
